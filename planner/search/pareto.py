"""Latency against quality: the Pareto front by varying theta, and the plan that meets a bound. A
theta gives the point where a line of slope -theta touches the attainable pairs, so the front is
their lower convex hull (Aneja and Nair, 1979); how much better plans between its points can be is
the gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from planner.costs.model import CostModel
from planner.options import PLAN_TIME
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.search.candidate_search import SearchTime
from planner.search.in_flight import plan_solver
from quant.common.errors import BoundNotMetError

PlanT = TypeVar("PlanT")

MOST_SOLVES = 40
LOOKED_AT = 6  # points of a front where only predictions tell whether any keeps a bound
# Below this share of the chord's height a new point is rounding, not progress.
PROGRESS = 1e-6
# Of plans equally fast the better one: quality weighs this share of latency.
QUALITY_TIE_BREAK = 1e-7
# For the best quality latency weighs this share: enough to tell plans of equal quality apart in a
# solver's relative gap of 1e-4, and so little that a second never buys noticeable quality.
LATENCY_TIE_BREAK = 1e-3


@dataclass(frozen=True)
class ThetaPoint(Generic[PlanT]):
    """A plan on the front. No plan's latency_s + theta * omega is below `bound`. Points are ranked
    by `latency_s`, a closed form; `predicted_s` is by simulation.
    """

    theta: float
    latency_s: float
    omega: float
    bound: float
    plan: PlanT
    predicted_s: float

    def cost(self, theta: float) -> float:
        return self.latency_s + theta * self.omega


Solve = Callable[[float], ThetaPoint[PlanT]]

BoundedChoice = tuple[ThetaPoint[PlanT], float]
"""The best plan found within a bound, and the gap: no plan within it is better by more, relative to
the figure that was minimised."""


class PointSolver(Protocol):
    def __call__(self, theta: float, *, quick: bool = False) -> ThetaPoint[Solution]: ...


def theta_solver(
    costs: CostModel,
    clock: Callable[[], float] = time.perf_counter,
    known: Iterable[int] = (),
    search_time: SearchTime | None = None,
) -> PointSolver:
    """A function that searches at any theta; `known` and `quick` as in `planner.search.in_flight`.
    Searches share `search_time`, or have all of `search_time_limit` each.
    """
    solve = plan_solver(costs, clock, known)

    def solve_at(theta: float, *, quick: bool = False) -> ThetaPoint[Solution]:
        limit_s = None if search_time is None else search_time.next_s()
        solution = solve(theta, quick=quick, limit_s=limit_s)
        priced = replace(costs, theta=theta)
        quality = solution_quality(priced, solution)
        latency_s = solution.assignment.objective - theta * quality
        predicted_s = forecast_solution(priced, solution).seconds
        return ThetaPoint(theta, latency_s, quality, solution.lower_bound, solution, predicted_s)

    return solve_at


def within_bounds(
    costs: CostModel, clock: Callable[[], float] = time.perf_counter
) -> tuple[CostModel, Solution]:
    """The best solution, by theta or within the bound in the options, and its theta's costs."""
    options = costs.options
    limit_s = PLAN_TIME * options.search_time_limit
    if options.max_omega is None and options.max_latency_s is None:
        return costs, plan_solver(costs, clock)(costs.theta, limit_s=limit_s)
    search_time = SearchTime(limit_s, clock)
    solve = theta_solver(costs, clock, search_time=search_time)
    if options.max_omega is not None:
        point, gap = fastest_within(solve, options.max_omega, search_time)
    else:
        point, gap = finest_within(solve, float(options.max_latency_s or 0.0), search_time)
    assignment = point.plan.assignment
    if assignment.status == "optimal" and gap > options.relative_gap:
        assignment = replace(assignment, status="bounded")
    lower_bound = assignment.objective * (1 - gap)
    at_theta = replace(costs, theta=point.theta)
    return at_theta, replace(point.plan, assignment=assignment, lower_bound=lower_bound)


def front(
    solve: Solve[PlanT], most_points: int = 12, search_time: SearchTime | None = None
) -> tuple[ThetaPoint[PlanT], ...]:
    """The hull's points from fastest to best quality, widest gaps first, without beaten ones; those
    for which there is time.
    """
    fastest, finest = _extremes(solve)
    points = [fastest] if _same(fastest, finest) else [fastest, finest]
    open_spans = [(fastest, finest)] if len(points) == 2 else []
    solves = 2
    while open_spans and len(points) < most_points and solves < MOST_SOLVES:
        if search_time is not None and search_time.is_over:
            break
        open_spans.sort(key=lambda span: _height(*span))
        left, right = open_spans.pop()
        found = _between(solve, left, right)
        solves += 1
        if found is not None:
            points.append(found)
            open_spans += [(left, found), (found, right)]
    kept: list[ThetaPoint[PlanT]] = []
    for point in sorted(points, key=lambda point: (point.latency_s, point.omega)):
        if not kept or point.omega < kept[-1].omega:
            kept.append(point)
    return tuple(kept)


def _extremes(solve: Solve[PlanT]) -> tuple[ThetaPoint[PlanT], ThetaPoint[PlanT]]:
    first = solve(0.0)
    scale = first.latency_s / first.omega if first.omega > 0 else 0.0
    if not scale:
        return first, first
    return solve(QUALITY_TIE_BREAK * scale), solve(scale / LATENCY_TIE_BREAK)


