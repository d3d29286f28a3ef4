"""Three plans side by side, `fast`, `balanced` and `high`, by rules that mean the same everywhere.

- `fast` has the most tokens per second (all sensitivity together counts for less than a thousandth
  of the time).
- `balanced` and `high` are near 16 bit: no layer has fewer than `NEAR_FULL_BITS`. Only where memory
  has no room for that have they fewer, and then none has fewer than all layers have room for.
- `balanced` takes the time of the fastest plan as one, and its sensitivity as a tenth, and has the
  least sum of both: it is one percent slower wherever that removes a tenth of that sensitivity.
- `high` has the least sensitivity of those at most a tenth slower than the fastest of such bits.

No rule knows seconds or the scale of an omega file. The sum being least, no plan of such bits has
both more tokens per second and less sensitivity than `balanced`, which is at most as much slower as
`high` and at least as good as `fast`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.costs.model import CostModel
from planner.optimiser.problem import typical_objective_s
from planner.options import PLAN_TIME, Quality
from planner.plan.builder import Solution
from planner.search.candidate_search import SearchTime
from planner.search.fitting import searched_sizes
from planner.search.pareto import PlanT, PointSolver, ThetaPoint, theta_solver
from quant.common.errors import InfeasibleError
from quant.scheme import NEAR_FULL_BITS

SLOWER = 0.1
"""Share of the most tokens per second that `high` gives up at most, and share of the fastest
plan's time that `balanced` takes its sensitivity for."""

TIE_BREAK = 3e-4  # share of the time that the worst sensitivity counts for in `fast`
TYPICAL_IN_FLIGHT = 64  # at which a job's time is guessed, to within a small factor
MOST_STEPS, STEP = 4, 4.0
"""Thetas that are tried for `high`: each this many times the one before, then between the two that
enclose the limit."""

