"""The counted schedules of `s3` and `s3-published` are those of the actors' schedulers, batch for
batch, whatever is predicted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.messages import MicroBatch
from actors.schedule.driver import PipelineDriver
from actors.schedule.peak import PeakScheduler
from actors.schedule.s3 import S3Scheduler
from planner.schedule import peak
from planner.schedule.orca import OrcaSchedule, Waiting
from planner.schedule.passes import JobRows, OrcaSizes, rounded_mean
from planner.schedule.peak import FirstThatFits, PeakSchedule
from planner.schedule.s3 import LongestFirst, S3Schedule
from planner.scheduling import PolicyName
from quant.common.errors import SpecError
from tests.actors.driving import run_dry
from tests.actors.schedule.token_pipeline import TokenPipeline, request, sizes_of


class Case:
    """Random rows, predictions and sizes."""

    def __init__(self, seed: int, policy: PolicyName = "s3-published") -> None:
        rng, self.policy = np.random.default_rng(seed), policy
        self.stages, self.most = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        count = int(rng.integers(1, 200))
        self.prompts = rng.integers(1, 20, count).tolist()
        self.outputs = rng.integers(1, 40, count).tolist()
        unused = rng.integers(0, 20, count).tolist()
        self.limits = [n + more for n, more in zip(self.outputs, unused, strict=True)]
        reserved = [p + n for p, n in zip(self.prompts, self.limits, strict=True)]
        self.expected = (rng.uniform(0.1, 1.5, count) * self.outputs).astype(int).tolist()
        self.rows = JobRows(self.prompts, self.outputs, reserved, self.expected)
        self.n_slots = max(reserved) + int(rng.integers(0, 80))
        self.chunk = int(rng.choice([0, 0, 1, 2, 3, 7]))
        self.tokens = int(rng.choice([0, rng.integers(1, 40)]))
        self.slots = int(rng.choice([0, rng.integers(1, self.stages * self.most + 1)]))

    @property
    def sizes(self) -> OrcaSizes:
        return OrcaSizes(self.most, self.n_slots, self.tokens, self.chunk, self.policy, self.slots)

    def scheduler(self) -> S3Scheduler:
        # room for holes, so that ranges, too, are those of a run
        sizes = sizes_of(self.stages, self.most, self.n_slots + 9, self.chunk, self.tokens)
        slots = self.slots or sizes.slots
        sizes = replace(sizes, n_slots=self.n_slots, policy=self.policy, slots=slots)
        return (PeakScheduler if self.policy == "s3" else S3Scheduler)(sizes, self.stages)

    def schedule(self) -> S3Schedule:
        kind = PeakSchedule if self.policy == "s3" else S3Schedule
        return kind(self.rows, self.sizes, self.stages)


def driven(case: Case) -> tuple[TokenPipeline, S3Scheduler]:
    """Run the actors' scheduler, whose requests come one by one as it wants them."""
    outputs = {str(i): n for i, n in enumerate(case.outputs)}
    pipeline = TokenPipeline(case.stages, case.n_slots + 9, outputs, fixed_rooms=False)
    requests = [
        request(i, case.prompts[i], case.limits[i], expected=case.expected[i])
        for i in range(len(case.prompts))
    ]
    pipeline.expect(requests)
    scheduler = case.scheduler()
    driver = PipelineDriver(scheduler, pipeline)
    ended = sum(len(finished) for finished in run_dry(driver, requests))
    assert ended == len(requests)
    return pipeline, scheduler


