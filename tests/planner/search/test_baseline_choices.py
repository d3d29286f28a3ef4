"""Choices of the baselines of LLM-PQ section 6.1, against trying every order and size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest

from llmpq.cluster import Cluster
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.model.finding import model_shape
from planner.optimiser.assignment import SolveOptions, evaluate, stage_times
from planner.optimiser.transfer import solve_adabits
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.search.baselines import baseline, baseline_orders, offloading
from planner.search.request import cost_model
from planner.simulation.simulation import simulate_assignment
from planner.workload import MicroBatches, Workload, micro_batch_pairs
from quant.common.errors import InfeasibleError
from tests.paths import SPECS
from tests.planner.problems import FOUR_BITS

PAPER = Workload(global_batch=32, prompt_length=512, new_tokens=100)
HIGHEST = {("opt-13b", 1): 8, ("opt-30b", 3): 4, ("opt-30b", 4): 3, ("bloom-176b", 7): 4}
"""By the roofline, of uniform bitwidths over evenly spread layers."""


def paper_cluster(number: int) -> ClusterSpec:
    return ClusterSpec.from_yaml(SPECS / f"paper_{number:02d}.yaml")


def costs_on(cluster: ClusterSpec, model: str, options: PlanOptions) -> CostModel:
    shape, options = model_shape(model), replace(options, bits=options.bits or FOUR_BITS)
    return cost_model(cluster, shape, PAPER, options, default_sensitivity(shape, options.bits))


def orders(cluster: ClusterSpec) -> Iterator[tuple[Device, ...]]:
    """Nodes in every order."""
    for nodes in permutations(cluster.nodes):
        yield tuple(device for node in nodes for device in cluster.devices if device.node == node)


def even_latencies(cluster: ClusterSpec, model: str, bits: int) -> list[float]:
    """Simulated seconds of every order and pair of sizes in which evenly spread layers fit."""
    costs = costs_on(cluster, model, PlanOptions(bits=(bits,)))
    layers, stages = costs.shape.layers, len(cluster.devices)
    found = []
    for devices in orders(cluster):
        for sizes in micro_batch_pairs(PAPER.global_batch, stages):
            problem = costs.problem(devices, sizes)
            more = [0, *range(stages - 1, 0, -1)][: layers % stages]  # the ends first
            counts = [layers // stages + (stage in more) for stage in range(stages)]
            first_layer = [sum(counts[:stage]) for stage in range(stages + 1)]
            if math.isfinite(evaluate(problem, first_layer, [0] * layers)):
                run = simulate_assignment(
                    PassTable.of(costs, devices, first_layer, [0] * layers), sizes
                )
                found.append(run.latency_s)
    return found


@pytest.mark.parametrize(("model", "number"), HIGHEST)
def test_uniform_is_the_fastest_at_the_highest_bitwidth_that_fits(model: str, number: int) -> None:
    cluster = paper_cluster(number)
    fitting = ((bits, even_latencies(cluster, model, bits)) for bits in (16, 8, 4, 3))
    highest, latencies = next(each for each in fitting if each[1])
    assert highest == HIGHEST[model, number]
    found = baseline(costs_on(cluster, model, PlanOptions()), "uniform")
    assert found.bitwidth == highest
    assert found.latency_s == pytest.approx(min(latencies), rel=1e-3)


def test_a_uniform_plan_is_that_of_the_comparison() -> None:
    """On cluster 7 layers of 3 bit would be faster, and 4 bit fits."""
    plan = Cluster(paper_cluster(7)).plan("bloom-176b", PAPER, method="uniform")
    assert {bits for stage in plan.stages for bits in stage.bitwidths} == {4}
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in plan.stages)
    beside = {each.name: each for each in plan.spec.baselines}
    assert plan.predicted.latency_s == pytest.approx(beside["uniform"].latency_s)
    assert list(beside) == ["uniform", "pipeedge", "adabits", "flexgen", "flexgen-int8"]


def test_16_bit_keeps_no_memory_for_kernels_of_fewer_bits() -> None:
    """A T4 that holds all layers at 16 bit, but nothing more."""
    cluster = ClusterSpec.from_counts(["T4"], [1])
    costs = costs_on(cluster, "opt-1.3b", PlanOptions(bits=(16,)))
    problem = costs.problem(cluster.devices, MicroBatches(1, 32))
    spare = problem.memory_bytes[0] - problem.layer_bytes[0, 0] * problem.layers
    device = cluster.devices[0]
    full = replace(
        cluster, devices=(replace(device, memory_bytes=device.memory_bytes - int(spare)),)
    )
    plan = Cluster(full).plan("opt-1.3b", PAPER, method="uniform")
    assert {*plan.stages[0].bitwidths} == {16}
    assert plan.stages[0].memory_bytes <= plan.stages[0].memory_limit_bytes
    with pytest.raises(InfeasibleError):
        Cluster(full).plan("opt-1.3b", PAPER, method="uniform", bits=[16], prefill_micro_batch=32)


def test_a_baseline_tries_one_order_for_each_pair_of_ends_and_the_most_promising() -> None:
    """Of ten nodes with a device of their own each, as of 24 devices of four kinds."""
    sizes = PlanOptions(prefill_micro_batch=1, decode_micro_batch=2)
    kinds = ("T4", "P100", "V100-32GB", "A100-40GB", "L4")
    nodes = [{"accelerators": {kind: 1}} for kind in kinds * 2]
    mixed = {"name": "ten", "nodes": nodes, "network": {"internode_gbit_per_s": 25}}
    for cluster in (ClusterSpec.from_dict(mixed), ClusterSpec.from_yaml(SPECS / "mixed_24.yaml")):
        found = baseline_orders(costs_on(cluster, "opt-30b", sizes))
        names = {device.cost_kind for device in cluster.devices}
        ends = {(order[0].cost_kind, order[-1].cost_kind) for order in found}
        assert len(ends) == len(names) ** 2 <= len(found) <= len(names) ** 2 + 1
        assert all({*order} == {*cluster.devices} for order in found)


@pytest.mark.parametrize("number", [3, 5, 6])
def test_adabits_is_the_fastest_of_equally_good_plans(number: int) -> None:
    cluster = paper_cluster(number)
    costs = costs_on(cluster, "opt-66b" if number > 3 else "opt-30b", PlanOptions())
    share = -(-PAPER.global_batch // len(cluster.devices))
    sizes = MicroBatches(share, share)
    plans = []
    for devices in orders(cluster):
        problem = costs.problem(devices, sizes)
        plan = solve_adabits(problem, SolveOptions(relative_gap=1e-4))
        times = stage_times(problem, plan.first_layer, plan.bitwidth)
        run = simulate_assignment(
            PassTable.of(costs, devices, plan.first_layer, plan.bitwidth), sizes
        )
        plans.append((times.quality, times.latency_s, run.latency_s))
    least = min(quality for quality, *_ in plans)
    _, simulated_s = min(rest for quality, *rest in plans if quality <= least * (1 + 1e-4))
    found = baseline(costs, "adabits")
    assert found.latency_s == pytest.approx(simulated_s)


def test_pipeedge_splits_the_batch_by_the_stages_and_takes_the_highest_bitwidth() -> None:
    cluster = paper_cluster(3)
    whole = costs_on(cluster, "opt-30b", PlanOptions(bits=(16,)))
    problem = whole.problem(cluster.devices, MicroBatches(1, 1))
    assert problem.layers * problem.layer_bytes[:, 0].min() > problem.memory_bytes.sum()
    plan = Cluster(cluster).plan("opt-30b", PAPER, method="pipeedge")
    assert plan.spec.micro_batches == MicroBatches(8, 8)
    assert {bits for stage in plan.stages for bits in stage.bitwidths} == {8}


def test_offloading_streams_over_pci_express_not_nvlink() -> None:
    """Cluster 1 of the paper: what a V100 lacks for OPT-13B at 16 bit, in 99 rounds at 16 GB/s."""
    cluster = paper_cluster(1)
    costs = costs_on(cluster, "opt-13b", PlanOptions())
    alone = replace(costs, options=PlanOptions(bits=(16,)), sensitivity=costs.sensitivity[:, 3:])
    problem = alone.problem(cluster.devices, MicroBatches(32, 32))
    lacking = problem.layers * problem.layer_bytes[0, 0] - problem.memory_bytes[0]
    assert offloading(costs, "flexgen").host_bytes.tolist() == [pytest.approx(lacking)]
    prefill_s = problem.fixed_prefill_s[0] + problem.layers * problem.prefill_s[0, 0]
    assert prefill_s > lacking / 16e9
    found = baseline(costs, "flexgen")
    assert found.latency_s == pytest.approx(prefill_s + 99 * lacking / 16e9)
    (device,) = cluster.devices
    slower = replace(device, stated_host_link_bytes_per_s=8e9)
    slow = replace(costs, cluster=replace(cluster, devices=(slower,)))
    assert baseline(slow, "flexgen").latency_s == pytest.approx(prefill_s + 99 * lacking / 8e9)
    poor = replace(device, host_memory_bytes=int(lacking) - 1)
    short = replace(costs, cluster=replace(cluster, devices=(poor,)))
    assert baseline(short, "flexgen").latency_s is None
    assert baseline(slow, "uniform") == baseline(costs, "uniform")
