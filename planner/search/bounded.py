"""Plans within a bound on quality or latency: the search at the theta that meets it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from planner.costs.model import CostModel
from planner.plan.builder import Solution, simulate_solution, solution_quality
from planner.search.candidate_search import search
from planner.search.pareto import Point, fastest_within, finest_within


def within_bounds(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostModel, Solution]:
    """The best solution, by theta or within the bound in the options, and its theta's costs."""
    options = costs.options
    if options.max_omega is None and options.max_latency_s is None:
        return costs, search(costs, clock)
    solve = theta_solver(costs, clock)
    if options.max_omega is not None:
        choice = fastest_within(solve, options.max_omega)
    else:
        choice = finest_within(solve, float(options.max_latency_s or 0.0))
    point = choice.point
    at_theta = replace(costs, options=replace(options, theta=point.theta))
    assignment = point.plan.assignment
    if assignment.status == "optimal" and choice.gap > options.relative_gap:
        assignment = replace(assignment, status="bounded")
    lower_bound = assignment.objective * (1 - choice.gap)
    return at_theta, replace(point.plan, assignment=assignment, lower_bound=lower_bound)


def theta_solver(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> Callable[[float], Point[Solution]]:
    """A function that searches at any theta, for points of latency and quality."""

    def solve_at(theta: float) -> Point[Solution]:
        priced = replace(costs, options=replace(costs.options, theta=theta))
        solution = search(priced, clock)
        quality = solution_quality(priced, solution)
        latency_s = solution.assignment.objective - theta * quality
        predicted_s = simulate_solution(priced, solution).latency_s
        return Point(theta, latency_s, quality, solution.lower_bound, solution, predicted_s)

    return solve_at