def counted(batch: MicroBatch) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Decode steps, the tokens before them, and the parts of prompts."""
    rows = list(zip(batch.starts.tolist(), batch.counts.tolist(), strict=True))
    steps = [start for start, count in rows if start and count == 1]
    return len(steps), sum(steps), tuple(each for each in rows if not (each[0] and each[1] == 1))


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.rare) for n in range(8, 40))]
)
@pytest.mark.parametrize("policy", ["s3", "s3-published"])
def test_every_batch_is_that_of_the_scheduler(
    seed: int, policy: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "GROWTH", 1 + seed % 7)
    case = Case(seed, policy)
    pipeline, scheduler = driven(case)
    schedule = case.schedule()
    passes = list(schedule.passes())
    assert len(passes) == len(pipeline.batches)
    for each, batch in zip(passes, pipeline.batches, strict=True):
        steps, context, parts = counted(batch)
        assert (each.decodes, each.parts) == (steps, parts)
        assert each.decode_context == (rounded_mean(context, steps) if steps else 0)
        assert (each.requests, each.all_tokens) == (len(batch.slots), batch.counts.sum())
        assert each.phase == ("prefill" if parts else "decode")
    assert schedule.prefilled == len(case.prompts) == len(schedule.ended_after)
    assert max(schedule.in_flight) <= (case.slots or case.stages * case.most)
    found = scheduler.supervision
    assert (schedule.grown, schedule.preempted) == (found.grown, found.recomputed)
    assert schedule.recomputed_tokens == found.recomputed_tokens


@pytest.mark.parametrize(
    ("policy", "pool"), [("s3", FirstThatFits), ("s3-published", LongestFirst)]
)
def test_the_cases_meet_all_that_may_happen(
    policy: PolicyName, pool: type[LongestFirst], monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = preempted = 0
    held: list[bool] = []

    def following(pool: LongestFirst, free: int) -> Waiting | None:
        held.append(pool.is_held)
        return found_next(pool, free)

    found_next = pool.next
    monkeypatch.setattr(pool, "next", following)
    for seed in range(8):
        monkeypatch.setattr(peak, "GROWTH", 1 + seed % 7)
        schedule = Case(seed, policy).schedule()
        list(schedule.passes())
        grown, preempted = grown + schedule.grown, preempted + schedule.preempted
    assert min(grown, preempted) > 60
    assert sum(held) > 15


@pytest.mark.parametrize("seed", range(10))
def test_alike_requests_with_full_reservations_run_as_under_orca(seed: int) -> None:
    case = Case(seed)
    rows = JobRows([7] * 50, [9] * 50, [20] * 50)
    sizes = replace(case.sizes, prefill_chunk_tokens=max(1, case.chunk))
    found = S3Schedule(rows, sizes, case.stages)
    same = OrcaSchedule(rows, replace(sizes, policy="orca"), case.stages)
    assert list(found.passes()) == list(same.passes())
    assert found.ended_after == same.ended_after


def test_short_predictions_leave_room_for_others() -> None:
    rows = JobRows([1] * 60, [4] * 60, [100] * 60, [4] * 60)
    most = {}
    for policy, schedule in (("orca", OrcaSchedule), ("s3-published", S3Schedule)):
        found = schedule(rows, OrcaSizes(20, 200, 0, 0, policy), 2)  # type: ignore[arg-type]
        list(found.passes())
        most[policy] = max(found.in_flight)
    assert most == {"orca": 2, "s3-published": 40}


def test_the_longest_that_fits_goes_first() -> None:
    rows = JobRows([1] * 4, [2, 9, 5, 7], [10] * 4, [2, 9, 5, 7])
    passes = list(S3Schedule(rows, OrcaSizes(1, 10, 0, 0, "s3-published"), 1).passes())
    assert [p.index for p in passes if p.phase == "prefill"] == [0, 9, 16, 21]


def test_a_long_answer_that_came_last_does_not_end_alone() -> None:
    outputs = [10] * 40 + [60]
    rows = JobRows([1] * 41, outputs, [70] * 41, outputs)
    sizes = OrcaSizes(4, 1000, policy="s3")
    first_come = OrcaSchedule(rows, replace(sizes, policy="orca"), 1)
    steps = [len(list(each.passes())) for each in (first_come, PeakSchedule(rows, sizes, 1))]
    even = sum(outputs) / 4
    assert steps[1] < 1.15 * even < 1.35 * even < steps[0]


def test_ranges_grow_by_more_where_memory_is_ample() -> None:
    rows = JobRows([1] * 8, [200] * 8, [201] * 8, [200] * 8)
    grown = []
    for n_slots in (1700, 10_000):
        schedule = PeakSchedule(rows, OrcaSizes(8, n_slots, policy="s3"), 1)
        list(schedule.passes())
        grown.append(schedule.grown)
    assert 8 <= grown[1] < grown[0] < 8 * 200 / peak.GROWTH


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"needs 9 token slots, but there are 8 in all"):
        S3Schedule(JobRows([5], [4], None, [1]), OrcaSizes(1, 8, policy="s3-published"), 1)
