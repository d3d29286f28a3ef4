"""Plans of models with layers of several kinds, against sums over layers and trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape, refusal
from planner.optimiser.assignment import stage_times
from planner.optimiser.feasibility import is_feasible
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.kv_copies import host_copies, kept_shares
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.search.candidate_search import search
from planner.search.candidates import Candidates
from planner.search.fitting import first_sets, heads_of, searched_sizes
from planner.search.orders import canonical_devices, order_tree
from planner.search.request import cost_model
from planner.simulation.simulation import simulate_assignment
from planner.workload import Job, MicroBatches, Workload
from quant.common.errors import DoesNotFitError, SpecError
from quant.common.units import GIB
from tests.planner.kinds import DELTA, EXPERT, FULL, three_kinds
from tests.planner.plan_alone import find_plan
from tests.planner.problems import brute_force

CLUSTER = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [2, 1])
WORKLOAD = Workload(global_batch=4, prompt_length=128, new_tokens=32)
PATTERN = (DELTA, EXPERT, FULL, EXPERT, DELTA, DELTA)
BITS = (4, 16)


def costs_of(shape: ModelShape, **options: object) -> CostModel:
    chosen = replace(PlanOptions(bits=BITS, relative_gap=1e-6, memory_margin=0.0), **options)
    return cost_model(CLUSTER, shape, WORKLOAD, chosen, default_sensitivity(shape, BITS))


def direct_seconds(
    costs: CostModel, stage: tuple[Device, range, Sequence[int]], phase: str, size: int, length: int
) -> float:
    """Seconds of a stage's layers, each asked for by itself."""
    device, layers, bits = stage
    of_layer = [RooflineLatency(costs.shape.layer(layer)) for layer in layers]
    ask = "layer_prefill_s" if phase == "prefill" else "layer_decode_s"
    times = zip(of_layer, bits, strict=True)
    return sum(getattr(model, ask)(device, b, size, length, "float16") for model, b in times)


def test_a_problem_and_its_simulation_are_sums_over_layers() -> None:
    costs, sizes = costs_of(three_kinds(PATTERN)), MicroBatches(2, 3)
    devices, bounds, bits = CLUSTER.devices, (0, 2, 4, 6), (4, 4, 16, 4, 4, 16)
    choices, shape = [BITS.index(each) for each in bits], costs.shape
    problem = costs.problem(devices, sizes)
    found = stage_times(problem, bounds, choices)
    simulated = simulate_assignment(PassTable.of(costs, devices, bounds, choices), sizes)
    assert found.quality == pytest.approx(
        sum(costs.sensitivity[layer, choice] for layer, choice in enumerate(choices))
    )
    for stage, device in enumerate(devices):
        layers = range(bounds[stage], bounds[stage + 1])
        own = device, layers, bits[layers.start : layers.stop]
        held = sum(
            layer_weight_bytes(shape.layer(layer), bits[layer], device, "float16")
            + kv_cache_bytes_per_layer(shape.layer(layer), WORKLOAD, 16, "float16")
            for layer in layers
        )
        assert found.bytes[stage] == held
        ends = costs.latency.embedding_s if stage == 0 else costs.latency.final_s
        fixed_s = [0.0 if stage == 1 else ends(device, n, "float16") for n in (2 * 128, 2, 3)]
        prefill_s = direct_seconds(costs, own, "prefill", 2, 128)
        expected = prefill_s + fixed_s[0 if stage == 0 else 1]
        assert found.prefill_s[stage] == pytest.approx(expected, rel=1e-9)
        decode_s = direct_seconds(costs, own, "decode", 3, 144)
        assert found.decode_s[stage] == pytest.approx(decode_s + fixed_s[2], rel=1e-9)
        for row, each in enumerate(simulated.passes[:6]):
            length = 128 if each.phase == "prefill" else each.context_length
            layers_s = direct_seconds(costs, own, each.phase, each.requests, length)
            tokens = each.requests * (128 if each.phase == "prefill" else 1)
            rows = tokens if stage == 0 else each.requests
            ends_s = 0.0 if stage == 1 else ends(device, rows, "float16")
            taken = simulated.stage_end_s[row, stage] - simulated.stage_start_s[row, stage]
            assert taken == pytest.approx(layers_s + ends_s, rel=1e-9)


