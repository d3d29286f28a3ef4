"""The search over orders, sizes, subsets of devices and places of the head, against trying all."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pulp
import pytest

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.model.finding import model_shape
from planner.optimiser.assignment import Assignment, stage_times
from planner.optimiser.solve import pipeedge_assignment, uniform_assignment
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import default_sensitivity
from planner.search.baselines import baselines
from planner.search.candidate_search import CandidateSearch
from planner.search.candidate_search import search as whole_search
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.find import front_json, trace_front
from planner.search.orders import canonical_devices, order_tree
from planner.search.request import cost_model
from planner.simulation.simulation import simulate_assignment
from planner.workload import MicroBatches, Workload
from quant.common.errors import InfeasibleError
from tests.planner.plan_alone import find_plan
from tests.planner.problems import FOUR_BITS, solve

CLUSTER = ClusterSpec.from_counts(["T4-16GB", "V100-SXM2-32GB"], [2, 1])
WORKLOAD = Workload(global_batch=4, prompt_length=128, new_tokens=32)
GROUP = 4  # layers decided together, so that all candidates are solved in little time


def all_device_orders(costs: CostModel, all_orders: bool) -> list[tuple[Device, ...]]:
    devices = canonical_devices(costs.cluster.devices)
    return [tuple(devices[i] for i in order) for order in order_tree(devices, all_orders).orders()]


def costs_of(options: PlanOptions, cluster: ClusterSpec = CLUSTER) -> CostModel:
    """OPT-30B with uneven sensitivities."""
    shape, options = model_shape("opt-30b"), replace(options, bits=options.bits or FOUR_BITS)
    omega = default_sensitivity(shape, options.bits) * np.linspace(3, 0.5, shape.layers)[:, None]
    return cost_model(cluster, shape, WORKLOAD, options, omega)


def search(costs: CostModel) -> Solution:
    """The search over all devices."""
    candidates = Candidates(costs)
    runner = CandidateSearch(costs.options, time.perf_counter)
    runner.run([candidates], costs.options.relative_gap)
    return runner.solutions([candidates])[0]


@pytest.mark.parametrize(
    ("all_orders", "objective"),
    [
        *((False, "pipeline"), (True, "paper")),
        *(
            pytest.param(*case, marks=pytest.mark.rare)
            for case in ((False, "paper"), (True, "pipeline"))
        ),
    ],
)
def test_the_search_finds_the_best_of_all_candidates(all_orders: bool, objective: str) -> None:
    options = PlanOptions(
        theta=5.0, all_orders=all_orders, objective=objective, relative_gap=1e-6, group=GROUP
    )
    costs = costs_of(options)
    every = [solve(c.problem, relative_gap=1e-6).objective for c in Candidates(costs)]
    found = search(costs)
    assert found.assignment.objective == pytest.approx(min(every), rel=2e-6)
    assert found.lower_bound <= min(every)
    assert found.gap <= 1.1e-6
    assert found.candidates == len(every)
    assert found.solved < len(every), "bounds should make some solves needless"


def test_candidates_are_all_orders_sizes_and_heads_the_most_promising_first() -> None:
    costs = costs_of(PlanOptions(all_orders=True))
    candidates = Candidates(costs)
    count = candidates.count
    found = list(candidates)
    bounds = [candidate.bound for candidate in found]
    assert bounds == pytest.approx(sorted(bounds))
    orders = all_device_orders(costs, all_orders=True)
    sizes = {candidate.sizes for candidate in found}
    named = {(c.devices, c.sizes, c.head_on_first) for c in found}
    assert len(named) == len(found) == count == 2 * len(orders) * len(sizes)


def test_bounds_hold_for_every_candidate() -> None:
    for candidate in Candidates(costs_of(PlanOptions(all_orders=True, group=GROUP))):
        assert 0 < candidate.bound <= solve(candidate.problem).objective


def test_more_orders_are_never_worse() -> None:
    few, many = (
        search(costs_of(PlanOptions(theta=20.0, all_orders=every, group=GROUP)))
        for every in (False, True)
    )
    assert many.candidates > few.candidates
    best = few.assignment.objective
    assert many.assignment.objective <= best * (1 + 1e-4)


@cache
def searched_with(method: str) -> Solution:
    options = PlanOptions(
        theta=1.0, method=method, prefill_micro_batch=2, decode_micro_batch=4, group=GROUP
    )
    return search(costs_of(options))


@pytest.mark.parametrize("method", ["transfer", "adabits", "uniform", "pipeedge", "ilp"])
def test_every_method_can_be_searched_with(method: str) -> None:
    found, objective = searched_with(method), searched_with("auto").assignment.objective
    assert found.assignment.objective >= objective * (1 - 2e-4)
    assert found.lower_bound <= objective
    if method in ("transfer", "ilp"):
        assert found.assignment.objective <= 1.02 * objective


def test_a_method_without_a_plan_is_refused() -> None:
    """Layers cannot be spread evenly over a large and a small device, at any bitwidth."""
    cluster = ClusterSpec.from_counts(["P100-PCIE-12GB", "A100-SXM4-80GB"], [1, 1])
    options = PlanOptions(method="uniform", bits=(8, 16))
    with pytest.raises(InfeasibleError, match="method uniform has no plan"):
        search(costs_of(options, cluster))


class Steps:
    """A clock that is a second later each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.rare  # its search takes the time it is given
