"""Three plans side by side, `fast`, `balanced` and `high`, by rules that mean the same everywhere.

- `fast` has the most tokens per second (all sensitivity together counts for less than a thousandth
  of the time).
- `balanced` takes the time of the fastest plan as one, and its sensitivity as a tenth, and has the
  least sum of both: it is one percent slower wherever that removes a tenth of that sensitivity.
- `high` has the least sensitivity of the plans at most a tenth slower than the fastest.

Neither rule knows seconds or the scale of an omega file. The sum being least, no plan has both more
tokens per second and less sensitivity than `balanced`, which is at most as much slower as `high`
and at least as good as `fast`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.costs.model import CostModel
from planner.optimiser.relaxation.scaling import typical_objective_s
from planner.options import PLAN_TIME, Quality
from planner.plan.builder import Solution
from planner.search.candidate_search import SearchTime
from planner.search.memory_fit import searched_sizes
from planner.search.tradeoffs.bounded import PointSolver, theta_solver
from planner.search.tradeoffs.pareto import PlanT, Point
from quant.common.errors import InfeasibleError

SLOWER = 0.1
"""Share of the most tokens per second that `high` gives up at most, and share of the fastest
plan's time that `balanced` takes its sensitivity for."""

TIE_BREAK = 3e-4  # share of the time that the worst sensitivity counts for in `fast`
TYPICAL_IN_FLIGHT = 64  # at which a job's time is guessed, to within a small factor
MOST_STEPS, STEP = 4, 4.0
"""Thetas that are tried for `high`: each this many times the one before, then between the two that
enclose the limit."""

Qualities = Mapping[Quality, Point[Solution]]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan that is taken, with the costs at its theta: of a `quality` where that was wanted,
    beside the plans of the others, and the fastest with the most bits only (None: does not fit).
    """

    costs: CostModel
    solution: Solution
    quality: Quality | None = None
    qualities: Qualities = field(default_factory=dict)
    finest: Point[Solution] | None = None


def chosen_by_quality(costs: CostModel, quality: Quality, clock: Callable[[], float]) -> Chosen:
    """The plan of a quality, beside those of the others; InfeasibleError where none fits."""
    search_time = SearchTime(PLAN_TIME * costs.options.search_time_limit, clock)
    solve = theta_solver(costs, clock, search_time=search_time)
    fast = solve(TIE_BREAK * seconds_per_sensitivity(costs))
    number = fast.plan.workload.global_batch
    at_most_bits = theta_solver(_at_most_bits(costs), clock, (number,), search_time)
    finest = _finest(costs, at_most_bits, fast)
    # `high` takes the longest: a batch, of which little else is asked, has it only if it is wanted
    found = _by_quality(solve, fast, finest, costs.job is not None or quality == "high")
    point = found[quality]
    return Chosen(replace(costs, theta=point.theta), point.plan, quality, found, finest)


def _at_most_bits(costs: CostModel) -> CostModel:
    """The costs with the most bits for every layer."""
    return replace(costs, only_bits=max(costs.options.bits))


def _finest(costs: CostModel, solve: PointSolver, fast: Point[Solution]) -> Point[Solution] | None:
    """The fastest plan with the most bits only, by a solver of these; None where none fits. Its
    theta is one at which no other plan is better.
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
    solve: PointSolver, fast: Point[Solution], finest: Point[Solution] | None, with_high: bool
) -> Qualities:
    found = [fast] if finest is None else [fast, finest]
    if fast.omega > 0:
        theta = SLOWER * fast.predicted_s / fast.omega
        found.append(solve(theta))
        limit_s = min(point.predicted_s for point in found) / (1 - SLOWER)
        if with_high and (finest is None or finest.predicted_s > limit_s):
            found += _towards_high(solve, theta, limit_s)
    best = best_by_rules(found)
    return best if with_high else {name: best[name] for name in best if name != "high"}


def best_by_rules(found: Sequence[Point[PlanT]]) -> Mapping[Quality, Point[PlanT]]:
    """The best of all that were `found` by each rule: searches rank by a closed form, so that by
    the prediction one may be beaten by what another found.
    """
    fast = min(found, key=lambda point: (point.predicted_s, point.omega))
    limit_s = fast.predicted_s / (1 - SLOWER)

    def loss(point: Point[PlanT]) -> float:
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


def _towards_high(solve: PointSolver, theta: float, limit_s: float) -> Iterator[Point[Solution]]:
    """Yield plans of ever less sensitivity from that of `theta` on, about as slow as the limit."""
    low, high = theta, math.inf
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
