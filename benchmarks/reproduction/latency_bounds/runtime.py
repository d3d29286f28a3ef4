"""Requests of a plan through the schedulers of `actors` in virtual time: these decide every pass;
the planner knows its seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from actors.handover.ledger import DividedLedger, PrefillPace
from actors.messages import (
    Finished,
    MicroBatch,
    Progress,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler, exegpt_sizes
from actors.schedule.exegpt_waa import (
    DecodeScheduler,
    PrefillScheduler,
    decode_sizes,
    prefill_sizes,
)
from planner.latency_bound.judged import Scheduled
from planner.latency_bound.placed_layers import PipelineOfRequests
from planner.latency_bound.rra import RraSpace
from planner.latency_bound.simulate import (
    DrawnRequest,
    ObservedRequests,
    drawn_requests,
)
from planner.latency_bound.waa import WaaSpace
from planner.plan.spec import PlanSpec

SETTLING, TAIL = 3, 1
"""Times the requests in flight that begin before those that count, and after them."""
AHEAD = 256
"""Requests that a scheduler is given when it wants more."""
SEED, OTHER_SEED = 0, 77
"""Of the requests by which plans are judged, and of others."""
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
        backs_s = then.backs_s, [each[0] for each in moving[:1]], first.backs_s
        now_s, side = min((each[0] if each else np.inf, i) for i, each in enumerate(backs_s))
        if now_s == np.inf:
            return run
        first.now_s = then.now_s = now_s
        if side == 0:
            batch, _, finished = decode.take_back()
            reasons = dict.fromkeys(each.custom_id for each in batch.admitted)
            reasons |= {each.custom_id: each.finish_reason for each in finished}
            # those that joined have left the hosts' memory
            ledger.decoded([Progress(name, (0,), reason) for name, reason in reasons.items()])
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


def seen_by_runtime(
    plan: PlanSpec, scheduled: Scheduled, requests: int, seed: int = OTHER_SEED
) -> ObservedRequests:
    """What the runtime's schedulers make of a plan's schedule, over so many requests that count."""
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
    answers = [drawn[each].output for each in counted]
    return ObservedRequests.of(1 / float(per_request_s), latencies, answers, lengths.outputs)