def test_out_of_time_the_best_plan_so_far_comes_with_its_gap() -> None:
    names = ["T4-16GB", "V100-SXM2-32GB", "A100-40GB", "P100"]
    cluster = ClusterSpec.from_counts(names, [1] * 4)
    options = PlanOptions(theta=20.0, search_time_limit=60.0, keep_all_devices=True, group=GROUP)
    shape = model_shape("opt-30b")
    optimum = find_plan(cluster, shape, "opt-30b", WORKLOAD, options).plan
    assert optimum.solver.status == "optimal"
    for limit_s in (1e-3, 20.0):
        limited = replace(options, search_time_limit=limit_s)
        early = find_plan(cluster, shape, "opt-30b", WORKLOAD, limited, Steps()).plan
        assert early.solver.status == "time_limit"
        assert early.solver.solved < optimum.solver.solved
        assert 1e-4 < early.solver.gap < 1
        lowest = early.solver.objective * (1 - early.solver.gap)
        assert lowest <= optimum.solver.objective <= early.solver.objective


def test_many_equal_nodes_are_planned_as_one_order() -> None:
    nodes = [{"name": f"node{i}", "accelerators": {"T4": 1}} for i in range(9)]
    network = {"internode_gbit_per_s": 25}
    cluster = ClusterSpec.from_dict({"name": "equal", "nodes": nodes, "network": network})
    costs = costs_of(PlanOptions(decode_micro_batch=1, prefill_micro_batch=1), cluster)
    assert Candidates(costs).count == 2, "one for each place of the LM head"
    assert whole_search(costs).assignment.status == "optimal"


NODES = (
    {"name": "a", "accelerators": {"T4": 1, "V100-32GB": 1}, "link_gbyte_per_s": 0.01},
    {"name": "b", "accelerators": {"T4": 1, "V100-32GB": 1}, "link_gbyte_per_s": 200},
    {"name": "c", "accelerators": {"V100-32GB": 1}, "usable_memory_gib": 14},
)


@pytest.mark.parametrize(
    ("chosen", "keep_all"),
    [
        pytest.param((0, 1), True, marks=pytest.mark.rare),
        ((0, 1, 2), True),
        ((0, 1), False),
        pytest.param((0, 1, 2), False, marks=pytest.mark.rare),
    ],
)
def test_the_order_of_nodes_in_the_file_changes_nothing(
    chosen: tuple[int, ...], keep_all: bool
) -> None:
    """Nodes may be alike but for the link inside, which is slow in one."""
    sizes = {"prefill_micro_batch": 2, "decode_micro_batch": 4}
    options = PlanOptions(theta=5.0, head="last", keep_all_devices=keep_all, group=GROUP, **sizes)

    def found(nodes: tuple[int, ...]) -> Solution:
        network = {"internode_gbit_per_s": 0.5}
        values = {"name": "links", "nodes": [NODES[node] for node in nodes], "network": network}
        return whole_search(costs_of(options, ClusterSpec.from_dict(values)))

    orders = permutations(chosen) if len(chosen) == 2 else list(permutations(chosen))[::2]
    first, *others = (found(nodes) for nodes in orders)  # each node comes first once
    for other in others:
        assert other.assignment.objective == first.assignment.objective
        assert [d.name for d in other.devices] == [d.name for d in first.devices]


