"""What plans promise beside the runtime's own schedulers in virtual time.

    python -m benchmarks.reproduction.latency_bounds promises [--cases 12] [--named]

Each case is a model on a cluster of the paper with lengths of one kind; schedules are searched for
at bounds between the least latency and that of the most throughput. Then the plan's requests go
through the schedulers of `actors`, which decide every pass; only the seconds of passes are the
planner's. Lengths are drawn with another seed than the plan's.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from actors.handover.ledger import DividedLedger, PrefillPace
from actors.messages import Finished, MicroBatch, Progress, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler, exegpt_sizes
from actors.schedule.exegpt_waa import (
    DecodeScheduler,
    PrefillScheduler,
    decode_sizes,
    prefill_sizes,
)
from benchmarks.lab import ROOT, header, processor_name, table_row
from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_plan import bounded_options, bounded_plan, costs_beside_bound
from planner.latency_bound.bounded_search import BoundedSearch, Scheduled
from planner.latency_bound.rra import RraSpace
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.latency_bound.simulate import DrawnRequest, PipelineOfRequests, drawn_requests
from planner.latency_bound.waa import WaaSpace
from planner.lengths import LengthDistribution, RequestLengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.scheduling import SCHEDULE_KINDS, ScheduleKind
from planner.search.request import PlanningRequest
from quant.common.errors import BoundNotMetError, InfeasibleError

SETTLING, TAIL = 3, 3
"""Times the requests in flight that begin before those that count, and after them."""
AHEAD = 256
"""Requests that a scheduler is given when it wants more."""
SEED = 77
_SAMPLING = Sampling(ignore_eos=True)


class _Stages:
    """Stages in virtual time: a handle is when the micro-batch is back."""

    def __init__(self, pipeline: PipelineOfRequests, requests: Sequence[DrawnRequest]) -> None:
        self.stages = pipeline.stages
        self._pipeline, self._requests = pipeline, requests
        self.now_s = 0.0
        self.backs_s: deque[float] = deque()
        self.began_s: dict[int, float] = {}
        self._missing: dict[int, int] = {}

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        for each in batch.admitted:
            number = int(each.custom_id)
            self.began_s.setdefault(number, self.now_s)
            answer = min(self._requests[number].output, each.max_new_tokens)
            self._missing[each.slot] = answer - len(each.generated)
        if batch.kind == "decode":
            copied = [each.tokens for each in batch.restores]
            tokens = int(batch.starts.sum())
            back_s = self._pipeline.decode(len(batch.slots), tokens, self.now_s, copied)
        else:
            kept = [each.tokens for each in batch.keeps]
            back_s = self._pipeline.prefill(batch.counts.tolist(), self.now_s, kept)
        self.backs_s.append(back_s)
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        self.now_s = max(self.now_s, self.backs_s.popleft())
        ended = []
        for slot in handle.slots.tolist():
            self._missing[slot] -= 1
            ended.append(None if self._missing[slot] else "length")
        return Sampled(np.zeros(len(ended), dtype=np.int64), tuple(ended))


@dataclass
class _Run:
    """When requests began and ended, by number."""

    began_s: dict[int, float]
    ended_s: dict[int, float] = field(default_factory=dict)

    def end(self, finished: Sequence[Finished], now_s: float) -> None:
        self.ended_s.update((int(each.custom_id), now_s) for each in finished)


def requests_of(drawn: Sequence[DrawnRequest], longest: int) -> Iterator[Request]:
    """A request for each that was drawn, which may have the longest answer."""
    texts: dict[int, tuple[int, ...]] = {}
    for number, each in enumerate(drawn):
        text = texts.setdefault(each.prompt, (1,) * each.prompt)
        yield Request(str(number), text, longest, _SAMPLING)


def run_in_turns(plan: PlanSpec, scheduled: Scheduled, drawn: Sequence[DrawnRequest]) -> _Run:
    space = scheduled.placed
    assert isinstance(space, RraSpace)
    stages = _Stages(PipelineOfRequests(space.placement.exact_times), drawn)
    scheduler = RraScheduler(exegpt_sizes(plan, plan.policy), stages.stages)
    driver, run = PipelineDriver(scheduler, stages), _Run(stages.began_s)
    coming = requests_of(drawn, space.request.lengths.outputs.longest)
    left = deque(coming)
    while True:
        if left and driver.wants_requests:
            driver.add([left.popleft() for _ in range(min(AHEAD, len(left)))])
        elif driver.submit_next() is None:
            if not driver.under_way:
                return run
            finished = driver.take_back()[2]
            run.end(finished, stages.now_s)


class _Side(Protocol):
    now_s: float


def run_divided(plan: PlanSpec, scheduled: Scheduled, drawn: Sequence[DrawnRequest]) -> _Run:
    space, prefill_plan = scheduled.placed, plan.prefill_plan
    assert isinstance(space, WaaSpace)
    assert prefill_plan is not None
    sides, handover = space.sides, space.sides.handover
    before = prefill_sizes(prefill_plan, plan.policy)
    after = decode_sizes(plan, plan.policy)
    first = _Stages(PipelineOfRequests(space.prefill.exact_times, handover.keep), drawn)
    then = _Stages(PipelineOfRequests(space.decode.exact_times, handover.restore), drawn)
    prefill = PipelineDriver(PrefillScheduler(before, first.stages), first)
    decode = PipelineDriver(DecodeScheduler(after, then.stages), then)
    pace = PrefillPace(plan.policy.followed_schedule, first.stages, before, after)
    now_s = 0.0
    ledger = DividedLedger(pace, count(), lambda: now_s)
    run = _Run(first.began_s)
    left = deque(requests_of(drawn, sides.lengths.outputs.longest))
    moving: list[tuple[float, int, tuple[str, ...], tuple[int, ...]]] = []
    moved_s, serial = 0.0, count()
    while True:
        while left and ledger.wanted:
            ledger.add(left.popleft())
        first.now_s = then.now_s = now_s
        while True:
            to_prefill, to_decode = ledger.begin()
            assert not to_decode, "nobody is too long for the stages that prefill"
            if not to_prefill:
                break
            prefill.add(to_prefill)
            while left and ledger.wanted:
                ledger.add(left.popleft())
        for driver in (prefill, decode):
            while driver.submit_next() is not None:
                pass
        heads = [
            (then.backs_s[0], 0) if then.backs_s else (np.inf, 0),
            (moving[0][0], 1) if moving else (np.inf, 1),
            (first.backs_s[0], 2) if first.backs_s else (np.inf, 2),
        ]
        now_s, side = min(heads)
        if now_s == np.inf:
            return run
        first.now_s = then.now_s = now_s
        if side == 0:
            finished = decode.take_back()[2]
            ledger.decoded([Progress(f.custom_id, (0,), f.finish_reason) for f in finished])
            run.end(finished, now_s)
        elif side == 1:
            _, _, names, numbers = heapq.heappop(moving)
            requests = ledger.moved(names, set(numbers), 0)
            decode.expect(requests)
            decode.add(requests)
        else:
            told, ended = _prefilled(prefill.take_back()[2], drawn)
            _, names, _ = ledger.prefilled(told)
            run.ended_s.update((int(n), now_s) for n in ended)
            if names:
                tokens = ledger.prompt_tokens_of(names)
                moved_s = max(moved_s, now_s) + handover.sent_s(len(names), tokens)
                numbers = tuple(ledger.number_of(name) for name in names)
                heapq.heappush(moving, (moved_s, next(serial), names, numbers))


def _prefilled(
    finished: Sequence[Finished], drawn: Sequence[DrawnRequest]
) -> tuple[list[Progress], list[str]]:
    """What the stages that prefill tell of `finished`, and which of them have one token alone."""
    reasons = {each.custom_id: each.finish_reason for each in finished}
    ended = [name for name in reasons if drawn[int(name)].output == 1]
    told = [Progress(n, (0,), "stop" if n in ended else why) for n, why in reasons.items()]
    return told, ended


@dataclass(frozen=True)
class Seen:
    """What came of a plan: requests a second and the latency at the quantile."""

    requests_per_s: float
    latency_s: float


def seen_by_runtime(plan: PlanSpec, scheduled: Scheduled, requests: int, seed: int = SEED) -> Seen:
    """Run a plan's schedule by the runtime's schedulers, over so many requests that count."""
    schedule, lengths = scheduled.schedule, scheduled.placed.request.lengths
    rng = np.random.default_rng(seed)
    more = max(schedule.decode_requests, 4 * schedule.prefill_requests)
    total = (SETTLING + TAIL) * more + requests
    drawn = drawn_requests(lengths, total, rng)
    run = (run_divided if schedule.divides else run_in_turns)(plan, scheduled, drawn)
    assert len(run.ended_s) == total, "all have ended"
    counted = range(SETTLING * more, SETTLING * more + requests)
    latencies = [run.ended_s[each] - run.began_s[each] for each in counted]
    ends = np.sort(list(run.ended_s.values()))[counted.start : counted.stop]
    per_request_s = np.polyfit(np.arange(len(ends)), ends, 1)[0]
    return Seen(1 / per_request_s, float(np.quantile(latencies, scheduled.placed.request.quantile)))


def _mixture(*parts: tuple[float, LengthDistribution]) -> LengthDistribution:
    chances: dict[int, float] = {}
    for share, each in parts:
        for length, chance in zip(each.lengths, each.probabilities, strict=True):
            chances[length] = chances.get(length, 0.0) + share * chance
    return LengthDistribution(*zip(*sorted(chances.items()), strict=True))


_normal = LengthDistribution.truncated_normal


def _lognormal(mean: float, sigma: float, longest: int) -> LengthDistribution:
    sample = np.random.default_rng(5).lognormal(np.log(mean) - sigma**2 / 2, sigma, 20_000)
    return LengthDistribution.of_sample(np.clip(sample.astype(np.int64), 1, longest))


def _constant(length: int) -> LengthDistribution:
    return LengthDistribution((length,), (1.0,))


LENGTHS = {
    "constant": RequestLengths(_constant(512), _constant(100)),
    "normal": RequestLengths(_normal(256, 252, 512), _normal(32, 13, 80)),
    "short answers": RequestLengths(_lognormal(512, 0.7, 1536), _lognormal(12, 0.8, 64)),
    "bimodal": RequestLengths(
        _mixture((0.5, _normal(96, 32, 192)), (0.5, _normal(900, 128, 1200))),
        _mixture((0.5, _normal(16, 6, 32)), (0.5, _normal(200, 40, 320))),
    ),
    "long tail": RequestLengths(_lognormal(200, 1.0, 1024), _lognormal(60, 1.1, 1024)),
}

NAMED = (
    ("opt-66b", "paper_06", "bimodal", "rra", 10.7),
    ("opt-66b", "paper_06", "bimodal", "rra", 25.0),
    ("opt-66b", "paper_09", "short answers", "rra", 16.2),
    ("opt-30b", "paper_09", "short answers", "rra", 4.29),
    ("opt-30b", "paper_09", "constant", "waa-c", 5.24),
    ("opt-13b", "paper_10", "long tail", "rra", 32.6),
)
SHARES = (0.02, 0.15, 0.35, 0.6)
"""Of the way (in logarithms) from the least latency to that of the most throughput."""


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    lengths: str
    kind: ScheduleKind


def search_of(case: Case, limit_s: float) -> tuple[BoundedSearch, PlanningRequest, BoundRequest]:
    cluster = ClusterSpec.from_yaml(ROOT / "cluster_specs" / f"{case.cluster}.yaml")
    request = BoundRequest(LENGTHS[case.lengths], None, kinds=(case.kind,))
    options = bounded_options(PlanOptions(search_time_limit=limit_s))
    planned = PlanningRequest.of(cluster, model_shape(case.model), job_of(request), options)
    costs, _ = costs_beside_bound(planned)
    return BoundedSearch(costs, request, time.process_time), planned, request


def rows(
    case: Case, bounds_s: Sequence[float] | None, requests: int, limit_s: float
) -> Iterator[str]:
    try:
        search, planned, _ = search_of(case, limit_s)
        if bounds_s is None:
            fastest = search.within(np.inf)
            least = search.least
            assert least is not None
            low, high = np.log(least[0]), np.log(fastest.latency_s)
            bounds_s = np.exp(low + np.array(SHARES) * (high - low)).tolist()
    except InfeasibleError as error:
        yield f"| {case} | {str(error)[:100]} |"
        return
    costs, omega = costs_beside_bound(planned)
    for bound_s in bounds_s:
        began_s = time.process_time()
        try:
            scheduled = search.within(bound_s)
        except BoundNotMetError as error:
            yield f"| {case} | {bound_s:.2f} | {str(error)[:100]} |"
            continue
        took_s = time.process_time() - began_s
        plan = bounded_plan(scheduled, costs, case.model, omega.source)
        seen = seen_by_runtime(plan, scheduled, requests)
        s = scheduled.schedule
        groups = (
            f"{s.prefill_requests}/{s.decode_requests}/{s.decode_steps}/{s.decode_micro_batches}"
        )
        yield table_row(
            [
                case.model,
                case.cluster,
                case.lengths,
                s.kind,
                groups,
                f"{bound_s:.2f}",
                f"{scheduled.latency_s:.2f}",
                f"{seen.latency_s:.2f}",
                f"{seen.latency_s / scheduled.latency_s:.3f}",
                f"{seen.latency_s / bound_s:.3f}",
                f"{scheduled.requests_per_s:.3f}",
                f"{seen.requests_per_s / scheduled.requests_per_s:.3f}",
                f"{scheduled.placed.omega:.4g}",
                f"{took_s:.1f}",
            ]
        )


MODELS_ON = (
    ("opt-13b", "paper_01"),
    ("opt-13b", "paper_10"),
    ("opt-30b", "paper_09"),
    ("opt-30b", "paper_05"),
    ("opt-30b", "paper_10"),
    ("opt-66b", "paper_06"),
    ("opt-66b", "paper_10"),
)


def random_cases(number: int) -> list[Case]:
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(number):
        model, cluster = MODELS_ON[rng.integers(len(MODELS_ON))]
        lengths = tuple(LENGTHS)[rng.integers(len(LENGTHS))]
        kind = SCHEDULE_KINDS[0] if rng.random() < 0.6 else SCHEDULE_KINDS[rng.integers(1, 3)]
        cases.append(Case(model, cluster, lengths, kind))
    return cases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--search_time_limit", type=float, default=20.0)


def run(options: argparse.Namespace) -> None:
    print(processor_name())
    print(
        header(
            "model | cluster | lengths | kind | B_E/B_D/N_D/groups | bound | planned 99 % | "
            "runtime | over planned | over bound | planned req/s | runtime over planned | omega | "
            "search s"
        ),
        flush=True,
    )
    limits = options.requests, options.search_time_limit
    if options.named:
        for model, cluster, lengths, kind, bound_s in NAMED:
            for line in rows(Case(model, cluster, lengths, kind), [bound_s], *limits):
                print(line, flush=True)
    for case in random_cases(options.cases):
        for line in rows(case, None, *limits):
            print(line, flush=True)
