"""A baseline as the plan itself: `--method uniform` and `--method pipeedge`."""

from __future__ import annotations

from dataclasses import replace

from planner.costs.model import CostModel
from planner.optimiser.solve import solve_by
from planner.optimiser.solve_options import SolveOptions
from planner.options import AUTO
from planner.plan.builder import Solution
from planner.search.baselines.policies import (
    POLICIES,
    BaselineChoice,
    as_published,
    baseline_orders,
    choose,
)
from planner.search.memory_fit import smallest_sizes
from planner.simulation.forecast import forecast_assignment
from planner.workload import MAX_REQUESTS, Job
from quant.common.errors import DoesNotFitError

NEARER = (2**0.5, 2**0.25, 2**0.125)
"""Ratios to the best number in flight so far, of those that are tried after it."""


def baseline_solution(costs: CostModel) -> tuple[CostModel, Solution]:
    """The plan of the baseline that `costs.options.method` names, to be run like any other.

    Of a job whose number in flight is not fixed it is the one with the best number. It has one
    bitwidth; the costs changed so are returned with it. The lower bound is that of the baseline's
    own order and sizes. Raises DoesNotFitError where it does not fit.
    """
    name, costs = costs.options.method, as_published(costs)
    if costs.job is not None and costs.options.in_flight == AUTO:
        found = _at_best_number(costs, costs.job)
    else:
        found = choose(costs, name)
    problem = found.costs.problem(found.devices, found.sizes)
    assignment = solve_by(name, problem, SolveOptions())
    bound = assignment.bound
    return found.costs, Solution(
        found.costs.workload, found.devices, found.sizes, assignment, bound, 1, 1, 0.0
    )


def _at_best_number(costs: CostModel, job: Job) -> BaselineChoice:
    """The baseline's choice for the number in flight with which the job is simulated to end first:
    of numbers ever twice as many, and then ever nearer to the best. DoesNotFitError where the
    fewest that are allowed do not fit.
    """
    least, tried = costs.workload.global_batch, dict[int, tuple[float, BaselineChoice]]()

    def fits(number: int) -> bool:
        here = replace(costs, workload=costs.in_flight(job, number))
        try:
            found = choose(here, costs.options.method)
        except DoesNotFitError:
            if number == least:
                raise
            return False
        chosen, placed = found.assignment, (found.costs, found.devices, found.sizes)
        run = forecast_assignment(*placed, chosen.first_layer, chosen.bitwidth)
        tried[number] = run.seconds, found
        return True

    number = least
    while number <= min(job.prompts, MAX_REQUESTS) and fits(number):
        number *= 2
    for ratio in NEARER:
        best = min(tried, key=lambda each: tried[each][0])
        for near in {round(best / ratio), min(job.prompts, round(best * ratio))} - {*tried}:
            if near >= least:
                fits(near)
    _, found = min(tried.values(), key=lambda each: each[0])
    return found


def baseline_fits(costs: CostModel) -> bool:
    """Whether `baseline_solution` has a plan: at the smallest micro-batches, if at any."""
    costs = as_published(costs)
    policy, sizes = POLICIES[costs.options.method], smallest_sizes(costs.options)
    return any(
        policy.fits(each.problem(devices, sizes))
        for each in policy.allowed(costs)
        for devices in baseline_orders(costs)
    )
