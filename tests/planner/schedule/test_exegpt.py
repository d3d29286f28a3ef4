"""The counted schedule of `exegpt` is that of the actors' scheduler, pass for pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.messages import MicroBatch, Sampled, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from planner.costs.pass_times import PassSeconds
from planner.lengths import Lengths
from planner.plan.modelled_times import LengthCurve, ModelledTimes
from planner.schedule.exegpt import RraSchedule
from planner.schedule.passes import JobRows, Pass, TurnSizes, rounded_mean
from planner.scheduling import RequestSchedule
from planner.simulation.job_simulation import forecast_job, simulate_job
from planner.simulation.simulation import simulate
from planner.workload import Job, Workload
from quant.common.errors import SpecError
from tests.actors.driving import run_dry
from tests.actors.schedule.exegpt_cases import queue_sizes_of
from tests.actors.schedule.token_pipeline import TokenPipeline, request


class Case:
    """Random rows, schedule and sizes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.stages = int(rng.integers(1, 5))
        count = int(rng.integers(1, 90))
        self.prompts = rng.integers(1, 20, count).tolist()
        if seed % 5 == 0:
            self.prompts = [self.prompts[0]] * count
        self.outputs = rng.integers(1, 16, count).tolist()
        unused = rng.integers(0, 5, count).tolist()
        self.limits = [n + more for n, more in zip(self.outputs, unused, strict=True)]
        reserved = [p + n for p, n in zip(self.prompts, self.limits, strict=True)]
        self.rows = JobRows(self.prompts, self.outputs, reserved)
        decode = int(rng.integers(1, 30))
        schedule = RequestSchedule(
            "rra",
            int(rng.integers(1, decode + 1)),
            decode,
            int(rng.integers(1, 9)),
            int(rng.integers(1, 6)),
            int(rng.integers(1, 6)),
            float(rng.uniform(1, 20)),
            float(rng.choice([0.05, 0.1, 0.3])),
        )
        self.n_slots = max(reserved) + int(rng.integers(0, 40 * decode))
        sizes = TurnSizes.of(schedule, self.n_slots)
        if seed % 4 == 0:  # as after faults of memory
            most = int(rng.integers(1, sizes.decode_micro_batch + 1))
            sizes = replace(sizes, decode_micro_batch=most, slots=int(rng.integers(1, decode + 9)))
        self.sizes = sizes


class RecordingPipeline(TokenPipeline):
    """A pipeline that notes how many results were back when each micro-batch was submitted."""

    results = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.results_before: list[int] = []

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        self.results_before.append(self.results)
        return super().submit(batch, token_ids)

    def result(self, handle: MicroBatch) -> Sampled:
        self.results += 1
        return super().result(handle)


def driven(case: Case) -> RecordingPipeline:
    outputs = {str(i): n for i, n in enumerate(case.outputs)}
    # room for holes, so that ranges, too, are those of a run
    pipeline = RecordingPipeline(case.stages, case.n_slots + 9, outputs)
    requests = [request(i, case.prompts[i], case.limits[i]) for i in range(len(case.prompts))]
    pipeline.expect(requests)
    sizes = queue_sizes_of(case.sizes, case.n_slots + 9)
    driver = PipelineDriver(RraScheduler(sizes, case.stages), pipeline)
    driver.add(requests)
    ended = [each for finished in run_dry(driver) for each in finished]
    assert len(ended) == len(requests)
    return pipeline


@pytest.mark.parametrize("seed", range(12))
def test_every_pass_is_that_of_the_scheduler(seed: int) -> None:
    case = Case(seed)
    pipeline = driven(case)
    schedule = RraSchedule(case.rows, case.sizes, case.stages)
    passes = list(schedule.passes())
    assert len(passes) == len(pipeline.batches)
    for each, batch, results in zip(passes, pipeline.batches, pipeline.results_before, strict=True):
        assert (each.phase, each.requests) == (batch.kind, len(batch.slots))
        assert (each.all_tokens, each.results_before) == (batch.counts.sum(), results)
        assert each.context_length == rounded_mean(int(batch.starts.sum()), len(batch.slots))
        if each.prompts:
            assert each.prompts == tuple(batch.counts.tolist())
    reserved = pipeline.n_rsrv
    assert max(reserved) <= case.n_slots
    assert schedule.prefilled == len(case.prompts) == len(schedule.ended_after)
    assert list(schedule.ended_after) == sorted(schedule.ended_after)
    assert max(schedule.in_flight) <= case.sizes.slots


def seconds(stages: int) -> PassSeconds:
    return PassSeconds((1.0,) * stages, (0.25,) * stages)


def test_a_simulated_job_and_its_events_take_the_same_time() -> None:
    case = Case(3)
    found, *_ = simulate_job(
        case.rows, 1, case.sizes, case.stages, lambda each: seconds(case.stages)
    )
    assert found.generated_tokens == sum(case.outputs)
    events = simulate(
        Workload(1, 1, 1), case.sizes, case.stages, lambda each: seconds(case.stages), case.rows
    )
    assert events.latency_s == found.seconds


TIMES = ModelledTimes(
    prefill=(LengthCurve(1, (1, 64), (3.0, 66.0)), LengthCurve(8, (1, 64), (10.0, 514.0))),
    decode=(LengthCurve(1, (1, 64), (2.5, 5.65)), LengthCurve(8, (1, 64), (6.0, 31.2))),
    link_latency_s=0.25,
    link_s_per_token=0.125,
)


def modelled(each: Pass) -> PassSeconds:
    is_decode = each.phase == "decode"
    length = each.context_length if is_decode else each.tokens
    lengths = np.array(each.prompts or (length,) * each.requests, dtype=np.int64)
    own_s = TIMES.compute_s(is_decode, lengths)
    hop_s = TIMES.transfer_s(each.all_tokens, each.requests)
    return PassSeconds((own_s,) * 2, (hop_s,) * 2)


def test_a_long_job_goes_on_as_its_part_did() -> None:
    """A fifth is simulated, and the whole takes about as long as that says of it."""
    rng = np.random.default_rng(0)
    lengths = Lengths(
        tuple(rng.integers(4, 40, 256).tolist()), tuple(rng.integers(1, 40, 256).tolist())
    )
    schedule = RequestSchedule("rra", 6, 24, 6, 2, 4, lengths.mean_prompt)
    sizes = TurnSizes.of(schedule, 10**5)
    job = Job(3000, lengths)
    part = forecast_job(job, 24, sizes, 2, modelled, most_passes=1500)
    whole, *_ = simulate_job(JobRows.of(job, 3000), 24, sizes, 2, modelled)
    assert len(part.ended_s) < 1000
    assert part.seconds == pytest.approx(whole.seconds, rel=0.02)


def test_impossible_sizes_are_refused() -> None:
    sizes = TurnSizes.of(RequestSchedule("rra", 1, 1, 1, 1, 1, 5.0), 8)
    with pytest.raises(SpecError, match=r"needs 9 token slots, but there are 8 in all"):
        RraSchedule(JobRows([5], [4]), sizes, 1)
    with pytest.raises(SpecError, match="0 slots"):
        RraSchedule(JobRows([5], [3]), replace(sizes, slots=0), 1)
