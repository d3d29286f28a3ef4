"""The simulation against closed forms, an event simulation of its own kind, and the scheduler."""

from __future__ import annotations

import numpy as np
import pytest

from actors.messages import FinishReason, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassSeconds, PassTable
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.optimiser.assignment import evaluate
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.schedule.passes import JobRows
from planner.schedule.static import JobSchedule
from planner.simulation.simulation import Simulated, simulate, simulate_assignment
from planner.workload import MicroBatches, Workload
from quant.common.errors import SpecError
from tests.actors.driving import drive
from tests.planner.problems import FOUR_BITS
from tests.planner.simulation.event_simulation import EventSimulation, Pipeline


def random_pipeline(rng: np.random.Generator, stages: int, **options: object) -> Pipeline:
    def draw(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high, stages).tolist())

    return Pipeline(draw(2, 20), draw(0.5, 4), draw(0, 6), draw(0, 2), **options)  # type: ignore[arg-type]


def run(pipeline: Pipeline, workload: Workload, sizes: MicroBatches) -> Simulated:
    return simulate(workload, sizes, pipeline.stages, pipeline.seconds)


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_an_event_simulation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pipeline = random_pipeline(rng, int(rng.integers(1, 7)), per_context=rng.uniform(0, 0.02))
    workload = Workload(*(int(rng.integers(low, high)) for low, high in ((1, 40), (1, 9), (1, 9))))
    most = workload.global_batch + 1
    sizes = MicroBatches(int(rng.integers(1, most)), int(rng.integers(1, most)))
    events = EventSimulation(pipeline, JobRows.alike(workload), sizes)
    latency_s = events.run()
    simulated = run(pipeline, workload, sizes)
    assert simulated.latency_s == pytest.approx(latency_s, rel=1e-12)
    found = np.array([events.spans[key] for key in sorted(events.spans)])
    expected = np.stack([simulated.stage_start_s, simulated.link_start_s], axis=2).reshape(-1)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-12)
    expected = np.stack([simulated.stage_end_s, simulated.link_end_s], axis=2).reshape(-1)
    np.testing.assert_allclose(found[:, 1], expected, rtol=1e-12)


