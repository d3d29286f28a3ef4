"""Jobs of rows in virtual time, and what reserves KV memory in them: the longest answer,
predictions, or blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from actors.messages import Admission, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import make_scheduler
from benchmarks.reproduction.lengths.on_demand import OnDemandScheduler
from benchmarks.reproduction.lengths.rows import IntArray, Rows
from benchmarks.reproduction.orca.pipelines import ModelledPipeline
from benchmarks.reproduction.orca.virtual_time import VirtualClock, VirtualPipeline
from planner.costs.machine import LAUNCH_S
from planner.costs.stored_bytes import kv_token_bytes
from planner.model.finding import model_shape
from planner.plan.modelled_times import ModelledTimes
from planner.scheduling import PolicyName
from planner.workload import holes_of
from quant.scheme import FULL_BITS

T = TypeVar("T")

AT_ONCE = 256
"""Rows that a scheduler is given when it wants more."""


@dataclass(frozen=True)
class CacheCosts:
    """Seconds of the slowest stage for each token that is moved within its KV cache, and for each
    that goes to host memory or comes back; and to start the moves of a micro-batch.
    """

    move_s: float
    park_s: float
    moving_s: float = 0.0


@dataclass
class JobRun:
    """What a job took: seconds of virtual time, those of the scheduler's own Python, iterations,
    and the requests that held memory in each of them; tokens that were moved and parked, the
    seconds of both, how often a request was preempted, and the tokens that were computed again for
    that; seconds of each row from when it was admitted, for each of its tokens.
    """

    tokens: int
    seconds: float = 0.0
    scheduler_s: float = 0.0
    held: list[int] = field(default_factory=list)
    moved: int = 0
    parked: int = 0
    preemptions: int = 0
    computed_again: int = 0
    copies_s: float = 0.0
    token_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens a second."""
        return self.tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        """Requests that held memory, in the mean over iterations."""
        return float(np.mean(self.held))


class _Pipeline(VirtualPipeline):
    """Stages that count and time what their caches do."""

    def __init__(
        self, times: Sequence[ModelledTimes], clock: VirtualClock, rows: Rows, costs: CacheCosts
    ) -> None:
        super().__init__(times, clock, self._answer)
        self._answers = rows.answers.tolist()
        self._costs = costs
        self.moved = self.parked = 0
        self.copies_s = 0.0
        self.began_s: dict[str, float] = {}

    def _answer(self, admission: Admission) -> int:
        return int(self._answers[int(admission.custom_id)])

    def beside_s(self, batch: MicroBatch) -> float:
        moved = sum(move.tokens for move in batch.moves)
        parked = sum(each.tokens for each in (*batch.parks, *batch.restores))
        self.moved += moved
        self.parked += parked
        for each in batch.admitted:
            self.began_s.setdefault(each.custom_id, self._clock.now_s)
        costs = self._costs
        beside_s = moved * costs.move_s + parked * costs.park_s + bool(moved) * costs.moving_s
        self.copies_s += beside_s
        return beside_s


SAMPLED = 17
"""One of so many calls is timed: reading a thread's clock takes as long as scheduling."""


