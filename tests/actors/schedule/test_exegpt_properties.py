"""What must hold of the policy `exegpt` whatever comes: turns, groups, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.messages import MicroBatch, Request
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from actors.schedule.scheduler import QueueSizes
from planner.schedule.passes import TurnSizes
from planner.schedule.turns import TurnGroup, TurnQueue, Turns
from planner.scheduling import RequestSchedule
from tests.actors.driving import run_dry
from tests.actors.schedule.exegpt_cases import queue_sizes_of
from tests.actors.schedule.random_server import RandomServer
from tests.actors.schedule.token_pipeline import TokenPipeline, request


@dataclass
class Server(RandomServer):
    """A server that looks at each micro-batch of a schedule."""

    came: list[str] = field(default_factory=list)
    began: list[str] = field(default_factory=list)

    def add(self, requests: Sequence[Request]) -> None:
        is_idle = not (self.scheduler.in_slots or self.scheduler.waiting)
        super().add(requests)
        self.came += [each.custom_id for each in requests]
        if is_idle:
            self.schedule()
            assert self.began[-1] in {each.custom_id for each in requests}, "it did not start"

    def look(self, batch: MicroBatch) -> None:
        self.began += [each.custom_id for each in batch.admitted]
        turn = self.sizes
        assert batch.kind != "mixed"
        if batch.admitted:
            assert len(batch.slots) == len(batch.admitted) <= turn.prefill_micro_batch
        else:
            assert batch.is_decode
            assert len(batch.slots) <= turn.decode_micro_batch
        assert self.scheduler.in_slots <= turn.slots
        if not self.cancelled:
            assert self.pipeline.n_rsrv[-1] <= self.n_slots
        order = [name for name in self.came if name in set(self.began)]
        assert order == self.began, "one that came later began before"

    @property
    def sizes(self) -> TurnSizes:
        assert isinstance(self.scheduler, RraScheduler)
        own = self.queue
        assert own.schedule is not None
        return TurnSizes(
            own.schedule, own.slots, own.n_slots, own.prefill_micro_batch, own.decode_micro_batch
        )


class TurnsSeen(RraScheduler):
    """A scheduler that notes, of each turn, the group, its requests, and how many wait."""

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        self.seen: list[tuple[int, int, int]] = []

        begin_turn = self._policy._begin_turn

        def noting(group: TurnGroup, queue: TurnQueue) -> None:
            begin_turn(group, queue)
            self.seen.append((group.index, group.requests, queue.waiting))

        self._policy._begin_turn = noting  # type: ignore[method-assign]


SCHEDULES = st.builds(
    RequestSchedule,
    kind=st.just("rra"),
    prefill_requests=st.integers(1, 12),
    decode_requests=st.integers(1, 24),
    decode_steps=st.integers(1, 6),
    decode_micro_batches=st.integers(1, 4),
    prefill_micro_batch=st.integers(1, 5),
    mean_prompt_tokens=st.floats(1, 12),
    tolerance=st.sampled_from([0.05, 0.1, 0.3]),
)


@settings(max_examples=60)
@given(
    stages=st.integers(1, 4),
    schedule=SCHEDULES,
    lengths=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 7)), max_size=40
    ),
    room=st.integers(20, 400),
    kept_back=st.integers(0, 15),
    halved=st.booleans(),
    cancels=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 999),
)
def test_requests_come_and_go_and_nothing_is_lost(
    stages: int,
    schedule: RequestSchedule,
    lengths: list[tuple[int, int, int]],
    room: int,
    kept_back: int,
    halved: bool,
    cancels: float,
    seed: int,
) -> None:
    """With replayed tokens, cancelled requests, and groups and prefills halved for memory."""
    requests = [request(i, p, n, min(g, n - 1)) for i, (p, n, g) in enumerate(lengths)]
    sizes = queue_sizes_of(TurnSizes.of(schedule, max(20, room - kept_back)), room)
    if halved:
        sizes = replace(
            sizes,
            prefill_micro_batch=max(1, sizes.prefill_micro_batch // 2),
            decode_micro_batch=max(1, sizes.decode_micro_batch // 2),
        )
    server = Server.of(stages, sizes, requests, seed, cancels)
    server.run()
    server.check_end(requests)


@dataclass
class Changing(RandomServer):
    """A server whose schedule changes now and then."""

    others: list[RequestSchedule] = field(default_factory=list)

    def schedule(self) -> None:
        if self.others and self.rng.random() < 0.1:
            assert isinstance(self.scheduler, RraScheduler)
            self.scheduler.follow(self.others.pop())
        super().schedule()

    def look(self, batch: MicroBatch) -> None:
        assert isinstance(self.scheduler, RraScheduler)
        sizes = self.queue
        assert batch.kind != "mixed"
        most = sizes.decode_micro_batch if batch.is_decode else sizes.prefill_micro_batch
        assert len(batch.slots) <= most
        assert self.scheduler.in_slots <= sizes.slots
        if not self.cancelled:
            assert self.pipeline.n_rsrv[-1] <= self.n_slots


@settings(max_examples=50)
@given(
    stages=st.integers(1, 3),
    schedule=SCHEDULES,
    others=st.lists(SCHEDULES, max_size=5),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), max_size=60),
    room=st.integers(20, 300),
    cancels=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 999),
)
def test_another_schedule_takes_its_place_at_any_time(
    stages: int,
    schedule: RequestSchedule,
    others: list[RequestSchedule],
    lengths: list[tuple[int, int]],
    room: int,
    cancels: float,
    seed: int,
) -> None:
    """With more groups or fewer, within the micro-batches and slots that there are."""
    requests = [request(i, *each) for i, each in enumerate(lengths)]
    sizes = queue_sizes_of(TurnSizes.of(schedule, room), room)
    server = Changing.of(stages, sizes, requests, seed, cancels)
    server.others = others
    server.run()
    server.check_end(requests)


def test_groups_take_the_size_of_another_schedule() -> None:
    """Each with its next turns, as requests end."""
    rng = np.random.default_rng(2)
    requests = [request(i, 4, int(n)) for i, n in enumerate(rng.integers(4, 20, 900))]
    pipeline = TokenPipeline(2, 10**5, {r.custom_id: r.max_new_tokens for r in requests})
    pipeline.expect(requests)
    large = RequestSchedule("rra", 12, 40, 4, 2, 6, 4.0)
    small = RequestSchedule("rra", 3, 12, 4, 2, 6, 4.0)
    scheduler = TurnsSeen(queue_sizes_of(TurnSizes.of(large, 10**5), 10**5), 2)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    running = run_dry(driver)
    for turns in (Turns.of(large), Turns.of(small), Turns.of(large)):
        driver.follow(turns.schedule)
        for _ in range(150):
            next(running, None)
        assert scheduler.waiting > turns.most * 2
        (_, first, _), (_, second, _) = scheduler.seen[-2:]
        assert turns.least <= min(first, second) <= max(first, second) <= turns.most


def test_nothing_is_lost_over_thousands_of_requests() -> None:
    rng = np.random.default_rng(3)
    lengths = zip(*rng.integers(1, 12, (2, 3_000)).tolist(), strict=True)
    requests = [request(i, p, n) for i, (p, n) in enumerate(lengths)]
    schedule = RequestSchedule("rra", 12, 40, 3, 3, 4, 6.0)
    sizes = queue_sizes_of(TurnSizes.of(schedule, 480), 490)
    server = RandomServer.of(3, sizes, requests, 4, cancels=0.03)
    server.run()
    assert len(server.cancelled) > 80
    assert server.pipeline.moved > 300
    server.check_end(requests)


@settings(max_examples=10)
@given(
    stages=st.integers(1, 3),
    schedule=SCHEDULES,
    seed=st.integers(0, 999),
)
def test_groups_keep_their_size_while_the_queue_is_long(
    stages: int, schedule: RequestSchedule, seed: int
) -> None:
    """Once a group has its size, it has it after every turn."""
    assume(schedule.decode_requests <= 4 * schedule.prefill_requests)  # else it takes long
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, (2, 400)).tolist()
    requests = [request(i, p, n) for i, (p, n) in enumerate(zip(*lengths, strict=True))]
    schedule = replace(schedule, mean_prompt_tokens=float(np.mean(lengths[0])))
    pipeline = TokenPipeline(stages, 10**5, {r.custom_id: r.max_new_tokens for r in requests})
    pipeline.expect(requests)
    scheduler = TurnsSeen(queue_sizes_of(TurnSizes.of(schedule, 10**5), 10**5), stages)
    turns = Turns.of(schedule)
    driver = PipelineDriver(scheduler, pipeline)
    driver.add(requests)
    list(run_dry(driver))
    filled: set[int] = set()
    for group, size, waiting in scheduler.seen:
        assert size <= turns.most
        if group in filled and waiting > turns.most * turns.groups:
            assert size >= turns.least
        if size >= turns.least:
            filled.add(group)
    assert len(filled) == turns.groups


@pytest.mark.parametrize("longest", [2, 40])
def test_ages_in_a_group_are_unlike_from_the_beginning(longest: int) -> None:
    """No turn is much larger than planned, so nobody waits longer for the prompts of others."""
    rng = np.random.default_rng(5)
    outputs = rng.integers(longest // 2, longest + 1, 300)
    requests = [request(i, 4, int(n)) for i, n in enumerate(outputs)]
    completing = np.mean(1 / np.ceil(np.maximum(outputs - 1, 1) / 4))  # sum of P_D(U), section 6
    schedule = RequestSchedule("rra", 8, round(8 / completing), 4, 2, 8, 4.0)
    sizes = queue_sizes_of(TurnSizes.of(schedule, 10**5), 10**5)
    server = RandomServer.of(2, sizes, requests, 1, 0.0)
    server.pipeline.outputs = {r.custom_id: r.max_new_tokens for r in requests}
    server.scheduler.add(requests)
    server.pool.update(dict.fromkeys(each.custom_id for each in requests))
    server.coming.clear()
    server.run()
    first = server.pipeline.batches[:2]
    assert [len(batch.slots) for batch in first] == [4, 4]
    joined = [len(batch.admitted) for batch in server.pipeline.batches if batch.admitted]
    assert np.mean(joined) <= 4.4
