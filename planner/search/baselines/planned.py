"""A baseline as the plan itself: `--method uniform` and `--method pipeedge`."""

from __future__ import annotations

from planner.costs.model import CostModel
from planner.optimiser.solve import solve_by
from planner.optimiser.solve_options import SolveOptions
from planner.plan.builder import Solution
from planner.search.baselines.policies import POLICIES, as_published, baseline_orders, choose
from planner.search.memory_fit import smallest_sizes


def baseline_solution(costs: CostModel) -> tuple[CostModel, Solution]:
    """The plan of the baseline that `costs.options.method` names, to be run like any other.

    It has one bitwidth; the costs changed so are returned with it. The lower bound is that of the
    baseline's own order and sizes. Raises DoesNotFitError where it does not fit.
    """
    name = costs.options.method
    found = choose(as_published(costs), name)
    problem = found.costs.problem(found.devices, found.sizes)
    assignment = solve_by(name, problem, SolveOptions())
    bound = assignment.bound
    return found.costs, Solution(found.devices, found.sizes, assignment, bound, 1, 1, 0.0)


def baseline_fits(costs: CostModel) -> bool:
    """Whether `baseline_solution` has a plan: at the smallest micro-batches, if at any."""
    costs = as_published(costs)
    policy, sizes = POLICIES[costs.options.method], smallest_sizes(costs.options)
    return any(
        policy.fits(each.problem(devices, sizes))
        for each in policy.allowed(costs)
        for devices in baseline_orders(costs)
    )
