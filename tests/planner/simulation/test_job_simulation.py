"""Simulated jobs against an event simulation of its own kind, the objective, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest

from planner.assumed_predictor import AssumedPredictor
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassSeconds, PassTable
from planner.costs.roofline import RooflineLatency
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.schedule.job_passes import job_passes
from planner.schedule.orca import MixedPass
from planner.schedule.passes import JobRows, OrcaSizes, Pass
from planner.scheduling import PolicyName
from planner.simulation.job_simulation import (
    forecast_job,
    simulate_job,
    simulate_job_assignment,
)
from planner.simulation.simulation import simulate_assignment
from planner.workload import Job, MicroBatches
from tests.planner.problems import FOUR_BITS
from tests.planner.schedule.test_job_passes import KINDS, cases, drawn_outputs
from tests.planner.simulation.event_simulation import EventSimulation, Pipeline


def random_pipeline(rng: np.random.Generator, stages: int) -> Pipeline:
    def draw(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high, stages).tolist())

    return Pipeline(draw(2, 20), draw(0.5, 4), draw(0, 6), draw(0, 2), rng.uniform(0, 0.02))


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_an_event_simulation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pipeline, slots = random_pipeline(rng, int(rng.integers(1, 6))), int(rng.integers(1, 24))
    sizes = MicroBatches(int(rng.integers(1, slots + 1)), int(rng.integers(1, slots + 1)))
    count = int(rng.integers(1, 6 * slots))
    outputs = drawn_outputs(rng, KINDS[seed % len(KINDS)], int(rng.integers(2, 12)), count)
    rows = JobRows(rng.integers(1, 40, count).tolist(), outputs)
    events = EventSimulation(pipeline, rows, sizes, slots)
    seconds = events.run()
    simulated, *_ = simulate_job(rows, slots, sizes, pipeline.stages, pipeline.seconds)
    assert simulated.seconds == pytest.approx(seconds, rel=1e-12)
    np.testing.assert_allclose(simulated.ended_s, sorted(events.ended_s.values()), rtol=1e-12)
    assert simulated.generated_tokens == sum(outputs)
    both = {"prefill": simulated.prefill_busy_s, "decode": simulated.decode_busy_s}
    for phase, busy_s in both.items():
        expected = [
            sum(
                end - begin
                for (flight, machine), (begin, end) in events.spans.items()
                if machine == 2 * j and events.flights[flight][0].phase == phase
            )
            for j in range(pipeline.stages)
        ]
        np.testing.assert_allclose(busy_s, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("slots", "prefill", "stages"), [(44, 24, 4), (18, 6, 4), (8, 8, 3), (40, 8, 5), (9, 3, 1)]
)
def test_prefills_alone_wait_where_slots_allow_fewer_than_stages(
    slots: int, prefill: int, stages: int
) -> None:
    """The objective of a job of one new token each, on equal stages, against its simulation."""
    job, sizes = Job.of(50 * slots, 20, 1), MicroBatches(prefill, prefill)
    ones = (1.0,) * stages
    pipeline = Pipeline(ones, ones, (0.0,) * stages, (0.0,) * stages, 0.0)
    rows = JobRows([20] * job.prompts, [1] * job.prompts)
    simulated, *_ = simulate_job(rows, slots, sizes, stages, pipeline.seconds)
    assert objective_seconds(pipeline, job, slots, sizes) == pytest.approx(
        simulated.seconds, rel=0.12
    )


def balanced_pipeline(rng: np.random.Generator, stages: int) -> Pipeline:
    """Stages within a sixth of each other, and a prefill of one that takes 1 to 10 steps of one."""

    def draw(least: float) -> tuple[float, ...]:
        return tuple((least * rng.uniform(1, 1.2, stages)).tolist())

    return Pipeline(draw(float(rng.uniform(1, 10))), draw(1.0), draw(0.1), draw(0.05))


def objective_seconds(pipeline: Pipeline, job: Job, slots: int, sizes: MicroBatches) -> float:
    """The job's seconds by counts of its passes, each at its mean size."""
    passes = job_passes(job, slots, sizes, pipeline.stages)
    grown = pipeline.per_context * job.lengths.mean_context
    prefill_s = passes.prefill_requests * np.array(pipeline.prefill)
    decode_s = passes.decode_requests * (np.array(pipeline.decode) + grown)
    hops_s = passes.prefill_requests * np.array(pipeline.prefill_comm)
    back_s = passes.decode_requests * np.array(pipeline.decode_comm)
    return float(
        (passes.prefills - passes.bursts) * max(prefill_s.max(), hops_s.max())
        + passes.bursts * (prefill_s.sum() + hops_s.sum())
        + max(
            passes.decode_steps * max(decode_s.max(), back_s.max()),
            passes.rounds * (decode_s.sum() + back_s.sum()),
        )
    )