def test_units_of_unlike_layers_cost_what_their_layers_do() -> None:
    shape = three_kinds((DELTA, DELTA, FULL, DELTA, DELTA, FULL, EXPERT, EXPERT), joined=(3, 4))
    costs, sizes = costs_of(shape, group=2), MicroBatches(2, 3)
    whole, units = (made(CLUSTER.devices, sizes) for made in (costs.problem, costs.grouped_problem))
    assert units.kind_of_layer.tolist() == [0, 1, 1, 2] or units.kinds == 3
    assert units.joined == (2,)
    rng = np.random.default_rng(3)
    for _ in range(20):
        bounds = (0, *sorted(rng.choice([0, 1, 3, 4], 2).tolist()), 4)
        bits = tuple(rng.integers(0, 2, 4).tolist())
        one = stage_times(units, bounds, bits)
        all_layers, all_bits = (
            tuple(2 * each for each in bounds),
            tuple(np.repeat(bits, 2).tolist()),
        )
        other = stage_times(whole, all_layers, all_bits)
        for name in ("prefill_s", "decode_s", "bytes", "latency_s", "quality"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12)
    with pytest.raises(SpecError, match="group is 3, which does not divide"):
        costs_of(shape, group=3).grouped_problem(CLUSTER.devices, sizes)


@pytest.mark.parametrize(("window", "kinds"), [(4096, 1), (100, 2)])
def test_layers_whose_window_nobody_reaches_are_as_others(window: int, kinds: int) -> None:
    full = three_kinds(PATTERN).kinds[FULL]
    sliding = replace(full, kind="sliding", sliding_window=window)
    mixed = replace(full, kind="", kinds=(full, sliding), pattern=(0, 1, 0, 1, 1, 1))
    problem = costs_of(mixed).problem(CLUSTER.devices, MicroBatches(2, 3))
    assert problem.kinds == kinds
    plain = costs_of(full).problem(CLUSTER.devices, MicroBatches(2, 3))
    bits = (0, 1, 0, 1, 0, 1)
    both = [stage_times(each, (0, 2, 4, 6), bits) for each in (problem, plain)]
    assert (both[0].decode_s < both[1].decode_s).all() == (kinds == 2)
    assert both[0].bytes.tolist() == both[1].bytes.tolist()


@pytest.mark.parametrize("group", [1, 2])
def test_has_room_as_the_problem_is_feasible(group: int) -> None:
    shape = three_kinds((EXPERT, *PATTERN, EXPERT, EXPERT, FULL), joined=(4, 5))
    costs, found = costs_of(shape, group=group), set()
    for batch in (4, 40, 400, 4000):
        sized = replace(costs, workload=replace(WORKLOAD, global_batch=batch))
        for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1), (0, 1), (2,)):
            devices = [CLUSTER.devices[index] for index in order]
            found.add(sized.has_room(devices, MicroBatches(1, 1)))
            problem = sized.grouped_problem(devices, MicroBatches(1, 1))
            assert sized.has_room(devices, MicroBatches(1, 1)) == is_feasible(problem)
    assert found == {True, False}


@pytest.mark.parametrize("joined", [(), (2, 5), (4, 5, 6)])
def test_the_search_finds_the_best_of_everything(joined: tuple[int, ...]) -> None:
    """Memory is tight: a layer with experts takes 3 GiB in 16 bit."""
    shape = three_kinds((*PATTERN, EXPERT), joined)
    costs = costs_of(shape, keep_all_devices=True, decode_micro_batch=2)
    small = [replace(each, memory_bytes=int(5.5 * GIB)) for each in CLUSTER.devices]
    costs = replace(costs.on(tuple(small)), theta=0.3)
    devices, best, worst = canonical_devices(small), np.inf, 0.0
    for placed in heads_of(costs):
        for order in order_tree(devices, all_orders=False).orders():
            ordered = [devices[index] for index in order]
            for sizes in searched_sizes(placed, len(ordered)):
                found_s = brute_force(placed.problem(ordered, sizes))
                best, worst = min(best, found_s), max(worst, found_s)
    found = search(costs)
    assert found.assignment.objective == pytest.approx(best, rel=2e-6)
    assert worst > 1.1 * best
    assert found.lower_bound <= best * (1 + 1e-9)
    assert not {*joined} & {*found.assignment.first_layer}
    assert len(set(found.assignment.bitwidth)) == 2
    for candidate in Candidates(costs):
        assert candidate.bound <= brute_force(candidate.problem)