def test_an_infeasible_model_is_explained_with_what_would_fit() -> None:
    small, twice = ClusterSpec.from_counts(["T4-16GB"], [1]), replace(WORKLOAD, global_batch=8)
    with pytest.raises(InfeasibleError, match=r"does not fit.*more T4-16GB"):
        find_plan(small, model_shape("opt-30b"), "opt-30b", twice, PlanOptions(theta=1.0))


def simulated_s(costs: CostModel, candidate: SearchCandidate, plan: Assignment) -> float:
    run = simulate_assignment(
        PassTable.of(costs, candidate.devices, plan.first_layer, plan.bitwidth), candidate.sizes
    )
    return run.latency_s


def test_baselines_are_those_of_the_paper() -> None:
    costs = costs_of(PlanOptions(theta=1.0))
    found = list(Candidates(costs))
    named = {baseline.name: baseline for baseline in baselines(costs)}
    assert list(named) == ["uniform", "pipeedge", "adabits", "flexgen", "flexgen-int8"]
    uniform_s = []
    for candidate in (c for c in found if not c.head_on_first):
        plan = uniform_assignment(candidate.problem)
        times = stage_times(candidate.problem, plan.first_layer, plan.bitwidth)
        uniform_s.append((times.latency_s, simulated_s(costs, candidate, plan)))
    assert named["uniform"].latency_s == pytest.approx(min(uniform_s)[1])
    latencies = []
    share = MicroBatches(2, 2)
    for devices in all_device_orders(costs, all_orders=False):
        problem = costs.problem(devices, share)
        candidate = SearchCandidate(WORKLOAD, devices, share, problem, 0.0)
        latencies.append(simulated_s(costs, candidate, pipeedge_assignment(candidate.problem)))
    assert named["pipeedge"].latency_s in [pytest.approx(latency) for latency in latencies]
    assert named["flexgen-int8"].bitwidth == 8


def test_a_plan_states_its_gap_over_the_whole_search() -> None:
    options = PlanOptions(theta=1.0, relative_gap=1e-4)
    plan = find_plan(CLUSTER, model_shape("opt-30b"), "opt-30b", WORKLOAD, options).plan
    assert plan.solver.status == "optimal"
    assert 0 <= plan.solver.gap <= 1.01e-4
    assert plan.solver.solved <= plan.solver.candidates


SLOW_LINK = """
name: useless third device
nodes:
  - {name: near, accelerators: {A100-80GB: 2}}
  - {name: far, accelerators: {P100: 1}}
network: {internode_gbit_per_s: 0.01}
"""


def test_a_device_that_only_slows_the_pipeline_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(SLOW_LINK)
    cluster = ClusterSpec.from_yaml(path)
    shape = model_shape("opt-13b")
    options = PlanOptions(theta=1.0)
    plan = find_plan(cluster, shape, "opt-13b", WORKLOAD, options).plan
    kept = replace(options, keep_all_devices=True)
    forced = find_plan(cluster, shape, "opt-13b", WORKLOAD, kept).plan
    assert "far/P100-SXM2-16GB:0" in plan.unused_devices
    assert "far/P100-SXM2-16GB:0" in [stage.device for stage in forced.stages]
    assert plan.predicted.latency_s < forced.predicted.latency_s
    assert plan.cluster_fingerprint == forced.cluster_fingerprint


def test_leaving_out_is_the_best_of_every_subset() -> None:
    cluster = ClusterSpec.from_counts(["T4-16GB", "A100-80GB"], [2, 1], internode_gbit_per_s=1)
    costs = costs_of(PlanOptions(theta=0.5, head="last", group=GROUP), cluster)
    objectives = []
    for size in (1, 2, 3):
        for subset in combinations(cluster.devices, size):
            smaller = replace(costs, cluster=replace(cluster, devices=subset))
            try:
                objectives += [solve(c.problem).objective for c in Candidates(smaller)]
            except InfeasibleError:
                continue
    found = whole_search(costs)
    assert found.assignment.objective == pytest.approx(min(objectives), rel=2e-4)


