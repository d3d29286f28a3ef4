"""The policy `s3`: its decisions against a simulation of them, and a pretend KV cache's content."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.messages import EVERY_KEY, Finished, MicroBatch, Request
from actors.schedule.driver import PipelineDriver
from actors.schedule.peak import PeakScheduler
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes
from planner.schedule import peak
from planner.schedule.s3 import OVERTAKES_PER_SLOT, POOL_PER_SLOT, LongestFirst, Pool
from planner.scheduling import PolicyName
from tests.actors.driving import drive, run_dry
from tests.actors.schedule.s3_simulation import PeakSimulation, S3Simulation
from tests.actors.schedule.token_pipeline import (
    TokenPipeline,
    assert_right_tokens,
    request,
    sizes_of,
)

LONGEST = 20  # of prompt and new tokens


def s3_sizes_of(
    stages: int,
    max_batch_size: int,
    kv_tokens: int,
    chunk: int = 0,
    cap: int = 0,
    park_from: int = 0,
    parked_tokens: int = 0,
    policy: PolicyName = "s3-published",
) -> QueueSizes:
    return replace(
        sizes_of(stages, max_batch_size, kv_tokens, chunk, cap),
        policy=policy,
        park_tokens_from=park_from,
        parked_tokens=parked_tokens,
    )


@dataclass
class Ends:
    """How many new tokens each request gets in the end."""

    rng: np.random.Generator

    def of(self, each: Request) -> int:
        return int(self.rng.integers(len(each.generated) + 1, each.max_new_tokens + 1))


class S3Machine(RuleBasedStateMachine):
    """Requests that come, are cancelled, scheduled and taken back at any time: every micro-batch is
    that of the simulation, and finds its tokens in the cache of the pretend pipeline.
    """

    policy: PolicyName = "s3-published"

    @initialize(
        stages=st.integers(1, 3),
        batch=st.integers(1, 4),
        room=st.integers(LONGEST, 90),
        kept_back=st.integers(0, 15),
        chunk=st.integers(0, 5),
        cap=st.integers(0, 20),
        park_from=st.integers(0, 8),
        parked_tokens=st.integers(0, 40),
        most_overtakes=st.integers(0, 8),
        growth=st.integers(1, 6),
        seed=st.integers(0, 999),
    )
    def begin(
        self,
        stages: int,
        batch: int,
        room: int,
        kept_back: int,
        chunk: int,
        cap: int,
        park_from: int,
        parked_tokens: int,
        most_overtakes: int,
        growth: int,
        seed: int,
    ) -> None:
        n_slots = max(LONGEST, room - kept_back)
        sizes = s3_sizes_of(stages, batch, room, chunk, cap, park_from, parked_tokens, self.policy)
        sizes = replace(sizes, n_slots=n_slots)
        numbers = n_slots, batch, most_overtakes, chunk, cap, park_from, parked_tokens
        if self.policy == "s3":
            self.growing = mock.patch.object(peak, "GROWTH", growth)
            self.growing.start()
            self.scheduler: S3Scheduler = PeakScheduler(sizes, stages)
            self.simulation = PeakSimulation(*numbers, grows_by=growth, slots=stages * batch)
        else:
            self.scheduler = S3Scheduler(sizes, stages)
            self.simulation = S3Simulation(*numbers)
        pool = self.scheduler._policy.queue
        assert isinstance(pool, Pool)
        pool._most_overtakes = most_overtakes
        self.pipeline = TokenPipeline(stages, room, {}, fixed_rooms=False)
        self.ends = Ends(np.random.default_rng(seed))
        self.requests: list[Request] = []
        self.under_way: deque[MicroBatch] = deque()
        self.finished: list[Finished] = []
        self.cancelled: set[str] = set()

    @rule(
        lengths=st.lists(
            st.tuples(
                st.integers(1, 12),
                st.integers(1, 8),
                st.integers(0, 7),
                st.none() | st.integers(-3, 12),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def come(self, lengths: list[tuple[int, int, int, int | None]]) -> None:
        first = len(self.requests)
        new = [request(first + i, p, n, min(g, n - 1), e) for i, (p, n, g, e) in enumerate(lengths)]
        self.requests += new
        self.pipeline.outputs |= {each.custom_id: self.ends.of(each) for each in new}
        self.pipeline.expect(new)
        self.scheduler.add(new)
        for each in new:
            self.simulation.add(
                each.custom_id,
                len(each.prompt_ids),
                each.max_new_tokens,
                len(each.generated),
                each.expected_tokens,
            )

    @rule()
    @precondition(lambda self: len(self.under_way) < self.scheduler.most_under_way)
    def schedule(self) -> None:
        following, wanted = self.scheduler.next_batch(), self.simulation.next_batch()
        assert (following is None) == (wanted is None)
        if following is None or wanted is None:
            return
        batch, token_ids = following
        self.under_way.append(self.pipeline.submit(batch, token_ids))
        assert batch.sizes is not None
        rows = zip(
            self.pipeline.names[-1], batch.counts.tolist(), batch.sizes.tolist(), strict=True
        )
        assert list(rows) == wanted

    @rule()
    @precondition(lambda self: self.under_way)
    def take_back(self) -> None:
        batch = self.under_way.popleft()
        names = [self.pipeline._holder[slot] for slot in batch.slots.tolist()]
        sampled = self.pipeline.result(batch)
        rows = [names[row] for row in batch.sampled_rows]
        reasons = zip(rows, sampled.finish_reasons, strict=True)
        ended = {name for name, reason in reasons if reason is not None}
        self.finished += self.scheduler.complete(batch, sampled)
        self.simulation.complete(names, ended)

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.requests)
    def cancel(self, pick: int) -> None:
        name = self.requests[pick % len(self.requests)].custom_id
        if name not in {each.custom_id for each in self.finished}:
            self.scheduler.cancel(name)
            self.simulation.cancel(name)
            self.cancelled.add(name)

    @invariant()
    def reservations_are_within_the_memory(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        slots, simulation = self.scheduler._slots, self.simulation
        assert slots.ranges.reserved == simulation.reserved <= simulation.n_slots
        held = [slots.ranges.range_of(slot) for slot in slots.requests]
        held.sort(key=lambda room: room.begin)
        assert all(one.end <= other.begin for one, other in itertools.pairwise(held))
        assert not held or 0 <= held[0].begin <= held[-1].end <= slots.ranges.n_slots
        assert self.scheduler.waiting == len(simulation.of_state("waiting"))
        assert self.scheduler.in_slots == len(simulation.of_state("ready", "running"))
        assert all(e.overtaken <= simulation.most_overtakes for e in simulation.requests)
        counts = self.scheduler.supervision
        assert counts.grown == simulation.grown
        assert (counts.parked, counts.recomputed) == (simulation.parked, simulation.recomputed)
        assert counts.parked_now == simulation.in_host_memory
        assert not counts.parked_now or counts.parked_now <= simulation.parked_tokens

    def teardown(self) -> None:
        try:
            if hasattr(self, "scheduler"):
                self.all_ends()
        finally:
            if hasattr(self, "growing"):
                self.growing.stop()

    def all_ends(self) -> None:
        """Everything ends, with its own tokens, and no token slot is lost."""
        while self.scheduler.waiting or self.scheduler.in_slots:
            before = len(self.pipeline.batches)
            if len(self.under_way) < self.scheduler.most_under_way:
                self.schedule()
            if len(self.pipeline.batches) == before:
                assert self.under_way, "nothing runs, and nothing is selected"
                self.take_back()
        left = [each for each in self.requests if each.custom_id not in self.cancelled]
        outputs = self.pipeline.outputs
        assert_right_tokens(self.finished, left, [outputs[each.custom_id] for each in left])
        assert self.scheduler.slot_tokens() == {}
        assert self.scheduler.supervision.parked_now == 0
        whole = request(len(self.requests), self.simulation.n_slots - 1, 1)
        self.scheduler.add([whole])
        batch = self.scheduler.next_batch()
        assert batch is not None, "token slots were lost"
        assert batch[0].admitted[0].room.size == self.simulation.n_slots
        kept = set(self.pipeline.parked) - set(batch[0].drops)
        assert not kept or EVERY_KEY in batch[0].drops


S3Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestS3Machine = S3Machine.TestCase


class PeakMachine(S3Machine):
    """The same under the policy `s3`."""

    policy: PolicyName = "s3"


PeakMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40)
TestPeakMachine = PeakMachine.TestCase


def run(
    sizes: QueueSizes, stages: int, requests: list[Request], outputs: list[int], most_overtakes: int
) -> tuple[S3Scheduler, TokenPipeline]:
    """Requests that are all there, through the product's driver, next to the simulation."""
    named = {r.custom_id: n for r, n in zip(requests, outputs, strict=True)}
    pipeline = TokenPipeline(stages, sizes.kv_tokens, named, fixed_rooms=False)
    pipeline.expect(requests)
    scheduler = S3Scheduler(sizes, stages)
    scheduler._policy.queue = LongestFirst(most_overtakes)
    scheduler.add(requests)
    finished = [each for some in drive(scheduler, pipeline) for each in some]
    assert_right_tokens(finished, requests, outputs)
    assert scheduler.waiting == scheduler.in_slots == scheduler.supervision.parked_now == 0
    assert scheduler._slots.ranges.reserved == 0
    assert scheduler._slots.free == stages * sizes.max_batch_size
    assert not pipeline.parked
    assert pipeline.most_parked <= sizes.parked_tokens
    return scheduler, pipeline


