"""Bounds on orders that have not been made, against those of every order that has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import model_shape
from planner.optimiser.prices import PricedProblem
from planner.optimiser.relaxation import relax
from planner.options import PlanOptions
from planner.profiles.sensitivity import default_sensitivity
from planner.search import order_bounds
from planner.search.candidates import OrdersByEnds, SharedPrices, SizedOrders
from planner.search.orders import canonical_devices, order_tree
from planner.search.request import cost_model
from planner.workload import MicroBatches, Workload
from tests.planner.problems import FOUR_BITS, solve

SIZES = MicroBatches(2, 4)
MIXED = {
    "name": "mixed nodes",
    "nodes": [
        {"name": "a", "accelerators": {"V100-32GB": 1, "T4": 2}, "link_gbyte_per_s": 1},
        {"name": "b", "accelerators": {"T4": 1}},
        {"name": "c", "accelerators": {"A100-40GB": 1, "T4": 1}},
    ],
    "network": {"internode_gbit_per_s": 1},
}


def costs_of(all_orders: bool, objective: str) -> CostModel:
    options = PlanOptions(bits=FOUR_BITS, theta=5.0, all_orders=all_orders, objective=objective)
    shape = model_shape("opt-30b")
    omega = default_sensitivity(shape, options.bits) * np.linspace(3, 0.5, shape.layers)[:, None]
    workload = Workload(global_batch=8, prompt_length=256, new_tokens=32)
    return cost_model(ClusterSpec.from_dict(MIXED), shape, workload, options, omega)


def every_end(costs: CostModel) -> list[OrdersByEnds]:
    devices = canonical_devices(costs.cluster.devices)
    tree = order_tree(devices, costs.options.all_orders)
    sized = SizedOrders(costs, SIZES, devices, tree, SharedPrices())
    return [OrdersByEnds(sized, part, kinds) for kinds, part in tree.by_ends.items()]


@pytest.mark.parametrize(
    ("all_orders", "objective", "states"),
    [
        (False, "pipeline", 0),
        (True, "pipeline", 10**6),
        (True, "paper", 0),
        (False, "paper", 10**6),
    ],
)
def test_each_order_comes_once_with_the_bound_of_its_own_shortest_path(
    all_orders: bool, objective: str, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what may follow worked out, and where there is too much of it, the rough bound."""
    monkeypatch.setattr(order_bounds, "MOST_STATES", states)
    costs = costs_of(all_orders, objective)
    for ends in every_end(costs):
        rough = ends.bound
        ends.refine()
        prices = relax(ends.problem).prices
        bounds, seen = [], set()
        while ends.bound < np.inf:
            before = ends.bound
            bound, devices = ends.pop()
            own = PricedProblem(costs.problem(devices, SIZES)).path_bound(prices).bound
            assert bound == pytest.approx(own, rel=1e-6)
            assert before <= bound * (1 + 1e-9)
            bounds.append(bound)
            seen.add(devices)
        assert len(seen) == len(bounds) == ends.tree.count
        assert rough <= min(bounds) * (1 + 1e-6)
        if states:
            assert bounds == pytest.approx(sorted(bounds)), "the most promising first"


def test_no_plan_lies_below_the_bounds() -> None:
    costs = costs_of(all_orders=False, objective="pipeline")
    few = replace(costs.cluster, devices=costs.cluster.devices[2:])
    costs = replace(costs, cluster=few, options=replace(costs.options, group=4))
    for ends in every_end(costs):
        ends.refine()
        while ends.bound < np.inf:
            bound, devices = ends.pop()
            assert 0 < bound <= solve(costs.grouped_problem(devices, SIZES)).objective
