"""The counted schedule of `orca` is that of the actors' scheduler, batch for batch and second for
second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.messages import MicroBatch, Sampled, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.orca import OrcaScheduler
from planner.costs.pass_times import PassSeconds
from planner.plan.modelled_times import LengthCurve, ModelledTimes
from planner.schedule.orca import MixedPass, OrcaSchedule
from planner.schedule.passes import JobRows, OrcaSizes, Pass, rounded_mean
from planner.simulation.job_simulation import simulate_job
from planner.simulation.simulation import simulate
from planner.workload import Workload
from quant.common.errors import SpecError
from tests.actors.driving import run_dry
from tests.actors.schedule.token_pipeline import TokenPipeline, request, sizes_of

TIMES = ModelledTimes(
    prefill=(LengthCurve(1, (1, 64), (3.0, 66.0)), LengthCurve(8, (1, 64), (10.0, 514.0))),
    decode=(LengthCurve(1, (1, 64), (2.5, 5.65)), LengthCurve(8, (1, 64), (6.0, 31.2))),
    link_latency_s=0.25,
    link_s_per_token=0.125,
)
"""Linear in length, so that a mean context stands for all; not in the number of requests."""


class Case:
    """Random rows and sizes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.stages, self.most = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        count = int(rng.integers(1, 40))
        self.prompts = rng.integers(1, 20, count).tolist()
        self.outputs = rng.integers(1, 12, count).tolist()
        unused = rng.integers(0, 5, count).tolist()
        self.limits = [n + more for n, more in zip(self.outputs, unused, strict=True)]
        reserved = [p + n for p, n in zip(self.prompts, self.limits, strict=True)]
        self.rows = JobRows(self.prompts, self.outputs, reserved)
        self.n_slots = max(reserved) + int(rng.integers(0, 80))
        self.chunk = int(rng.choice([0, 0, 1, 2, 3, 7]))
        self.tokens = int(rng.choice([0, rng.integers(1, 40)]))
        self.slots = int(rng.choice([0, rng.integers(1, self.stages * self.most + 1)]))

    @property
    def sizes(self) -> OrcaSizes:
        return OrcaSizes(self.most, self.n_slots, self.tokens, self.chunk, slots=self.slots)

    def scheduler(self) -> OrcaScheduler:
        # room for holes, so that ranges, too, are those of a run
        sizes = sizes_of(self.stages, self.most, self.n_slots + 9, self.chunk, self.tokens)
        slots = self.slots or sizes.slots
        return OrcaScheduler(replace(sizes, n_slots=self.n_slots, slots=slots), self.stages)


class TimedPipeline(TokenPipeline):
    """A pipeline with a clock: stages and links of `TIMES`, one micro-batch each at a time."""

    def __init__(self, case: Case) -> None:
        names = {str(i): n for i, n in enumerate(case.outputs)}
        super().__init__(case.stages, case.n_slots + 9, names)
        self.now_s = 0.0
        self.results = 0
        self.results_before: list[int] = []
        self._stage_free_s, self._link_free_s = [0.0] * case.stages, [0.0] * case.stages
        self._back_s: deque[float] = deque()

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        at_s = self.now_s
        starts, counts = batch.starts, batch.counts
        for j in range(self.stages):
            self._stage_free_s[j] = max(at_s, self._stage_free_s[j]) + TIMES.pass_s(starts, counts)
            sends_s = max(self._stage_free_s[j], self._link_free_s[j])
            hop_s = TIMES.transfer_s(int(counts.sum()), len(counts))
            at_s = self._link_free_s[j] = sends_s + hop_s
        self._back_s.append(at_s)
        self.results_before.append(self.results)
        return super().submit(batch, token_ids)

    def result(self, handle: MicroBatch) -> Sampled:
        self.now_s = max(self.now_s, self._back_s.popleft())
        self.results += 1
        return super().result(handle)


def driven(case: Case) -> TimedPipeline:
    pipeline = TimedPipeline(case)
    requests = [request(i, case.prompts[i], case.limits[i]) for i in range(len(case.prompts))]
    pipeline.expect(requests)
    driver = PipelineDriver(case.scheduler(), pipeline)
    driver.add(requests)
    ended = [each for finished in run_dry(driver) for each in finished]
    assert len(ended) == len(requests)
    return pipeline


def counted(batch: MicroBatch) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Decode steps, the tokens before them, and the parts of prompts."""
    rows = list(zip(batch.starts.tolist(), batch.counts.tolist(), strict=True))
    steps = [start for start, count in rows if start and count == 1]
    return len(steps), sum(steps), tuple(each for each in rows if not (each[0] and each[1] == 1))


@pytest.mark.parametrize("seed", range(24))
def test_every_batch_is_that_of_the_scheduler(seed: int) -> None:
    case = Case(seed)
    pipeline = driven(case)
    schedule = OrcaSchedule(case.rows, case.sizes, case.stages)
    passes = list(schedule.passes())
    assert len(passes) == len(pipeline.batches)
    for each, batch, results in zip(passes, pipeline.batches, pipeline.results_before, strict=True):
        steps, context, parts = counted(batch)
        assert (each.decodes, each.parts, each.results_before) == (steps, parts, results)
        assert each.decode_context == (rounded_mean(context, steps) if steps else 0)
        assert (each.requests, each.all_tokens) == (len(batch.slots), batch.counts.sum())
        assert each.phase == ("prefill" if parts else "decode")
    assert schedule.prefilled == len(case.prompts) == len(schedule.ended_after)
    assert max(schedule.in_flight) <= (case.slots or case.stages * case.most)


def seconds(stages: int, batches: Sequence[MicroBatch]) -> Callable[[Pass], PassSeconds]:
    """The times of passes; contexts that a pass has only the mean of are those of the run."""

    def of(each: Pass) -> PassSeconds:
        assert isinstance(each, MixedPass)
        own_s = TIMES.pass_s(batches[each.index].starts, batches[each.index].counts)
        hop_s = TIMES.transfer_s(each.all_tokens, each.requests)
        return PassSeconds((own_s,) * stages, (hop_s,) * stages)

    return of


@pytest.mark.parametrize("seed", range(20))
def test_a_simulated_job_takes_the_seconds_of_the_run(seed: int) -> None:
    case = Case(seed)
    pipeline = driven(case)
    times = seconds(case.stages, pipeline.batches)
    found, *_ = simulate_job(case.rows, 1, case.sizes, case.stages, times)
    assert found.seconds == pytest.approx(pipeline.now_s, rel=1e-12)
    assert found.generated_tokens == sum(case.outputs)
    events = simulate(Workload(1, 1, 1), case.sizes, case.stages, times, case.rows)
    assert events.latency_s == found.seconds


def test_short_requests_leave_room_for_others() -> None:
    rows = JobRows([1] * 40, [4] * 40)
    found = OrcaSchedule(rows, OrcaSizes(20, 50), 2)
    list(found.passes())
    assert max(found.in_flight) == 10


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match=r"needs 9 token slots, but there are 8 in all"):
        OrcaSchedule(JobRows([5], [4]), OrcaSizes(1, 8), 1)
    with pytest.raises(SpecError, match="micro-batches of 0"):
        OrcaSchedule(JobRows([5], [4]), OrcaSizes(0, 9), 1)