@pytest.mark.parametrize(
    ("expected", "parks"),
    [
        ("all too short", False),
        ("all too long", True),
        ("random", True),
        pytest.param("all too short", True, marks=pytest.mark.rare),
        pytest.param("all too long", False, marks=pytest.mark.rare),
        pytest.param("random", False, marks=pytest.mark.rare),
        *(pytest.param("right", parks, marks=pytest.mark.rare) for parks in (False, True)),
    ],
)
def test_nothing_is_lost_over_a_thousand_requests(expected: str, parks: bool) -> None:
    rng = np.random.default_rng(3)
    prompts, most = rng.integers(1, 25, (2, 1000))
    outputs = rng.integers(1, most + 1)
    guesses = {
        "all too short": np.zeros_like(most),
        "all too long": most + 5,
        "random": rng.integers(-2, most + 2),
        "right": outputs,
    }[expected]
    requests = [
        request(i, p, n, expected=e)
        for i, (p, n, e) in enumerate(
            zip(prompts.tolist(), most.tolist(), guesses.tolist(), strict=True)
        )
    ]
    sizes = s3_sizes_of(3, 16, 420, chunk=8, park_from=5 * parks, parked_tokens=60 * parks)
    scheduler, pipeline = run(sizes, 3, requests, outputs.tolist(), 100)
    counts = scheduler.supervision
    if expected in ("right", "all too long"):
        assert not counts.doublings
    else:
        assert counts.grown > 100
        assert counts.recomputed > 3
        assert (counts.parked > 15) == parks
        assert counts.recomputed_tokens >= counts.recomputed
    # What is computed is every token once, and again what was said to be.
    computed = sum(int(batch.counts.sum()) for batch in pipeline.batches)
    assert computed == int(prompts.sum() + outputs.sum()) - 1000 + counts.recomputed_tokens