Qualities = Mapping[Quality, ThetaPoint[Solution]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan that is taken, with the costs at its theta; `finest`: the fastest with the most bits
    only (None: does not fit).
    """

    costs: CostModel
    solution: Solution
    quality: Quality | None = None
    qualities: Qualities = field(default_factory=dict)
    finest: ThetaPoint[Solution] | None = None


def chosen_by_quality(costs: CostModel, quality: Quality, clock: Callable[[], float]) -> Chosen:
    """The plan of a quality, beside those of the others; InfeasibleError where none fits."""
    search_time = SearchTime(PLAN_TIME * costs.options.search_time_limit, clock)
    solve = theta_solver(costs, clock, search_time=search_time)
    fast = solve(TIE_BREAK * seconds_per_sensitivity(costs))
    good = (fast.plan.workload.global_batch,)

    def solver_of(usable: CostModel, known: tuple[int, ...]) -> PointSolver:
        same = usable.bits == costs.bits
        return solve if same else theta_solver(usable, clock, known, search_time)

    finest = _finest(costs, solver_of(replace(costs, usable_bits=(max(costs.bits),)), good), fast)
    for bits in bits_by_quality(costs.bits):
        usable, is_usable = replace(costs, usable_bits=bits), has_only(bits, costs, fast.plan)
        known = [point for point in (fast if is_usable else None, finest) if point is not None]
        looks = 1 if is_usable or costs.job is None else 2
        solve_usable = solver_of(usable, good if is_usable else ())
        try:
            found = _by_quality(solve_usable, looks, fast, known, finest)
        except InfeasibleError:
            continue
        point, of_point = found[quality], costs if quality == "fast" else usable
        return Chosen(replace(of_point, theta=point.theta), point.plan, quality, found, finest)
    raise AssertionError("the fastest plan has bits of the last ones")


def bits_by_quality(bits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the bitwidths of `balanced` and `high`: those near 16 bit, then each time the next one
    too.
    """
    fewer = sorted((each for each in bits if each < NEAR_FULL_BITS), reverse=True)
    for least in (NEAR_FULL_BITS, *fewer):
        usable = tuple(each for each in bits if each >= least)
        if usable:
            yield usable


def has_only(bits: Sequence[int], costs: CostModel, solution: Solution) -> bool:
    return {costs.options.bits[each] for each in solution.assignment.bitwidth} <= set(bits)


def _finest(
    costs: CostModel, solve: PointSolver, fast: ThetaPoint[Solution]
) -> ThetaPoint[Solution] | None:
    """The fastest plan with the most bits only, with a theta at which none is better; None where
    none fits.
    """
    try:
        found = solve(0.0, quick=True)
    except InfeasibleError:
        return None
    omega = costs.sensitivity
    losses = omega - omega[:, [-1]]
    slower_s = max(0.0, found.predicted_s - fast.predicted_s)
    least = float(losses[losses > 0].min(initial=math.inf))
    return replace(found, theta=max(fast.theta, slower_s / least))


def _by_quality(
    solve: PointSolver,
    looks: int,
    fast: ThetaPoint[Solution],
    known: Sequence[ThetaPoint[Solution]],
    finest: ThetaPoint[Solution] | None,
) -> Qualities:
    """The plans of the qualities, of those `known` and more; a job whose bits were unknown needs so
    many `looks`.
    """
    if not fast.omega:
        return best_by_rules(fast, [fast])
    *_, balanced = found = [*known, *(solve(theta_of_tenth(fast)) for _ in range(looks))]
    limit_s = slowest_high_s(found)
    if balanced.omega and (finest is None or finest.predicted_s > limit_s):
        found += towards_high(solve, balanced, limit_s)
    return best_by_rules(fast, found)


def theta_of_tenth(point: ThetaPoint[PlanT]) -> float:
    """The theta at which all the sensitivity of a plan counts as a tenth of its time."""
    return SLOWER * point.predicted_s / point.omega


def slowest_high_s(found: Sequence[ThetaPoint[PlanT]]) -> float:
    """Seconds that the plan of quality `high` takes at most, by those of its bits."""
    return min(point.predicted_s for point in found) / (1 - SLOWER)


def best_by_rules(
    fast: ThetaPoint[PlanT], found: Sequence[ThetaPoint[PlanT]]
) -> Mapping[Quality, ThetaPoint[PlanT]]:
    """Best by each rule; by the prediction a search's best may be beaten by what another found."""
    fast = min((fast, *found), key=lambda point: (point.predicted_s, point.omega))
    limit_s = slowest_high_s(found)

    def loss(point: ThetaPoint[PlanT]) -> float:
        sensitivity = point.omega / fast.omega if fast.omega > 0 else 0.0
        return point.predicted_s / fast.predicted_s + SLOWER * sensitivity

    return {
        "high": min(
            (point for point in found if point.predicted_s <= limit_s),
            key=lambda point: (point.omega, point.predicted_s),
        ),
        "balanced": min(found, key=loss),
        "fast": fast,
    }


def towards_high(
    solve: Callable[..., ThetaPoint[PlanT]], balanced: ThetaPoint[PlanT], limit_s: float
) -> Iterator[ThetaPoint[PlanT]]:
    """Yield plans of ever less sensitivity than `balanced` has, about as slow as the limit."""
    low, high = max(balanced.theta, theta_of_tenth(balanced) / STEP), math.inf
    for _ in range(MOST_STEPS):
        theta = low * STEP if math.isinf(high) else math.sqrt(low * high)
        found = solve(theta, quick=True)
        yield found
        if found.predicted_s > limit_s:
            high = theta
        else:
            low = theta


def seconds_per_sensitivity(costs: CostModel) -> float:
    """About the seconds of a plan for a unit of the worst sensitivity; 0 where bits cost none."""
    worst = float(costs.sensitivity[:, 0].sum())
    if not worst:
        return 0.0
    if costs.job is not None:
        number = min(costs.job.prompts, TYPICAL_IN_FLIGHT)
        costs = replace(costs, workload=costs.in_flight(costs.job, number))
    devices = costs.cluster.devices
    sizes = searched_sizes(costs, len(devices))[-1]
    return typical_objective_s(replace(costs, theta=0.0).problem(devices, sizes)) / worst