def test_a_cluster_whose_smallest_device_holds_nothing_is_still_planned() -> None:
    big, small = ClusterSpec.from_counts(["A100-80GB", "T4-16GB"], [1, 1]).devices
    cluster = replace(CLUSTER, devices=(big, replace(small, memory_bytes=2**28)))
    plan = find_plan(
        cluster, model_shape("opt-13b"), "opt-13b", WORKLOAD, PlanOptions(theta=1.0)
    ).plan
    assert [stage.device for stage in plan.stages] == [big.name]


@pytest.mark.parametrize("name", ["bloom-7b1", pytest.param("opt-13b", marks=pytest.mark.rare)])
def test_the_head_goes_where_it_is_better(name: str) -> None:
    shape = model_shape(name)
    cluster = ClusterSpec.from_counts(["V100-SXM2-16GB", "T4-16GB"], [1, 1])
    by_head = {
        head: find_plan(
            cluster, shape, name, WORKLOAD, PlanOptions(head=head, theta=5.0, keep_all_devices=True)
        ).plan
        for head in ("first", "last", "auto")
    }
    assert by_head["first"].head_on_first
    assert not by_head["last"].head_on_first
    objectives = {head: plan.solver.objective for head, plan in by_head.items()}
    assert objectives["auto"] <= min(objectives["first"], objectives["last"]) * (1 + 2e-4)
    held = {head: sum(s.memory.final for s in plan.stages) for head, plan in by_head.items()}
    spared = held["last"] - held["first"]
    assert spared == (2 * shape.head_parameters if shape.tied_embeddings else 0)


def test_bounds_on_quality_and_latency_are_kept() -> None:
    shape, cluster = model_shape("opt-13b"), ClusterSpec.from_counts(["T4-16GB"], [2])

    def plan(**options: Any) -> PlanSpec:
        chosen = PlanOptions(**options, head="last", keep_all_devices=True)
        return find_plan(cluster, shape, "opt-13b", WORKLOAD, chosen).plan

    fast, fine = plan(theta=0.0), plan(theta=1e6)
    assert fast.solver.sensitivity > fine.solver.sensitivity
    middle = (fast.solver.sensitivity + fine.solver.sensitivity) / 2
    kept = plan(max_omega=middle)
    assert kept.solver.sensitivity <= middle * (1 + 1e-6)
    closed_form = kept.predicted.objective_latency_s
    assert fast.predicted.objective_latency_s <= closed_form * (1 + 1e-4)
    assert closed_form <= fine.predicted.objective_latency_s * (1 + 1e-4)
    again = plan(max_latency_s=kept.predicted.latency_s)
    assert again.predicted.latency_s <= kept.predicted.latency_s
    assert again.solver.sensitivity <= kept.solver.sensitivity * (1 + 1e-6)
    wide = kept.solver.gap > PlanOptions().relative_gap
    assert kept.solver.status == ("bounded" if wide else "optimal")
    with pytest.raises(InfeasibleError, match="no plan was found that is predicted to take"):
        plan(max_latency_s=fast.predicted.latency_s / 2)


def test_the_front_runs_from_fastest_to_finest() -> None:
    options = PlanOptions(head="last", keep_all_devices=True)
    points = trace_front(CLUSTER, model_shape("opt-30b"), WORKLOAD, options, most_points=4)
    assert len(points) >= 2
    for near, far in pairwise(points):
        assert near.objective_latency_s < far.objective_latency_s
        assert near.omega > far.omega
        assert near.theta < far.theta
    assert json.loads(front_json(points))[0]["theta"] == points[0].theta


def test_a_missing_solver_is_replaced_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSpec.from_counts(["T4-16GB"], [2])
    monkeypatch.setattr(pulp.GUROBI, "available", lambda self: False)
    options = PlanOptions(solver="gurobi", keep_all_devices=True)
    with pytest.warns(UserWarning, match="gurobi.*going on with highs"):
        plan = find_plan(cluster, model_shape("opt-13b"), "opt-13b", WORKLOAD, options).plan
    assert plan.solver.solver == "highs"
    assert plan.solver.status == "optimal"