def test_right_lengths_hold_more_at_once_than_the_longest() -> None:
    """As in the paper's table 3: fewer iterations of larger micro-batches."""
    rng = np.random.default_rng(1)
    outputs = rng.integers(1, 100, 400).tolist()
    batches = {}
    for name, guesses in {"longest": [None] * 400, "right": outputs}.items():
        requests = [request(i, 5, 100, expected=e) for i, e in enumerate(guesses)]
        _, pipeline = run(s3_sizes_of(1, 64, 1000), 1, requests, outputs, 256)
        batches[name] = np.array([len(batch.slots) for batch in pipeline.batches])
    assert len(batches["right"]) < 0.7 * len(batches["longest"])
    assert batches["right"].mean() > 1.4 * batches["longest"].mean()


def test_the_memory_is_held_for_whoever_was_overtaken_too_often() -> None:
    """A long request waits while short ones pass; then nothing goes before it."""
    most = OVERTAKES_PER_SLOT * 4
    requests = [request(0, 10, 10), request(1, 20, 20)]
    requests += [request(i, 5, 5) for i in range(2, 100)]
    outputs = {each.custom_id: each.max_new_tokens for each in requests}
    pipeline = TokenPipeline(1, 40, outputs, fixed_rooms=False)
    pipeline.expect(requests)
    scheduler = S3Scheduler(s3_sizes_of(1, 4, 40), 1)
    scheduler.add(requests[:1])
    driver = PipelineDriver(scheduler, pipeline)
    assert driver.submit_next() is not None
    scheduler.add(requests[1:])
    admitted = [0]
    while driver.under_way:
        driver.take_back()
        batch = driver.submit_next()
        if batch is not None:
            admitted += [int(each.custom_id) for each in batch.admitted]
    assert admitted.index(1) == 1 + most
    assert sorted(admitted) == list(range(100))


