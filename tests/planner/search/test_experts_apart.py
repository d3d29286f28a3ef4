"""Plans whose experts have bits and a place of their own, against sums over layers and trying
everything.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.hosting import host_memories, host_threads
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.latency_bound.bounded_plan import bounded_options, costs_beside_bound
from planner.model.finding import model_shape
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.optimiser.assignment import SolveOptions, evaluate, stage_times
from planner.optimiser.problem import latency_form
from planner.optimiser.solve import solve_by
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import OmegaContent, default_sensitivity, save_omega
from planner.search.remedies import more_host_memory
from planner.search.request import PlanningRequest, cost_model
from planner.workload import MicroBatches, Workload
from quant.backends.table import HOST_BACKENDS, rule_for
from quant.common.errors import DoesNotFitError, SpecError
from quant.scheme import Processor
from tests.paths import SPECS
from tests.planner.kinds import EXPERT, FULL, three_kinds
from tests.planner.plan_alone import find_plan

BITS = (4, 8)
WORKLOAD, SIZES = Workload(4, 128, 32), MicroBatches(2, 4)
SHAPE = three_kinds((EXPERT, FULL, EXPERT, FULL))
CLUSTER = ClusterSpec.from_dict(
    {
        "name": "hosts",
        "nodes": [
            {"name": "a", "accelerators": {"T4": 2}, "host_memory_gib": 6, "host_threads": 12},
            {"name": "b", "accelerators": {"V100-32GB": 1}},
        ],
        "network": {"internode_gbit_per_s": 10},
    }
)
T4, _, V100 = CLUSTER.devices


def costs_of(shape: ModelShape = SHAPE, group: int = 1) -> CostModel:
    options = PlanOptions(bits=BITS, memory_margin=0.0, group=group, relative_gap=0.0)
    omega = default_sensitivity(shape, BITS)
    costs = cost_model(CLUSTER, shape, WORKLOAD, options, omega)
    return replace(costs, experts_apart=True, hosting=True, theta=0.3)


def expert_bytes(shape: ModelShape, bits: int, processor: Processor, host: bool) -> int:
    assert shape.experts is not None
    dtype, backend = ("bfloat16", HOST_BACKENDS[bits]) if host else ("float16", None)
    return shape.experts.count * sum(
        rule_for(processor, bits, linear, dtype, backend).nbytes(linear, dtype)
        for linear in shape.expert_linears
    )


def direct(
    costs: CostModel, device: Device, layers: range, choices: Sequence[LayerChoice]
) -> tuple[float, float, int, int]:
    """Seconds in prefill and decode, and bytes on device and host, each layer by itself."""
    each = [alone(costs.shape.layer(i), device, c) for i, c in zip(layers, choices, strict=True)]
    prefill_s, decode_s, held, hosted = zip(*each, strict=True)
    return sum(prefill_s), sum(decode_s), sum(held), sum(hosted)


@cache
def alone(shape: ModelShape, device: Device, choice: LayerChoice) -> tuple[float, float, int, int]:
    prefill_s = decode_s = 0.0
    held = hosted = 0
    model, dtype = RooflineLatency(shape), "float16"
    held += kv_cache_bytes_per_layer(shape, WORKLOAD, 16, dtype)
    held += layer_weight_bytes(shape, choice.bits, device, dtype)
    seconds = []
    for phase, requests, length in (("prefill", 2, 128), ("decode", 4, 144)):
        own = device, choice.bits, phase, requests, length, dtype
        whole_s = model.layer_seconds(*own).whole_s  # type: ignore[arg-type]
        tokens = requests * length if phase == "prefill" else requests
        if shape.experts is not None:
            whole_s -= model.experts_s(device, choice.bits, tokens, dtype)
            other = device, choice.expert_bits, tokens, dtype
            there = model.hosted_experts_s(*other)
            own_s = min(there.there_s, there.streamed_s)
            whole_s += own_s if choice.on_host else model.experts_s(*other)
        seconds.append(whole_s)
    prefill_s, decode_s = prefill_s + seconds[0], decode_s + seconds[1]
    if shape.experts is not None:
        held -= expert_bytes(shape, choice.bits, device.processor, False)
        if choice.on_host:
            hosted += expert_bytes(shape, choice.expert_bits, Processor(), True)
        else:
            held += expert_bytes(shape, choice.expert_bits, device.processor, False)
    return prefill_s, decode_s, held, hosted


def omega(costs: CostModel, choices: Sequence[LayerChoice]) -> float:
    """Gates, ups and downs of all experts count as three linears of their layer."""
    total = 0.0
    for layer, choice in enumerate(choices):
        rest, experts = (costs.sensitivity[layer, BITS.index(b)] for b in choice_bits(choice))
        shape, share = costs.shape.layer(layer), 0.0
        if shape.experts is not None:
            share = 3 / (3 + len(shape.layer_linears))
        total += (1 - share) * rest + share * experts
    return total


def choice_bits(choice: LayerChoice) -> tuple[int, int]:
    return choice.bits, choice.expert_bits


def every_choice(costs: CostModel, layer: int) -> list[LayerChoice]:
    if costs.shape.layer(layer).experts is None:
        return [LayerChoice.whole(bits) for bits in BITS]
    return [LayerChoice(*bits, host) for bits in itertools.product(BITS, BITS) for host in (0, 1)]


@pytest.mark.parametrize("cramped", [False, True])
def test_the_best_of_units_is_the_best_of_everything_tried(cramped: bool) -> None:
    costs, devices = costs_of(), (T4, V100)
    if cramped:  # the T4 holds a layer's rest and not its experts
        most = direct(costs, T4, range(1), [LayerChoice(4, 4, True)])[2] * 2.5
        free = costs.grouped_problem(devices, SIZES).memory_bytes[0]
        small = replace(T4, memory_bytes=int(T4.memory_bytes - free + most))
        devices = (small, V100)
    problem = costs.grouped_problem(devices, SIZES)
    form, best = latency_form(problem), math.inf
    for cut in range(1, SHAPE.layers):
        spans = range(cut), range(cut, SHAPE.layers)
        for choices in itertools.product(*(every_choice(costs, i) for i in range(SHAPE.layers))):
            stages = [
                direct(costs, device, span, choices[span.start : span.stop])
                for device, span in zip(devices, spans, strict=True)
            ]
            bounds, units = costs.placing.assigned((0, cut, SHAPE.layers), choices)
            may_be = not any(choices[layer].on_host for layer in spans[1])  # b states no memory
            may_be = may_be and stages[0][3] <= host_memories([T4])["a"]
            may_be = may_be and all(
                stage[2] <= memory
                for stage, memory in zip(stages, problem.memory_bytes, strict=True)
            )
            found = evaluate(problem, bounds, units)
            if not may_be:
                assert found == math.inf
                continue
            prefill, decode = (
                [stage[phase] + fixed[j] for j, stage in enumerate(stages)]
                for phase, fixed in enumerate((problem.fixed_prefill_s, problem.fixed_decode_s))
            )
            seconds = form.seconds(max(prefill), max(decode), sum(prefill), sum(decode))
            assert found == pytest.approx(float(seconds) + 0.3 * omega(costs, choices), rel=1e-9)
            best = min(best, found)
    solved = solve_by("auto", problem, SolveOptions(relative_gap=0.0))
    assert solved.objective == pytest.approx(best, rel=1e-6)
    first_layer, indices = costs.placing.expanded(solved)
    chosen = [costs.placing.choices[index] for index in indices]
    assert costs.placing.assigned(first_layer, chosen) == (solved.first_layer, solved.bitwidth)
    assert any(choice.on_host for choice in chosen) == cramped


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_measured_parts_decide_the_bits_of_experts_and_of_the_rest(
    part: float, tmp_path: Path
) -> None:
    matrix = default_sensitivity(SHAPE, BITS)
    experts = matrix * [[part * (SHAPE.layer(i).experts is not None)] for i in range(SHAPE.layers)]
    path, options = tmp_path / "omega.json", PlanOptions(bits=BITS, theta=1e3)
    save_omega(path, OmegaContent(BITS, SHAPE.fingerprint(), matrix, experts=experts))
    options = replace(options, omega_file=str(path))
    cluster = replace(CLUSTER, devices=(V100,))
    plan = find_plan(cluster, SHAPE, "three", WORKLOAD, options).plan
    chosen = [choice_bits(each) for stage in plan.stages for each in stage.choices]
    low = (8, 4) if part == 0 else (4, 8)  # what loses nothing is sooner at 4 bit
    assert chosen == [low, (8, 8), low, (8, 8)]
    assert plan.solver.sensitivity == pytest.approx(matrix[:, 1].sum())


def test_groups_of_layers_are_two_units() -> None:
    shape, devices = three_kinds((EXPERT, FULL, EXPERT, EXPERT)), (T4, V100)
    costs, single = costs_of(shape, group=2), costs_of(shape)
    problem = costs.grouped_problem(devices, SIZES)
    assert problem.layers == 4
    assert problem.joined == (1, 3)
    chosen = [LayerChoice(8, 4, True), LayerChoice.whole(8), LayerChoice(4, 8), LayerChoice(4, 8)]
    bounds, units = costs.placing.assigned((0, 2, 4), chosen)
    one = stage_times(problem, bounds, units)
    other = stage_times(
        single.grouped_problem(devices, SIZES), *single.placing.assigned((0, 2, 4), chosen)
    )
    for name in ("prefill_s", "decode_s", "bytes", "host_bytes", "latency_s", "quality"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-12)
    evaluated = evaluate(problem, (0, 1, 4), units)
    assert evaluated == math.inf, "experts lie on the stage of their layer"


def test_hosts_are_shared_by_the_gpus_of_their_node(tmp_path: Path) -> None:
    assert (T4.host_devices, host_threads(T4)) == (2, 6)
    assert host_memories(CLUSTER.devices) == {"a": 6 * 2**30}
    assert host_memories([T4, V100]) == {"a": 3 * 2**30}, "the other T4 may be another pipeline's"
    (tmp_path / "cluster.yaml").write_text(CLUSTER.to_yaml())
    assert ClusterSpec.from_yaml(tmp_path / "cluster.yaml").devices == CLUSTER.devices


def asked(
    host_gib: float, usable_gib: float, bits: int, name: str = "qwen3-30b-a3b"
) -> PlanningRequest:
    """Experts that no single device holds, of 54 GiB in 16 bit."""
    node = {"name": "a", "accelerators": {"T4": 1}, "usable_memory_gib": usable_gib}
    values = {"name": "one", "nodes": [{**node, "host_memory_gib": host_gib}]}
    cluster = ClusterSpec.from_dict(values)
    options = PlanOptions(bits=(bits,), head_bits=(16,), group=12)
    return PlanningRequest.of(cluster, model_shape(name), WORKLOAD, options)


def planned(host_gib: float, usable_gib: float = 14.6, bits: int = 4) -> PlanSpec:
    request = asked(host_gib, usable_gib, bits)
    name = request.shape.name
    return find_plan(request.cluster, request.shape, name, WORKLOAD, request.options).plan


def _check(plan: PlanSpec) -> None:
    plan.check()
    check_plan(plan, model_shape(plan.model.source))


def test_a_plan_states_what_lies_on_its_host_and_is_checked() -> None:
    plan = planned(64)
    (stage,) = plan.stages
    assert all((stage.hosted_experts, stage.host_bytes, stage.streams_from))
    text, shape = plan.to_json(), model_shape(plan.model.source)
    assert PlanSpec.from_json(text) == plan
    for rest, experts in ((16, 4), (4, 16), (16, 16)):
        bits = {"bitwidths": (rest,) * 48, "expert_bitwidths": (experts,) * 48}
        other = replace(plan, stages=(replace(stage, **bits),))
        assert other.needs_importance(shape) == (4 in (rest, experts))
    _check(plan)
    for changed, named in (
        ({"host_bytes": 2**40}, "host_bytes"),
        ({"hosted_experts": (99,)}, "hosted_experts"),
        ({"expert_bitwidths": (4,)}, "expert_bitwidths"),
    ):
        wrong = replace(plan, stages=(replace(stage, **changed),))
        with pytest.raises(SpecError, match=rf"stages\.0\.{named}"):
            _check(wrong)


def test_a_plan_of_35_billion_parameters_over_gpus_and_hosts_has_its_true_bytes() -> None:
    """Sizes of the published configuration, counted here; micro-batches given, to be soon done."""
    name, cluster = "qwen3.5-35b-a3b", ClusterSpec.from_yaml(SPECS / "v100_t4_hosts.yaml")
    options = PlanOptions(bits=(16,), prefill_micro_batch=4, decode_micro_batch=11, head="last")
    workload = Workload(32, 512, 100)
    plan = find_plan(cluster, model_shape(name), name, workload, options).plan
    _check(plan)
    for each_gib, fits in ((64, True), (65, False)):  # of two stages on a host of 128
        stages = [
            replace(each, host_bytes=each_gib * 2**30) if each.node == "v100" else each
            for each in plan.stages
        ]
        context = nullcontext() if fits else pytest.raises(SpecError, match=r"node v100 keep \d+")
        with context:
            check_plan(replace(plan, stages=tuple(stages)), None)
    hidden, width, experts = 2048, 512, 256
    all_experts = 2 * 3 * experts * hidden * width
    router = 2 * hidden * (experts + 1)  # and the gate of the shared expert
    norms, shared = 2 * 2 * hidden, 2 * 3 * hidden * width
    full = 2 * (hidden * (2 * 16 + 2 + 2) * 256 + 16 * 256 * hidden + 2 * 256)
    keys, values, heads = 16 * 128, 32 * 128, 32
    channels = 2 * keys + values
    linear = 2 * (hidden * (channels + values + 2 * heads) + values * hidden)
    linear += 2 * (4 * channels + 128) + 4 * 2 * heads  # rates in float32
    cache = {
        True: 2 * 2 * 32 * 612 * 2 * 256,
        False: 32 * (4 * heads * 128 * 128 + 2 * 3 * channels),
    }
    for stage in plan.stages:
        kinds = [layer % 4 == 3 for layer in stage.layers]
        each = sum(full if kind else linear for kind in kinds)
        each += len(kinds) * (norms + shared + router + all_experts)
        hosted = len(stage.hosted_experts) * all_experts
        assert stage.host_bytes == hosted
        assert stage.memory.weights == each - hosted
        assert stage.memory.kv_cache == sum(cache[kind] for kind in kinds)
        assert stage.memory_bytes <= stage.memory_limit_bytes
    assert sum(len(stage.hosted_experts) for stage in plan.stages) > 10
    weights = sum(stage.memory.weights + stage.host_bytes for stage in plan.stages)
    assert weights > sum(stage.memory_limit_bytes for stage in plan.stages)


def test_hosts_memory_is_offered_where_experts_would_fit_into_it() -> None:
    """All but the experts fits 14.6 GiB, and not 1 GiB."""
    with pytest.raises(DoesNotFitError, match=r"host_memory_gib: 64 of node a \("):
        planned(32, bits=16)
    assert planned(64, bits=16).stages[0].host_bytes > 32 * 2**30
    (offered,) = more_host_memory(asked(1, 14.6, 16))
    assert [each.host_memory_bytes for each in offered.request.cluster.devices] == [64 * 2**30]
    assert not list(more_host_memory(asked(32, 1, 16)))
    assert not list(more_host_memory(asked(32, 14.6, 16, "opt-30b")))


def test_plans_beside_a_bound_say_that_experts_stay_on_devices() -> None:
    options = bounded_options(PlanOptions(bits=BITS))
    with pytest.warns(UserWarning, match="host_memory_gib is not used for them"):
        costs, _ = costs_beside_bound(PlanningRequest.of(CLUSTER, SHAPE, WORKLOAD, options))
    assert not any(choice.on_host for choice in costs.placing.choices)
    bare = replace(CLUSTER, devices=(V100,))
    with warnings.catch_warnings(action="error"):
        costs_beside_bound(PlanningRequest.of(bare, SHAPE, WORKLOAD, options))