def test_objective_is_near_the_events_of_balanced_pipelines() -> None:
    """But where groups are uneven, or answers are over before all slots have been filled."""
    rng = np.random.default_rng(3)
    errors = []
    for case in cases(60, KINDS, (12,)):
        groups = -(-case.slots // case.sizes.decode)
        fills_slowly = np.mean(case.outputs) * groups * case.sizes.prefill < 2 * case.slots
        if groups < case.stages or case.slots % case.sizes.decode or fills_slowly:
            continue
        pipeline = balanced_pipeline(rng, case.stages)
        job = Job(len(case.outputs), Lengths.of((9, output) for output in case.outputs))
        rows = JobRows([9] * job.prompts, case.outputs)
        events, *_ = simulate_job(rows, case.slots, case.sizes, case.stages, pipeline.seconds)
        seconds = objective_seconds(pipeline, job, case.slots, case.sizes)
        mean_of_sample = (job.output_tokens - job.prompts) / (sum(case.outputs) - job.prompts)
        errors.append(abs(seconds / mean_of_sample / events.seconds - 1))
    assert len(errors) > 20
    assert np.median(errors) < 0.02
    assert max(errors) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_forecast_of_a_long_job_is_near_all_of_its_events(kind: str) -> None:
    rng = np.random.default_rng(1)
    pipeline, sizes = balanced_pipeline(rng, 3), MicroBatches(2, 8)
    lengths = Lengths(
        tuple(rng.integers(1, 50, 500).tolist()), tuple(drawn_outputs(rng, kind, 20, 500))
    )
    job = Job(6_000, lengths)
    whole = JobRows(*(each.tolist() for each in lengths.rows(job.prompts)))
    expected, *_ = simulate_job(whole, 24, sizes, 3, pipeline.seconds)
    forecast = forecast_job(job, 24, sizes, 3, pipeline.seconds)
    assert len(forecast.ended_s) < job.prompts / 8
    assert forecast.seconds == pytest.approx(expected.seconds, rel=0.01)
    np.testing.assert_allclose(forecast.prefill_busy_s, expected.prefill_busy_s, rtol=0.01)
    np.testing.assert_allclose(forecast.decode_busy_s, expected.decode_busy_s, rtol=0.01)
    assert forecast.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.01)


