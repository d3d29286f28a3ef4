"""Plans within a bound on quality or latency: the search at the theta that meets it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from planner.costs.model import CostModel
from planner.options import PLAN_TIME
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.search.candidate_search import SearchTime
from planner.search.job.in_flight import plan_solver
from planner.search.tradeoffs.pareto import Point, fastest_within, finest_within


class PointSolver(Protocol):
    """Finds the point of a theta; `quick` as in `planner.search.job.in_flight.PlanSolver`."""

    def __call__(self, theta: float, *, quick: bool = False) -> Point[Solution]: ...


def within_bounds(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostModel, Solution]:
    """The best solution, by theta or within the bound in the options, and its theta's costs."""
    options = costs.options
    limit_s = PLAN_TIME * options.search_time_limit
    if options.max_omega is None and options.max_latency_s is None:
        return costs, plan_solver(costs, clock)(costs.theta, limit_s=limit_s)
    solve = theta_solver(costs, clock, search_time=SearchTime(limit_s, clock))
    if options.max_omega is not None:
        choice = fastest_within(solve, options.max_omega)
    else:
        choice = finest_within(solve, float(options.max_latency_s or 0.0))
    point = choice.point
    at_theta = replace(costs, theta=point.theta)
    assignment = point.plan.assignment
    if assignment.status == "optimal" and choice.gap > options.relative_gap:
        assignment = replace(assignment, status="bounded")
    lower_bound = assignment.objective * (1 - choice.gap)
    return at_theta, replace(point.plan, assignment=assignment, lower_bound=lower_bound)


def theta_solver(
    costs: CostModel,
    clock: Callable[[], float] = time.perf_counter,
    known: Iterable[int] = (),
    search_time: SearchTime | None = None,
) -> PointSolver:
    """A function that searches at any theta, for points of latency and quality; `known` and `quick`
    as in `planner.search.job.in_flight`. The searches share `search_time`; without it each has all
    of `search_time_limit`.
    """
    solve = plan_solver(costs, clock, known)

    def solve_at(theta: float, *, quick: bool = False) -> Point[Solution]:
        limit_s = None if search_time is None else search_time.next_s()
        solution = solve(theta, quick=quick, limit_s=limit_s)
        priced = replace(costs, theta=theta)
        quality = solution_quality(priced, solution)
        latency_s = solution.assignment.objective - theta * quality
        predicted_s = forecast_solution(priced, solution).seconds
        return Point(theta, latency_s, quality, solution.lower_bound, solution, predicted_s)

    return solve_at