def test_the_pool_is_filled_before_a_run_begins_and_bounded() -> None:
    scheduler = S3Scheduler(s3_sizes_of(2, 4, 1000), 2)
    count = 0
    while scheduler.wants_requests:
        scheduler.add([request(count, 5, 5)])
        count += 1
    assert count == POOL_PER_SLOT * 8


def test_a_cancelled_request_that_is_parked_is_forgotten() -> None:
    """By the next micro-batch, also where no micro-batch has parked it yet."""
    requests = [request(i, 4, 12, expected=4) for i in range(3)]
    pipeline = TokenPipeline(1, 30, {str(i): 12 for i in range(3)}, fixed_rooms=False)
    pipeline.expect(requests)
    scheduler = S3Scheduler(s3_sizes_of(1, 3, 30, park_from=1, parked_tokens=99), 1)
    scheduler.add(requests)
    driver = PipelineDriver(scheduler, pipeline)
    while not scheduler.supervision.parked:
        driver.submit_next()
        parked = dict(pipeline.parked)
        driver.take_back()
    assert len(parked) == 2, "either has too little room to grow"
    scheduler.cancel(str(next(iter(parked))))
    assert scheduler.supervision.parked_now == 8
    assert len([each for some in run_dry(driver) for each in some]) == 2
    assert not pipeline.parked


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_no_micro_batch_has_parked_yet_is_parked_by_the_next_one(is_cancelled: bool) -> None:
    """Or not at all, where it is cancelled meanwhile: the other request holds too much under way,
    so that nothing can be selected when it is preempted.
    """
    requests = [request(0, 13, 15), request(1, 4, 20, expected=2)]
    pipeline = TokenPipeline(2, 40, {"0": 15, "1": 20}, fixed_rooms=False)
    pipeline.expect(requests)
    scheduler = S3Scheduler(s3_sizes_of(2, 1, 40, park_from=1, parked_tokens=99), 2)
    scheduler.add(requests)
    driver = PipelineDriver(scheduler, pipeline)
    while True:
        batch = driver.submit_next()
        if scheduler.supervision.parked:
            break
        if batch is None:
            driver.take_back()
    assert batch is None
    assert driver.under_way
    assert not pipeline.parked
    if is_cancelled:
        scheduler.cancel("1")
    ended = [each.custom_id for some in run_dry(driver) for each in some]
    assert sorted(ended) == (["0"] if is_cancelled else ["0", "1"])
    assert sum(len(batch.parks) for batch in pipeline.batches) == (not is_cancelled)
    assert not pipeline.parked
