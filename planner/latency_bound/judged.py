"""The search for schedules of one kind: by estimates, by timelines on the best placements, and by
the runtime's decisions in virtual time, which judge them before any is given out.

The estimates' latencies are off by some factor, which is measured where the search ends; then it
goes on with the bound that much wider or tighter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from planner.latency_bound.alternation import (
    Alternation,
    KindPlanner,
    PlacedPoint,
    ScheduleSpace,
)
from planner.latency_bound.branch_and_bound import ControlPoint, Evaluations, best_within
from planner.latency_bound.simulate import ObservedRequests
from planner.latency_bound.timeline import Performance, unlimited
from planner.scheduling import RequestSchedule
from planner.search.candidate_search import SearchTime

LATE = 10, 40
"""Requests beyond the quantile that are to be expected in a first simulation, and in the one that
follows where its error leaves open whether the bound is kept, or is above `SURE`."""
SURE = 0.005
"""Share of the latency that its error may have."""

MOST_AIMS, STEP, NEAR = 5, 0.7, 0.99
"""Simulations on one placement, the share by which what is aimed at changes at most from one to the
next, and the share of the bound from which on latency is near enough to it."""

TIGHTER = (0.8, 0.6)
"""Shares of the bound for which timelines are asked too."""

HALVINGS = 6
"""Simulations where no timeline led to a schedule within the bound."""


class TimeIsUpError(Exception):
    """Time was up, and a schedule within the bound known, before a look had ended."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A schedule where layers lie, the wait for a turn by its timeline, and what was `observed` by
    events.
    """

    placed: ScheduleSpace
    schedule: RequestSchedule
    admission_wait_s: float
    observed: ObservedRequests

    @classmethod
    def of(
        cls,
        placed: ScheduleSpace,
        schedule: RequestSchedule,
        bound_s: float = math.inf,
        check_time: Callable[[], None] = unlimited,
    ) -> Scheduled:
        """Simulate a schedule as long as its latency is not known well enough for the bound."""
        quantile = placed.request.quantile
        wait_s = placed.timeline(schedule, quantile).admission_wait_s
        for late in LATE:
            observed = placed.observed(schedule, ceil(late / (1 - quantile)), check_time)
            found = cls(placed, schedule, wait_s, observed)
            if found.is_known(bound_s):
                break
        return found

    def is_known(self, bound_s: float) -> bool:
        """Whether it surely misses the bound, or all is known of it that may be."""
        late = len(self.observed.latencies_s) * (1 - self.placed.request.quantile)
        is_sure = self.error_s <= SURE * self.latency_s or late >= LATE[-1] - 1
        return is_sure or self.latency_s - self.error_s > bound_s

    @cached_property
    def latency_s(self) -> float:
        """Latency at the bounded quantile."""
        return self.observed.latency_s(self.placed.request.quantile)

    @cached_property
    def error_s(self) -> float:
        """By how much that may be off, for the requests that were drawn."""
        return self.observed.latency_error_s(self.placed.request.quantile)

    @property
    def seconds(self) -> float:
        """Seconds of the whole job in its steady state."""
        return self.placed.job.prompts / self.observed.requests_per_s

    @property
    def requests_per_s(self) -> float:
        return self.observed.requests_per_s

    def cost_s(self, theta: float) -> float:
        """Seconds of the job, a unit of sensitivity counting as `theta`."""
        return self.seconds + theta * self.placed.omega


class Judge:
    """Searches placements by timelines, and knows all that it evaluated and simulated: nothing new
    once `is_over` where some schedule keeps the bound, and no more once `check_time` raises.
    """

    def __init__(
        self,
        is_over: Callable[[], bool] = lambda: False,
        check_time: Callable[[], None] = unlimited,
    ) -> None:
        self._is_over, self._check_time = is_over, check_time
        self._known: dict[Hashable, dict[ControlPoint, Performance]] = {}
        self._seen: dict[tuple[Hashable, ControlPoint], Scheduled] = {}

    @property
    def evaluations(self) -> int:
        return sum(map(len, self._known.values()))

    def exact(self, placed: ScheduleSpace, point: ControlPoint) -> Performance:
        known = self._known.setdefault(placed.key, {})
        if point not in known:
            self._check_time()
            known[point] = placed.exact(point, placed.request.quantile)
        return known[point]

    def seen(self, placed: ScheduleSpace, point: ControlPoint, bound_s: float) -> Scheduled:
        """What came of a point that has room."""
        key = placed.key, point
        found = self._seen.get(key)
        if found is None or not found.is_known(bound_s):
            schedule = placed.schedule(point)
            found = self._seen[key] = Scheduled.of(placed, schedule, bound_s, self._check_time)
        return found

    def has(self, bound_s: float) -> bool:
        """Whether some are known to keep a bound."""
        seen = self._seen.values()
        return any(each.latency_s <= bound_s and each.is_known(bound_s) for each in seen)

    def kept(self, bound_s: float) -> Iterator[Scheduled]:
        """Yield all that were seen within a bound, for whichever bound they were looked for."""
        for (_, point), each in list(self._seen.items()):
            if each.latency_s <= bound_s:
                with suppress(TimeIsUpError):
                    found = self.seen(each.placed, point, bound_s)
                    if found.latency_s <= bound_s:
                        yield found

    def look(
        self,
        placed: ScheduleSpace,
        boxes: Sequence[Sequence[range]],
        bound_s: float,
        more_than: float = 0.0,
    ) -> None:
        """See the schedules of most throughput by timelines, in the first of `boxes` that has any,
        with `more_than` so many requests per second. Timelines may be off: what is aimed at follows
        from what was seen, until latency is near the bound. Then they are held against those of
        tighter bounds, of which some may be faster: not all latencies grow with every control.
        """
        missed = self._aim(placed, boxes, bound_s, more_than)
        for share in TIGHTER:
            kept = [each for each in self.kept(bound_s) if each.placed.key == placed.key]
            fastest = max(kept, key=lambda each: each.requests_per_s, default=None)
            limit_s, most = bound_s, more_than
            if fastest is not None:
                most = max(most, fastest.requests_per_s)
                limit_s = min(limit_s, fastest.latency_s)
            if math.isinf(limit_s) or self._is_over():
                break
            point = self._best_by_timeline(placed, boxes, share * limit_s, most)
            if point is None:
                break
            self.seen(placed, point, bound_s)
        if missed is not None and not any(self.kept(bound_s)):
            self._look_below(placed, missed, bound_s)

    def _aim(
        self,
        placed: ScheduleSpace,
        boxes: Sequence[Sequence[range]],
        bound_s: float,
        more_than: float,
    ) -> ControlPoint | None:
        """See schedules until one is near the bound; returns one that missed it, where none kept
        it.
        """
        aim_s, kept_s, missed_s, missed = bound_s, 0.0, math.inf, None
        for _ in range(MOST_AIMS):
            point = self._best_by_timeline(placed, boxes, aim_s, more_than)
            if point is None:
                break
            planned_s = self.exact(placed, point).latency_s
            seen_s = self.seen(placed, point, bound_s).latency_s
            if seen_s <= bound_s:
                kept_s, missed = max(kept_s, aim_s), None
                if seen_s >= NEAR * bound_s or math.isinf(bound_s) or self._is_over():
                    return None
            else:
                missed_s = min(missed_s, planned_s)
                missed = point if not kept_s else None
            share = min(1 / STEP, max(STEP, bound_s / seen_s))
            aim_s = planned_s * share * (NEAR if self._is_over() else 1 - SURE)
            if not kept_s < aim_s < missed_s:
                aim_s = (kept_s + missed_s) / 2
            if math.isinf(aim_s) or missed_s - kept_s < SURE * missed_s:
                break
        return missed

    def _best_by_timeline(
        self,
        placed: ScheduleSpace,
        boxes: Sequence[Sequence[range]],
        bound_s: float,
        more_than: float,
    ) -> ControlPoint | None:
        evaluated = Evaluations(lambda point: self.exact(placed, point), bound_s, more_than)
        found = (best_within(ranges, evaluated) for ranges in boxes)
        return next((point for point in found if point is not None), None)

    def _look_below(self, placed: ScheduleSpace, point: ControlPoint, bound_s: float) -> None:
        """See the schedules nearest to a too slow one, towards the least latency, until one keeps
        the bound: latency grows with every control.
        """
        least = [each[0] for each in placed.ranges]
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2
            tried = tuple(a + int(share * (b - a)) for a, b in zip(least, point, strict=True))
            keeps = placed.has_room(placed.schedule(tried))
            if keeps and self.seen(placed, tried, bound_s).latency_s <= bound_s:
                low = share
            else:
                high = share


MOST_CALIBRATIONS, CALIBRATED = 3, 0.02
"""How often the factor is measured at most, and the share by which it may still change."""

PLACED_TIGHTER = (0.6,)
"""Shares of the latency that was found for which schedules are looked for too, as placements for
these may be the best ones: what is found for a bound is not to be worse than for a tighter one."""


class KindSearch:
    """Searches the schedules of one kind, at one theta and bound after another."""

    def __init__(
        self, planner: KindPlanner, search_time: SearchTime, check_time: Callable[[], None]
    ) -> None:
        self._alternation = Alternation(planner, search_time, check_time)
        self._judge = Judge(lambda: self._search_time.is_over, check_time)
        self.kept, self.has = self._judge.kept, self._judge.has
        self._factor = 1.0

    @property
    def _search_time(self) -> SearchTime:
        return self._alternation.search_time

    @property
    def evaluations(self) -> int:
        return self._alternation.evaluations + self._judge.evaluations

    @property
    def least(self) -> Scheduled | None:
        least = self._alternation.least
        if least is None:
            return None
        try:
            return self._judge.seen(least.placed, least.point, math.inf)
        except TimeIsUpError:
            return min(self.kept(math.inf), key=lambda each: each.latency_s, default=None)

    def best(self, theta: float, bound_s: float, search_time: SearchTime) -> Scheduled | None:
        """The best schedule found within the bound at this theta; None where none keeps it."""
        self._alternation.search_time = search_time
        with suppress(TimeIsUpError):
            found = self._calibrated(theta, bound_s)
            if found is not None:
                self._look_on(self._finalists(found, theta, bound_s), theta, bound_s)
            if not self.has(bound_s):
                _ = self.least  # may keep it
        return self._best_seen(theta, bound_s)

    def _best_seen(self, theta: float, bound_s: float) -> Scheduled | None:
        return min(self.kept(bound_s), key=lambda each: each.cost_s(theta), default=None)

    def _finalists(self, found: PlacedPoint, theta: float, bound_s: float) -> Iterator[PlacedPoint]:
        for share in PLACED_TIGHTER:
            if not self._search_time.is_over:
                self._alternation.best(theta, share * found.performance.latency_s)
        return self._alternation.finalists(found, theta, bound_s * self._factor)

    def _look_on(self, finalists: Iterator[PlacedPoint], theta: float, bound_s: float) -> None:
        best: Scheduled | None = None
        for each in finalists:
            placed = each.placed
            more_than = 0.0 if best is None else placed.rate_for(best.cost_s(theta), theta)
            if not math.isinf(more_than):
                boxes = placed.around(each.point), placed.ranges
                self._judge.look(placed, boxes, bound_s, more_than)
            best = self._best_seen(theta, bound_s)
            if best is not None and self._search_time.is_over:
                return

    def _calibrated(self, theta: float, bound_s: float) -> PlacedPoint | None:
        found = self._alternation.best(theta, bound_s * self._factor)
        for _ in range(MOST_CALIBRATIONS):
            if found is None or math.isinf(bound_s) or self._search_time.is_over:
                break
            exact = self._judge.exact(found.placed, found.point)
            factor = found.performance.latency_s / exact.latency_s
            if abs(factor / self._factor - 1) < CALIBRATED:
                break
            self._factor = factor
            found = self._alternation.best(theta, bound_s * factor) or found
        return found
