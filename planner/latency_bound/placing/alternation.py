"""Placements and schedules in turns: layers where a schedule runs best, then the best schedule
there.

For a given schedule the best placement is the one whose cycle is shortest, which is best for both
throughput and latency: an assignment problem. For a given placement branch and bound finds the
schedule. Each turn improves on the one before or is the last. Where it ends depends on where it
begins: with many requests in flight there is no room for more bits, with which there would be
better schedules of fewer. So there are several beginnings, each bitwidth alone among them, and from
the best schedule on, fewer and more requests in flight are tried too. All of this goes by estimates
of performance (`planner.latency_bound.placing.estimates`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from planner.latency_bound.branch_and_bound import (
    Evaluations,
    PerformanceOf,
    Point,
    Tolerance,
    best_evaluated,
    climbed,
)
from planner.latency_bound.placing.placed import Placed, Planner, Start
from planner.latency_bound.steady_state.performance import Performance
from planner.search.candidate_search import SearchTime
from quant.common.errors import InfeasibleError

PROGRESS = 1e-3
"""Share by which a turn must improve for another one."""

MOST_TURNS = 6

FINALISTS = 5
"""Placements on which schedules are searched for, of those that are known: those with the best
schedules on the diagonal of the box."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A point of the controls where layers lie, and its estimated performance; `seconds` are those
    of the whole job in its steady state.
    """

    placed: Placed
    point: Point
    performance: Performance
    seconds: float

    @property
    def start(self) -> Start:
        """To place layers again for its schedule."""
        return self.placed.start(self.placed.schedule(self.point))

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class Alternation:
    """Searches the schedules of one kind, at one theta and bound after another; `prompts` are
    those of the job. Placements that were found stay known, with all that was evaluated there.
    """

    def __init__(
        self, planner: Planner, prompts: int, search_time: SearchTime, tolerance: Tolerance
    ) -> None:
        self._planner, self._prompts = planner, prompts
        self._search_time, self._tolerance = search_time, tolerance
        self._pool: dict[Hashable, Placed] = {}
        self._placed: dict[tuple[Start, float], Placed | None] = {}
        self._known: dict[Hashable, dict[Point, Performance]] = {}

    @property
    def evaluations(self) -> int:
        """Points that were evaluated, over all placements."""
        return sum(map(len, self._known.values()))

    @property
    def least(self) -> Candidate | None:
        """The schedule with the least latency on any placement; None where nothing fits."""
        ends = (self._lowest(placed) for placed in self._pool.values())
        fitting = (each for each in ends if each is not None)
        return min(fitting, key=lambda each: each.performance.latency_s, default=None)

    def best(self, theta: float, bound_s: float) -> Candidate | None:
        """The best schedule found within the bound at this theta; None where none keeps it."""
        if not self._pool:
            for start in self._planner.starts():
                if start.usable_bits is None or not self._search_time.is_over:
                    self._place(start, theta)
        best = self._best_known(theta, bound_s)
        if best is None:
            return None
        best = self._descend(best.start, theta, bound_s, best)
        for start in best.placed.near(best.placed.schedule(best.point)):
            if self._search_time.is_over:
                break
            best = self._descend(start, theta, bound_s, best)
        return self._best_crossed(theta, bound_s, best)

    def _best_known(self, theta: float, bound_s: float) -> Candidate | None:
        """The best schedule on the placements that are known, or on parts of the one with the least
        latency.
        """
        best = self._best_of(list(self._pool.values()), theta, bound_s)
        least = self.least
        if best is not None or least is None:
            return best
        return self._best_of(self._crossed(least.placed), theta, bound_s)

    def _best_of(
        self, placements: Sequence[Placed], theta: float, bound_s: float
    ) -> Candidate | None:
        """The best schedule on the most promising of these placements."""

        def cost_s(placed: Placed) -> float:
            found = climbed(placed.ranges, self._performance(placed), bound_s)
            rate = 0.0 if found is None else found.performance.requests_per_s
            return self._prompts / rate + theta * placed.omega if rate else math.inf

        best: Candidate | None = None
        for placed in sorted(placements, key=cost_s)[:FINALISTS]:
            best = self._better(placed, theta, bound_s, best) or best
        return best

    def _best_crossed(self, theta: float, bound_s: float, best: Candidate) -> Candidate:
        """The best schedule on parts of the best placement and of others."""
        for _ in range(MOST_TURNS):
            if self._search_time.is_over:
                break
            before = best
            for placed in self._crossed(before.placed):
                best = self._better(placed, theta, bound_s, best) or best
            if best is before:
                break
        return best

    def _crossed(self, placed: Placed) -> list[Placed]:
        """Placements with parts of this one, which are known from then on."""
        crossed = list(placed.crossed(list(self._pool.values())))
        return [self._pool.setdefault(each.key, each) for each in crossed]

    def _place(self, start: Start, theta: float) -> Placed | None:
        """The best placement for a schedule, which is known from then on; None where none fits."""
        key = start, theta
        if key not in self._placed:
            try:
                placed = self._planner.placed(start, theta, self._search_time.next_s())
            except InfeasibleError:
                self._placed[key] = None
            else:
                self._placed[key] = self._pool.setdefault(placed.key, placed)
        return self._placed[key]

    def _descend(self, start: Start, theta: float, bound_s: float, best: Candidate) -> Candidate:
        """Improve in turns from `start` on; the best there is then."""
        for _ in range(MOST_TURNS):
            if self._search_time.is_over:
                return best
            placed = self._place(start, theta)
            found = None if placed is None else self._better(placed, theta, bound_s, best)
            if found is None:
                return best
            before_s, best = best.cost_s(theta), found
            start = found.start
            if found.cost_s(theta) > before_s * (1 - PROGRESS):
                return best
        return best

    def _better(
        self, placed: Placed, theta: float, bound_s: float, best: Candidate | None
    ) -> Candidate | None:
        """The best schedule on a placement, if it is better than the best so far."""
        more_than = 0.0
        if best is not None:
            left_s = best.cost_s(theta) - theta * placed.omega
            if left_s <= 0:
                return None
            more_than = self._prompts / left_s
        evaluated = Evaluations(self._performance(placed), bound_s, more_than)
        found = best_evaluated(placed.ranges, evaluated, bound_s, self._tolerance)
        return None if found is None else self._candidate(placed, found.point)

    def _performance(self, placed: Placed) -> PerformanceOf:
        """The performance of points on a placement, each evaluated once."""
        known = self._known.setdefault(placed.key, {})

        def performance(point: Point) -> Performance:
            if point not in known:
                known[point] = placed(point)
            return known[point]

        return performance

    def _candidate(self, placed: Placed, point: Point) -> Candidate:
        performance = self._performance(placed)(point)
        return Candidate(placed, point, performance, self._prompts / performance.requests_per_s)

    def _lowest(self, placed: Placed) -> Candidate | None:
        """The schedule of least latency on a placement; None where not even that has room."""
        low = tuple(each[0] for each in placed.ranges)
        fits = self._performance(placed)(low).latency_s < math.inf
        return self._candidate(placed, low) if fits else None