def _between(
    solve: Solve[PlanT], left: ThetaPoint[PlanT], right: ThetaPoint[PlanT]
) -> ThetaPoint[PlanT] | None:
    if left.omega <= right.omega or right.latency_s <= left.latency_s:
        return None
    theta = (right.latency_s - left.latency_s) / (left.omega - right.omega)
    found = solve(theta)
    return found if found.cost(theta) < left.cost(theta) * (1 - PROGRESS) else None


def fastest_within(
    solve: Solve[PlanT], max_omega: float, search_time: SearchTime | None = None
) -> BoundedChoice[PlanT]:
    """The fastest plan of at most `max_omega`; `BoundNotMetError` with the least omega of any."""

    def is_inside(point: ThetaPoint[PlanT]) -> bool:
        return point.omega <= max_omega * (1 + PROGRESS)

    fastest, finest = _extremes(solve)
    if not is_inside(finest):
        is_over = search_time is not None and search_time.is_over
        in_time = " before time was up (--search_time_limit gives more)" if is_over else ""
        raise BoundNotMetError(
            f"no plan has a summed sensitivity of at most {max_omega:g}; the best found{in_time} "
            f"has {finest.omega:g}",
            "max_omega",
            finest.omega,
            in_time=in_time,
        )
    tried = _close_in(solve, fastest, finest, is_inside, search_time)
    chosen = min(filter(is_inside, tried), key=lambda point: point.latency_s)
    # Weak duality: within the bound, latency >= min(latency + theta * omega) - theta * bound.
    proven = max(point.bound - point.theta * max_omega for point in tried)
    return chosen, _gap(chosen.latency_s, proven)


def finest_within(
    solve: Solve[PlanT], max_latency_s: float, search_time: SearchTime | None = None
) -> BoundedChoice[PlanT]:
    """The plan of best quality that is predicted to keep the bound; the prediction is taken of
    every point tried. The gap is over plans whose ranking latency is within it. `BoundNotMetError`
    has the least predicted latency.
    """
    tried = _tried_for_latency(solve, max_latency_s, search_time)
    inside = [point for point in tried if point.predicted_s <= max_latency_s]
    if not inside:
        least_s = min(point.predicted_s for point in tried)
        raise BoundNotMetError(
            f"no plan was found that is predicted to take at most {max_latency_s:g} s a batch; the "
            f"fastest of {len(tried)} tried takes {least_s:.4g} s by simulation",
            "max_latency_s",
            least_s,
        )
    chosen = min(inside, key=lambda point: (point.omega, point.predicted_s))
    most_s = max(max_latency_s, chosen.latency_s)
    proven = max(((p.bound - most_s) / p.theta for p in tried if p.theta > 0), default=0.0)
    return chosen, _gap(chosen.omega, max(0.0, proven))


def _tried_for_latency(
    solve: Solve[PlanT], max_latency_s: float, search_time: SearchTime | None
) -> list[ThetaPoint[PlanT]]:
    """Solve around where the prediction crosses the bound, maybe between two ends above it."""

    def is_inside(point: ThetaPoint[PlanT]) -> bool:
        return point.predicted_s <= max_latency_s

    fastest, finest = _extremes(solve)
    ends = [fastest, finest]
    if is_inside(finest):
        return ends
    if is_inside(fastest):
        return _close_in(solve, finest, fastest, is_inside, search_time)
    if fastest.latency_s > max_latency_s:
        return ends
    tried = [*ends, *front(solve, LOOKED_AT, search_time)]
    inside = min(filter(is_inside, tried), key=lambda point: point.omega, default=None)
    if inside is None:
        return tried
    finer = (point for point in tried if point.omega < inside.omega)
    outside = max(finer, key=lambda point: point.omega, default=finest)
    return tried + _close_in(solve, outside, inside, is_inside, search_time)


def _close_in(
    solve: Solve[PlanT],
    outside: ThetaPoint[PlanT],
    inside: ThetaPoint[PlanT],
    is_inside: Callable[[ThetaPoint[PlanT]], bool],
    search_time: SearchTime | None,
) -> list[ThetaPoint[PlanT]]:
    """Solve ever nearer to where the hull crosses the bound, in time; the last edge's bound is the
    best.
    """
    tried = [outside, inside]
    if is_inside(outside):
        return tried
    for _ in range(MOST_SOLVES):
        if inside.omega == outside.omega or (search_time is not None and search_time.is_over):
            break
        theta = (inside.latency_s - outside.latency_s) / (outside.omega - inside.omega)
        if not 0 < theta < math.inf:
            break
        found = solve(theta)
        tried.append(found)
        if found.cost(theta) >= outside.cost(theta) * (1 - PROGRESS):
            break
        inside, outside = (found, outside) if is_inside(found) else (inside, found)
    return tried


def _height(left: ThetaPoint[PlanT], right: ThetaPoint[PlanT]) -> float:
    latency = (right.latency_s - left.latency_s) / right.latency_s
    quality = (left.omega - right.omega) / left.omega if left.omega else 0.0
    return latency * quality


def _same(one: ThetaPoint[PlanT], other: ThetaPoint[PlanT]) -> bool:
    return math.isclose(one.latency_s, other.latency_s, rel_tol=PROGRESS) and math.isclose(
        one.omega, other.omega, rel_tol=PROGRESS, abs_tol=1e-12
    )


def _gap(found: float, proven: float) -> float:
    return max(0.0, (found - proven) / found) if found > 0 else 0.0