class _Timed:
    """A scheduler whose own seconds are sampled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.seconds = 0.0
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        return self._sampled(self.scheduler.next_batch)

    def complete(self, batch: MicroBatch, sampled: Sampled) -> object:
        return self._sampled(lambda: self.scheduler.complete(batch, sampled))

    def _sampled(self, call: Callable[[], T]) -> T:
        self._calls += 1
        if self._calls % SAMPLED:
            return call()
        began_s = time.thread_time()
        done = call()
        self.seconds += SAMPLED * (time.thread_time() - began_s)
        return done


def requests_of(rows: Rows, expected: IntArray | None) -> list[Request]:
    """A request for each row, whose answer may have all of the limit; `expected` [rows]."""
    sampling = Sampling()
    return [
        Request(
            str(number),
            (1,) * prompt,
            rows.limit,
            sampling,
            expected_tokens=None if expected is None else int(expected[number]),
        )
        for number, prompt in enumerate(rows.prompts.tolist())
    ]


def run_job(
    scheduler: Scheduler,
    times: Sequence[ModelledTimes],
    rows: Rows,
    expected: IntArray | None,
    costs: CacheCosts,
) -> JobRun:
    """Run all `rows` to their end; RuntimeError where not all of them end as they should."""
    clock = VirtualClock()
    timed = _Timed(scheduler)
    pipeline = _Pipeline(times, clock, rows, costs)
    driver = PipelineDriver(timed, pipeline)  # type: ignore[arg-type]  # delegates the others
    requests = requests_of(rows, expected)
    run = JobRun(int(rows.answers.sum()))
    given, ended = 0, 0
    while given < len(requests) or scheduler.waiting or scheduler.in_slots:
        while scheduler.wants_requests and given < len(requests):
            part = requests[given : given + AT_ONCE]
            given += len(part)
            driver.add(part)
        if driver.submit_next() is not None:
            run.held.append(scheduler.in_slots)
            continue
        for finished in driver.take_back()[2]:
            ended += 1
            taken_s = clock.now_s - pipeline.began_s[finished.custom_id]
            run.token_s.append(taken_s / len(finished.token_ids))
            if len(finished.token_ids) != rows.answers[int(finished.custom_id)]:
                raise RuntimeError(f"row {finished.custom_id} ended early, or late")
    if ended != len(rows):
        raise RuntimeError(f"{ended} of {len(rows)} rows have ended")
    run.seconds, run.scheduler_s = clock.now_s, timed.seconds
    run.moved, run.parked = pipeline.moved, pipeline.parked
    run.copies_s = pipeline.copies_s
    run.preemptions, run.computed_again = _preempted(scheduler)
    return run


def _preempted(scheduler: Scheduler) -> tuple[int, int]:
    """How often a request was preempted, and the tokens that were computed again."""
    if isinstance(scheduler, OnDemandScheduler):
        return scheduler.preemptions, scheduler.computed_again
    if isinstance(scheduler, S3Scheduler):
        done = scheduler.supervision
        return done.parked + done.recomputed, done.recomputed_tokens
    return 0, 0


MOST_BATCH_TOKENS = 2048
"""Tokens of a micro-batch: more prompt tokens wait, so that decode steps do not."""
HOST_BYTES = 64 << 30
"""Host memory of each stage for keys and values of requests that were preempted."""
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Sizes of micro-batches that are tried on pipelines, in even shares of the requests in flight."""
BALANCED = 160
"""Requests whose step takes an A100 as long to compute as to read the weights. With more at once a
job is hardly faster, and its end longer; so on one stage these and twice as many are tried too."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The KV memory of a pipeline, of which `kv_tokens` token slots are used."""

    pipeline: ModelledPipeline
    kv_tokens: int

    @cached_property
    def costs(self) -> CacheCosts:
        """Those of the stage that takes longest for each."""
        gpus = [stage.kind for stage in self.pipeline.plan.stages]
        held = self._token_bytes
        return CacheCosts(
            max(2 * b / gpu.memory_bytes_per_s for b, gpu in zip(held, gpus, strict=True)),
            max(b / gpu.host_link_bytes_per_s for b, gpu in zip(held, gpus, strict=True)),
            # keys and values are read and written by a kernel each
            4 * LAUNCH_S * max(len(stage.layers) for stage in self.pipeline.plan.stages),
        )

    @property
    def parked_tokens(self) -> int:
        """Tokens for which every stage has host memory."""
        return HOST_BYTES // max(self._token_bytes)

    @cached_property
    def _token_bytes(self) -> list[int]:
        """Bytes of a token's keys and values on each stage."""
        shape = model_shape(self.pipeline.setting.model)
        return [
            kv_token_bytes(shape, FULL_BITS, stage.dtype) * len(stage.layers)
            for stage in self.pipeline.plan.stages
        ]


POLICIES: Mapping[str, PolicyName] = {
    "longest": "orca",
    "published": "s3-published",
    "foreseen": "s3",
}