@pytest.mark.parametrize("policy", ["s3", "s3-published"])
@pytest.mark.parametrize("seed", range(3))
def test_forecast_with_predicted_lengths_is_near_all_of_its_events(
    seed: int, policy: PolicyName
) -> None:
    rng = np.random.default_rng(seed)
    outputs = np.clip(rng.lognormal(2.5, 1.0, 300).astype(int), 1, 100)
    prompts = rng.integers(1, 50, 300)
    lengths = Lengths(tuple(prompts.tolist()), tuple(outputs.tolist()), "seen", 100)
    confusion = np.eye(10, dtype=np.int64) * 60 + rng.integers(0, 9, (10, 10))
    counts = tuple(map(tuple, confusion.tolist()))
    job = Job(4000, lengths, None, AssumedPredictor("tried", tuple(range(10, 101, 10)), counts))
    slots = job.in_flight(24, policy).reservable_under(policy)
    sizes = OrcaSizes(12, slots, 400, 32, policy)

    def seconds(each: Pass) -> PassSeconds:
        assert isinstance(each, MixedPass)
        decode_s = bool(each.decodes) + 0.02 * each.decodes
        taken = decode_s + 0.02 * (each.all_tokens - each.decodes)
        return PassSeconds((taken,) * 3, (0.1,) * 3, (decode_s,) * 3)

    expected, *_ = simulate_job(JobRows.of(job, job.prompts), 24, sizes, 3, seconds)
    forecast = forecast_job(job, 24, sizes, 3, seconds)
    assert len(forecast.ended_s) < job.prompts / 2
    assert forecast.seconds == pytest.approx(expected.seconds, rel=0.05)
    assert max(forecast.busy_share) == pytest.approx(max(expected.busy_share), rel=0.03)


def cost_model(job: Job, slots: int) -> CostModel:
    cluster = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [3, 1])
    shape, options = model_shape("opt-1.3b"), PlanOptions(bits=FOUR_BITS)
    return CostModel(
        cluster,
        shape,
        job.in_flight(slots),
        options,
        RooflineLatency(shape),
        default_sensitivity(shape, options.bits),
        job=job,
    )


def test_assignment_takes_the_latency_models_times_at_each_length() -> None:
    """Busy seconds of one stage against sums over the events of another simulation."""
    lengths = Lengths((300, 40, 800, 20, 500, 90, 10), (5, 40, 2, 9, 30, 1, 17))
    job, sizes, slots = Job(7, lengths), MicroBatches(2, 2), 4
    costs = cost_model(job, slots)
    (device, *_), layers = costs.cluster.devices, costs.shape.layers
    simulated = simulate_job_assignment(
        PassTable.of(costs, (device,), (0, layers), [3] * layers), sizes
    )
    one_second = Pipeline((1.0,), (1.0,), (0.0,), (0.0,), size_matters=False)
    rows = JobRows(lengths.prompt_tokens, lengths.output_tokens)
    events = EventSimulation(one_second, rows, sizes, slots)
    events.run()
    latency, bits, expected_s = costs.latency, costs.options.bits[3], [0.0, 0.0]
    for each, _ in events.flights:
        size = each.requests
        if each.phase == "prefill":
            layer_s = latency.layer_seconds(
                device, bits, "prefill", 1, sum(each.prompts), "float16"
            ).rest_s
            layer_s += sum(
                latency.layer_seconds(device, bits, "prefill", 1, prompt, "float16").attention_s
                for prompt in each.prompts
            )
        else:
            layer_s = latency.layer_decode_s(device, bits, size, each.context_length, "float16")
        ends_s = latency.embedding_s(device, each.all_tokens, "float16")
        ends_s += latency.final_s(device, size, "float16")
        expected_s[each.phase == "decode"] += layers * layer_s + ends_s
    assert simulated.prefill_busy_s[0] == pytest.approx(expected_s[0], rel=0.005)
    assert simulated.decode_busy_s[0] == pytest.approx(expected_s[1], rel=0.005)


def test_a_job_of_one_batch_takes_what_the_batch_takes() -> None:
    job, sizes = Job.of(12, 128, 20), MicroBatches(5, 8)
    costs, bitwidth = cost_model(job, 12), [0] * 10 + [3] * 14
    devices, bounds = costs.cluster.devices, (0, 8, 12, 12, 24)
    batch = simulate_assignment(PassTable.of(costs, devices, bounds, bitwidth), sizes)
    simulated = simulate_job_assignment(PassTable.of(costs, devices, bounds, bitwidth), sizes)
    assert simulated.seconds == pytest.approx(batch.latency_s, rel=0.002)
    np.testing.assert_allclose(simulated.prefill_busy_s, batch.busy_s("prefill"), rtol=1e-9)
    np.testing.assert_allclose(simulated.busy_share, batch.busy_share, rtol=0.005)