class RecordingPipeline:
    """Notes which requests were submitted, at which lengths, after how many results."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.results = 0
        self.submitted: list[tuple[list[int], int, int, int]] = []

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> MicroBatch:
        (start,), (count,) = set(batch.starts.tolist()), set(batch.counts.tolist())
        self.submitted.append((batch.slots.tolist(), start, count, self.results))
        return batch

    def result(self, handle: MicroBatch) -> Sampled:
        self.results += 1
        last = [self.new_tokens(int(start)) for start in handle.starts + handle.counts]
        reasons: list[FinishReason | None] = ["length" if each else None for each in last]
        return Sampled(np.full(len(last), 7, dtype=np.int64), tuple(reasons))

    def new_tokens(self, length: int) -> bool:
        return length == self.last_length

    last_length = 0


@pytest.mark.parametrize("prefill", [1, 3, 5, 13])
@pytest.mark.parametrize("decode", [1, 4, 13])
@pytest.mark.parametrize(("stages", "new_tokens"), [(1, 3), (2, 1), (3, 6)])
def test_order_is_that_of_the_scheduler(
    prefill: int, decode: int, stages: int, new_tokens: int
) -> None:
    workload = Workload(13, 4, new_tokens)
    requests = [
        Request(f"r{i}", (3,) * workload.prompt_length, new_tokens, Sampling())
        for i in range(workload.global_batch)
    ]
    recorded = RecordingPipeline(stages)
    recorded.last_length = workload.total_length - 1
    scheduler = StaticScheduler(QueueSizes(len(requests), prefill, decode, 64), stages)
    scheduler.add(requests)
    for _ in drive(scheduler, recorded):
        pass
    sizes = {"prefill": prefill, "decode": decode}
    passes = JobSchedule(
        JobRows.alike(workload), workload.global_batch, MicroBatches(prefill, decode), stages
    ).passes()
    assert recorded.submitted == [
        (
            [each.index * sizes[each.phase] + i for i in range(each.requests)],
            each.context_length,
            each.tokens,
            each.results_before,
        )
        for each in passes
    ]


def test_one_stage_never_rests() -> None:
    """N = 1 without a link: the latency is the sum of all computations."""
    pipeline = Pipeline((3.0,), (0.25,), (0.0,), (0.0,), per_context=0.125)
    workload = Workload(10, 16, 5)
    contexts = sum(16 + step for step in range(4))
    expected = 10 * 3.0 + 10 * (4 * 0.25 + 0.125 * contexts)
    simulated = run(pipeline, workload, MicroBatches(3, 4))
    assert simulated.latency_s == pytest.approx(expected, rel=1e-12)
    assert simulated.busy_share == pytest.approx((1.0,), rel=1e-12)
    assert simulated.prefill_s == pytest.approx(30.0)


def test_one_micro_batch_goes_round_alone() -> None:
    """The sum over stages and links, once in prefill and n - 1 times in decode."""
    pipeline = Pipeline((3.0, 5.0), (0.5, 1.0), (0.25, 0.125), (0.0625, 0.5))
    simulated = run(pipeline, Workload(1, 8, 11), MicroBatches(1, 1))
    assert simulated.prefill_s == 8.375
    assert simulated.latency_s == 8.375 + 10 * 2.0625


@pytest.mark.parametrize("stages", [2, 4])
def test_equal_stages_fill_and_stay_full(stages: int) -> None:
    """As many decode micro-batches as equal stages: the first stage never rests, the last is N - 1
    micro-batches behind.
    """
    nothing = (0.0,) * stages
    pipeline = Pipeline((2.0,) * stages, (1.0,) * stages, nothing, nothing)
    workload, sizes = Workload(4 * stages, 8, 6), MicroBatches(2, 4)
    simulated = run(pipeline, workload, sizes)
    prefill_s, decode_s, micro_batches = 2 * 2.0, 4 * 1.0, stages
    assert simulated.prefill_s == (2 * micro_batches + stages - 1) * prefill_s
    first_stage_s = 2 * micro_batches * prefill_s + 5 * micro_batches * decode_s
    assert simulated.latency_s == first_stage_s + (stages - 1) * decode_s


@pytest.mark.parametrize("seed", range(12))
def test_objective_is_within_one_percent(seed: int) -> None:
    """With equal micro-batches and times that do not change.

    Two micro-batches a stage under way are enough: going round takes at most 2N bottlenecks.
    """
    rng = np.random.default_rng(seed)
    stages = seed % 6 + 1
    micro_batches = int(rng.integers(1, 4 * stages + 1))
    pipeline = random_pipeline(rng, stages, size_matters=False)
    workload = Workload(micro_batches * 2, 8, 100)
    simulated = run(pipeline, workload, MicroBatches(1, 2))
    problem = AssignmentProblem(
        prefill_s=np.zeros((stages, 1)),
        decode_s=np.zeros((stages, 1)),
        fixed_prefill_s=np.array(pipeline.prefill),
        fixed_decode_s=np.array(pipeline.decode),
        prefill_comm_s=np.array(pipeline.prefill_comm),
        decode_comm_s=np.array(pipeline.decode_comm),
        layer_bytes=np.zeros((stages, 1)),
        memory_bytes=np.ones(stages),
        sensitivity=np.zeros((stages, 1)),
        theta=0.0,
        bitwidths=(16,),
        prefill_micro_batches=2 * micro_batches,
        decode_micro_batches=micro_batches,
        new_tokens=workload.new_tokens,
    )
    closed_form = evaluate(problem, range(stages + 1), (0,) * stages)
    assert simulated.latency_s == pytest.approx(closed_form, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_conservation_order_and_causality(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pipeline = random_pipeline(rng, int(rng.integers(1, 6)), per_context=0.01)
    workload = Workload(int(rng.integers(1, 30)), 6, 7)
    sizes = MicroBatches(int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    s = run(pipeline, workload, sizes)
    own = np.array([pipeline.seconds(each).compute for each in s.passes])
    np.testing.assert_allclose(s.busy_s("prefill") + s.busy_s("decode"), own.sum(axis=0))
    np.testing.assert_allclose(np.array(s.busy_share) * s.latency_s, own.sum(axis=0))
    assert (s.stage_start_s[1:] >= s.stage_end_s[:-1]).all()
    assert (s.link_start_s[1:] >= s.link_end_s[:-1]).all()
    assert (s.link_start_s >= s.stage_end_s).all()
    assert (s.stage_start_s[:, 1:] >= s.link_end_s[:, :-1]).all()
    back = np.concatenate([[0.0], s.link_end_s[:, -1]])
    for row, each in enumerate(s.passes):
        assert s.stage_start_s[row, 0] >= back[each.results_before]
        assert row - each.results_before < 2 * pipeline.stages
    tokens = sum(each.requests for each in s.passes)
    assert tokens == workload.global_batch * workload.new_tokens


def test_a_slow_link_is_the_bottleneck() -> None:
    pipeline = Pipeline((1.0, 1.0), (1.0, 1.0), (9.0, 0.0), (9.0, 0.0))
    simulated = run(pipeline, Workload(8, 4, 5), MicroBatches(1, 1))
    assert simulated.latency_s == pytest.approx(1 + 8 * 5 * 9 + 1, rel=0.02)


def test_bad_timing_and_sizes_are_refused() -> None:
    workload = Workload(4, 4, 4)
    with pytest.raises(SpecError, match="micro-batches of 0"):
        simulate(workload, MicroBatches(0, 1), 1, lambda _: PassSeconds((1.0,), (0.0,)))
    with pytest.raises(SpecError, match="2 computations"):
        simulate(workload, MicroBatches(1, 1), 1, lambda _: PassSeconds((1.0, 1.0), (0.0,)))


def cost_model(global_batch: int = 12) -> CostModel:
    cluster = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [2, 1])
    shape, options = model_shape("opt-1.3b"), PlanOptions(bits=FOUR_BITS)
    workload = Workload(global_batch, 128, 20)
    sensitivity = default_sensitivity(shape, options.bits)
    return CostModel(cluster, shape, workload, options, RooflineLatency(shape), sensitivity)


def test_assignment_takes_the_latency_models_times() -> None:
    """Every pass against the model asked anew, for its own size and context."""
    costs, sizes = cost_model(), MicroBatches(5, 8)
    bitwidth = [0] * 10 + [3] * 4 + [2] * 10
    s = simulate_assignment(
        PassTable.of(costs, costs.cluster.devices, (0, 8, 12, 24), bitwidth), sizes
    )
    t4, _, v100 = costs.cluster.devices
    layers = ((t4, {3: 8}), (t4, {3: 2, 16: 2}), (v100, {16: 2, 8: 10}))
    contexts = set()
    for row, each in enumerate(s.passes):
        for stage, (device, counts) in enumerate(layers):
            model, size = costs.latency, each.requests
            expected = sum(
                count * model.layer_prefill_s(device, bits, size, 128, "float16")
                if each.phase == "prefill"
                else count
                * model.layer_decode_s(device, bits, size, each.context_length, "float16")
                for bits, count in counts.items()
            )
            if stage == 0:
                tokens = size * (128 if each.phase == "prefill" else 1)
                expected += model.embedding_s(device, tokens, "float16")
            if stage == 2:
                expected += model.final_s(device, size, "float16")
            taken = s.stage_end_s[row, stage] - s.stage_start_s[row, stage]
            assert taken == pytest.approx(expected, rel=1e-9)
        contexts.add((each.phase, each.requests, each.context_length))
    assert {entry for entry in contexts if entry[0] == "prefill"} == {
        ("prefill", 5, 0),
        ("prefill", 2, 0),
    }
    assert {entry for entry in contexts if entry[0] == "decode"} == {
        ("decode", size, 128 + step) for size in (8, 4) for step in range(19)
    }


def test_empty_stages_are_left_out() -> None:
    costs, sizes = cost_model(), MicroBatches(3, 6)
    first, _, last = costs.cluster.devices
    whole = simulate_assignment(
        PassTable.of(costs, costs.cluster.devices, (0, 9, 9, 24), [3] * 24), sizes
    )
    without = simulate_assignment(PassTable.of(costs, (first, last), (0, 9, 24), [3] * 24), sizes)
    assert whole.stages == 2
    np.testing.assert_array_equal(whole.link_end_s, without.link_end_s)


def test_assignment_of_another_model_is_refused() -> None:
    costs = cost_model()
    with pytest.raises(SpecError, match="24 layers"):
        simulate_assignment(
            PassTable.of(costs, costs.cluster.devices, (0, 1, 2, 12), [0] * 12), MicroBatches(1, 1)
        )