@dataclass(frozen=True)
class Contestant:
    """A way to reserve: "longest", "published" (S³), "foreseen" (`s3`) or "blocks".

    `park_tokens_from`: the least tokens of preempted requests that are parked in host memory; 0:
    all are computed again. `part_tokens`: those of a prompt that a micro-batch has, 0 for all.
    """

    name: str
    kind: str
    expected: IntArray | None = None
    park_tokens_from: int = 1
    part_tokens: int = 0

    def best(self, memory: Memory, rows: Rows) -> JobRun:
        """The run of the job with the micro-batches that suit it best."""
        runs = (self.run(memory, rows, most) for most in self._sizes(memory, rows))
        return max(runs, key=lambda run: run.tokens_per_s)

    def _sizes(self, memory: Memory, rows: Rows) -> Iterator[int]:
        """Requests of a micro-batch: on one stage all, and fewer where these are many; on several
        shares of those in flight.
        """
        stages = len(memory.pipeline.times)
        mean = float(rows.prompts.mean()) + (
            rows.limit if self.kind == "longest" else float(rows.answers.mean())
        )
        in_flight = min(len(rows), max(1, int(memory.kv_tokens / mean)))
        if stages == 1:
            most = min(len(rows), 2 * in_flight)
            yield from sorted({min(most, BALANCED), min(most, 2 * BALANCED), most})
            return
        yield from sorted({max(1, round(share * in_flight / stages)) for share in SHARES})

    def within(self, token_s: float, share: float, memory: Memory, rows: Rows) -> JobRun | None:
        """The run with the largest micro-batches by which such a share of the rows has each token
        in so many seconds; None where none has.
        """
        most = max(self._sizes(memory, rows))
        while most:
            run = self.run(memory, rows, most)
            if np.quantile(run.token_s, share) <= token_s:
                return run
            most //= 2
        return None

    def run(self, memory: Memory, rows: Rows, most: int) -> JobRun:
        """The run of the job with micro-batches of at most so many requests."""
        scheduler = self.scheduler(memory, rows, most)
        return run_job(scheduler, memory.pipeline.times, rows, self.expected, memory.costs)

    def scheduler(self, memory: Memory, rows: Rows, most: int) -> Scheduler:
        """Its scheduler for micro-batches of at most so many requests."""
        stages, kv_tokens = len(memory.pipeline.times), memory.kv_tokens
        tokens = max(MOST_BATCH_TOKENS, 2 * most)
        if self.kind == "blocks":
            return OnDemandScheduler(kv_tokens, stages, most, tokens)
        policy, longest = POLICIES[self.kind], rows.longest
        parks = policy != "orca"
        sizes = QueueSizes(
            slots=stages * most,
            prefill_micro_batch=1,
            decode_micro_batch=most,
            slot_tokens=longest,
            policy=policy,
            kv_tokens=kv_tokens,
            n_slots=max(longest, int((1 - holes_of(policy)) * kv_tokens)),
            max_batch_size=most,
            max_batch_tokens=tokens,
            prefill_chunk_tokens=self.part_tokens,
            park_tokens_from=parks * self.park_tokens_from,
            parked_tokens=parks * memory.parked_tokens,
        )
        return make_scheduler(sizes, stages)


Predicted = tuple[str, IntArray]
"""Answer tokens that a predictor expects [rows], by its name."""


def contestants(
    rows: Rows, published: Sequence[Predicted], foreseen: Sequence[Predicted]
) -> list[Contestant]:
    """Reserving for the longest; S³ as published and Oracle, `s3` and the same; on demand."""
    return [
        Contestant("longest (ORCA)", "longest"),
        *(Contestant(f"S³, {name}", "published", expected) for name, expected in published),
        Contestant("S³, Oracle", "published", rows.answers),
        *(Contestant(f"`s3`, {name}", "foreseen", expected) for name, expected in foreseen),
        Contestant("`s3`, Oracle", "foreseen", rows.answers),
        Contestant("blocks on demand", "blocks"),
    ]