@pytest.mark.parametrize("policy", ["static", "orca"])
def test_a_plan_states_the_bytes_of_its_layers(policy: str) -> None:
    """In 16 bit what is held of weights are all parameters; the file can be checked again."""
    shape = three_kinds(2 * PATTERN)
    work = Job.of(60, 128, 32) if policy == "orca" else WORKLOAD
    options = PlanOptions(bits=(16,), theta=0.0, policy=policy)
    plan = find_plan(CLUSTER, shape, "mixed", work, options).plan
    check_plan(plan, shape)
    held = sum(stage.memory.weights for stage in plan.stages)
    in_float32 = 6 * 2 * 32  # decay and bias of each head of the mixers
    assert held == 2 * (sum(shape.parameters_by_layer) + in_float32)
    requests, tokens = plan.workload.global_batch, plan.workload.kv_tokens
    states = 6 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 + 32) * 128)
    keys = 6 * 2 * 2 * 256 * 2
    assert sum(s.memory.kv_cache for s in plan.stages) == requests * states + tokens * keys
    copies = host_copies(plan)
    assert sum(each.kv_bytes_per_token for each in copies) == keys
    assert sum(each.state_bytes for each in copies) == states
    assert '"state_bytes"' in plan.to_json()
    loaded = PlanSpec.from_json(plan.to_json(), "plan")
    check_plan(loaded, shape)
    wrong = replace(shape, pattern=(FULL, *shape.pattern[1:]))
    with pytest.raises(SpecError, match=r"memory\.(weights|kv_cache)"):
        check_plan(loaded, wrong)


def test_every_method_plans_unlike_layers() -> None:
    shape = three_kinds(PATTERN, joined=(3,))
    best = 0.0
    for method in ("auto", "transfer", "adabits", "uniform", "pipeedge", "ilp"):
        sizes = {"prefill_micro_batch": 2, "decode_micro_batch": 2}
        costs = costs_of(shape, method=method, relative_gap=1e-4, **sizes)
        found = search(replace(costs, theta=0.05)).assignment
        best = best or found.objective
        assert found.objective >= best * (1 - 2e-4)
        assert 3 not in found.first_layer


def test_sensitivities_by_default_are_shares_of_the_weights_of_a_token() -> None:
    shape = three_kinds(PATTERN)
    matrix = default_sensitivity(shape, (3, 4, 8, 16))
    assert matrix[:, 1].sum() == pytest.approx(1.0)
    assert (np.diff(matrix, axis=1) < 0).all()
    asked = 4 * 3 * 2048 * 4096  # of 64 experts
    weights = [
        sum(linear.parameters for linear in own.layer_linears) + asked * (own.experts is not None)
        for own in map(shape.layer, range(shape.layers))
    ]
    assert matrix[:, 1] == pytest.approx(np.array(weights) / sum(weights))


def test_layers_are_handed_over_by_what_they_keep() -> None:
    """Layers 1 to 3 have keys, 4 and 5 states: a third of the keys, half of the states."""
    shape = three_kinds(PATTERN)
    assert kept_shares(WORKLOAD, shape, range(3, 5), range(1, 6)) == pytest.approx((1 / 3, 1 / 2))
    assert kept_shares(WORKLOAD, shape, range(4, 6), range(4, 6)) == (0.0, 1.0)


def test_ranks_have_a_part_of_every_kind_of_layer() -> None:
    mixed = three_kinds(PATTERN)
    parts = largest_rank_shape(mixed, 2)
    assert parts.pattern == mixed.pattern
    for part, whole in zip(parts.kinds, mixed.kinds, strict=True):
        assert part == largest_rank_shape(whole, 2)
        assert 2 * part.layer_linear_parameters == whole.layer_linear_parameters
        assert 2 * part.kv_width == whole.kv_width
        assert 2 * part.state_bytes(2) == whole.state_bytes(2)
    mixer = replace(mixed.kinds[DELTA].delta, key_heads=2, value_heads=2)
    few = replace(mixed.kinds[DELTA], delta=mixer)
    narrow = replace(mixed, kinds=(mixed.kinds[EXPERT], few, mixed.kinds[FULL]))
    assert refusal(narrow, 2) is None
    assert "2 value heads of linear attention" in str(refusal(narrow, 4))


def test_experts_of_a_group_stay_on_its_devices() -> None:
    """What two T4 and their host hold as single ones."""
    node = {"name": "n", "accelerators": {"T4": 2}, "host_memory_gib": 64}
    cluster = ClusterSpec.from_dict({"name": "c", "nodes": [node]})
    shape = model_shape("qwen3-30b-a3b")
    for degree in (1, 2):
        options = PlanOptions(bits=(8,), tensor_parallel=degree)
        costs = cost_model(cluster, shape, WORKLOAD, options, default_sensitivity(shape, (8,)))
        costs = replace(costs, experts_apart=True, hosting=True)
        if degree == 1:
            assert len(next(first_sets(costs))) == 2
            continue
        with pytest.raises(DoesNotFitError, match="its experts stay on its devices"):
            next(first_sets(costs))
