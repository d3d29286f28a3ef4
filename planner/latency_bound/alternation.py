"""Placements and schedules in turns: layers where a schedule runs best, then the best schedule
there.

For a given schedule the best placement is the one whose cycle is shortest, which is best for both
throughput and latency: an assignment problem. For a given placement branch and bound finds the
schedule. Each turn improves on the one before or is the last. Where it ends depends on where it
begins: with many requests in flight there is no room for more bits, with which there would be
better schedules of fewer. So there are several beginnings, each bitwidth alone among them, and from
the best schedule on, fewer and more requests in flight are tried too. All of this goes by estimates
of performance (`planner.latency_bound.schedules`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs.model import CostModel
from planner.latency_bound.branch_and_bound import (
    ControlPoint,
    Evaluations,
    PerformanceOf,
    best_within,
    throughput_on_diagonal,
)
from planner.latency_bound.placed_layers import PhaseDivision, PlacedLayers
from planner.latency_bound.schedules import BoundRequest
from planner.latency_bound.simulate import ObservedRequests
from planner.latency_bound.timeline import Performance, Timeline, unlimited
from planner.scheduling import RequestSchedule, ScheduleKind
from planner.search.candidate_search import SearchTime, search
from planner.workload import Job
from quant.common.errors import InfeasibleError

NEAR = (0.5, 0.8, 1.25, 2.0)
"""Newcomers of RRA, or requests that decode of WAA, relative to the best schedule's, for which
layers are placed again."""

BEYOND = 1.5
"""By which each control may exceed the best point by estimates."""

SETTLING = 3
"""Times the requests that decode that begin before any are watched."""

MOST_GROUPS = 2
"""Groups for each stage: with more, throughput hardly grows."""


@dataclass(frozen=True)
class PlacingGoal:
    """A schedule to place layers for; `free`: its groups may be others, as many as stages. With
    `usable_bits` layers have none but these bitwidths; with `on_all` no device is left out.
    `division`: the devices that prefill and those that decode, where they are divided; `slack`: how
    many times quality counts on either.
    """

    schedule: RequestSchedule
    free: bool = True
    usable_bits: tuple[int, ...] | None = None
    on_all: bool = False
    division: PhaseDivision | None = None
    slack: tuple[float, float] = (1.0, 1.0)


class ScheduleSpace(ABC):
    """Layers on devices, and the performance of every point of the controls there."""

    kind: ScheduleKind
    job: Job
    request: BoundRequest

    @property
    @abstractmethod
    def placements(self) -> tuple[PlacedLayers, ...]:
        """The placement; or that of the stages that decode, then that of those that prefill."""

    @property
    def key(self) -> Hashable:
        return tuple(each.key for each in self.placements)

    @property
    def omega(self) -> float:
        """Summed sensitivity of the layers' bitwidths, in the mean of both sides."""
        return sum(each.omega for each in self.placements) / len(self.placements)

    def rate_for(self, cost_s: float, theta: float) -> float:
        """The requests per second with which the job costs so much here; inf where quality alone
        does.
        """
        left_s = cost_s - theta * self.omega
        return self.job.prompts / left_s if left_s > 0 else math.inf

    @property
    @abstractmethod
    def ranges(self) -> Sequence[range]: ...

    @abstractmethod
    def around(self, point: ControlPoint) -> Sequence[range]:
        """The box of the controls up to somewhat more than a point."""

    @abstractmethod
    def fitted(self, point: ControlPoint) -> tuple[RequestSchedule, bool]:
        """The schedule of a point, with the best prefill micro-batch that has room, and whether any
        has.
        """

    @abstractmethod
    def estimate(self, schedule: RequestSchedule) -> Performance:
        """The estimated performance of a schedule, whether or not it has room."""

    def __call__(self, point: ControlPoint) -> Performance:
        """The estimated performance of a point; latency is infinite where requests have no room."""
        schedule, fits = self.fitted(point)
        found = self.estimate(schedule)
        return found if fits else Performance(found.requests_per_s, math.inf)

    def exact(self, point: ControlPoint, quantile: float) -> Performance:
        """A point by its timeline at a quantile; as above without room, as timelines fall again far
        beyond.
        """
        schedule, fits = self.fitted(point)
        return self.timeline(schedule, quantile).performance if fits else self(point)

    def schedule(self, point: ControlPoint) -> RequestSchedule:
        return self.fitted(point)[0]

    @abstractmethod
    def has_room(self, schedule: RequestSchedule) -> bool: ...

    @abstractmethod
    def timeline(self, schedule: RequestSchedule, quantile: float) -> Timeline: ...

    @abstractmethod
    def observed(
        self, schedule: RequestSchedule, count: int, check_time: Callable[[], None] = unlimited
    ) -> ObservedRequests:
        """What is seen of so many requests in a simulation of a schedule's events."""

    @abstractmethod
    def start(self, schedule: RequestSchedule) -> PlacingGoal: ...

    @abstractmethod
    def near(self, schedule: RequestSchedule) -> Iterator[PlacingGoal]:
        """Yield what to place layers for besides, where a schedule is the best so far."""

    def crossed(self, others: Sequence[ScheduleSpace]) -> Iterator[ScheduleSpace]:
        """Yield placements that have parts of this one and parts of others: none of one part."""
        return iter(())


@dataclass(frozen=True, eq=False)
class KindPlanner(ABC):
    kind: ScheduleKind
    costs: CostModel
    job: Job
    request: BoundRequest
    clock: Callable[[], float]

    @abstractmethod
    def starts(self) -> Iterator[PlacingGoal]:
        """Yield what to begin with, the schedule with the least latency among it."""

    @abstractmethod
    def placed(self, start: PlacingGoal, theta: float, limit_s: float) -> ScheduleSpace:
        """The best placement for a schedule; InfeasibleError where none fits."""

    def _best_layers(self, costs: CostModel, start: PlacingGoal) -> PlacedLayers:
        usable_bits = start.usable_bits or costs.usable_bits
        return PlacedLayers(costs, search(replace(costs, usable_bits=usable_bits), self.clock))


def scaled_count(count: int, ratio: float) -> int:
    """About `ratio` times as many, but at least one more or fewer, and at least one."""
    scaled = round(ratio * count)
    return max(1, max(scaled, count + 1) if ratio > 1 else min(scaled, count - 1))


PROGRESS = 1e-3
"""Share by which a turn must improve for another one."""

MOST_TURNS = 6

DOUBT = 0.25
"""Share by which estimates of the cost of placements may be wrong beside each other."""

JUDGED = 3
"""Placements on which the schedules are searched for by timelines too."""

FINALISTS = 5
"""Placements on which schedules are searched for, of those that are known: those with the best
schedules on the diagonal of the box."""


@dataclass(frozen=True, eq=False)
class PlacedPoint:
    """Controls where layers lie, and estimated performance."""

    placed: ScheduleSpace
    point: ControlPoint
    performance: Performance

    @property
    def start(self) -> PlacingGoal:
        return self.placed.start(self.placed.schedule(self.point))

    def cost_s(self, theta: float) -> float:
        """Seconds of the whole job in its steady state, a unit of sensitivity being `theta`."""
        seconds = self.placed.job.prompts / self.performance.requests_per_s
        return seconds + theta * self.placed.omega


class Alternation:
    """Searches the schedules of one kind, at one theta and bound after another. Placements that
    were found stay known, with all that was evaluated there. `check_time` raises what ends a look.
    """

    def __init__(
        self, planner: KindPlanner, search_time: SearchTime, check_time: Callable[[], None]
    ) -> None:
        self._planner, self.search_time, self._check_time = planner, search_time, check_time
        self._pool: dict[Hashable, ScheduleSpace] = {}
        self._placed: dict[tuple[PlacingGoal, float], ScheduleSpace | None] = {}
        self._known: dict[Hashable, dict[ControlPoint, Performance]] = {}

    @property
    def evaluations(self) -> int:
        return sum(map(len, self._known.values()))

    @property
    def least(self) -> PlacedPoint | None:
        """The schedule with the least latency on any placement; None where nothing fits."""
        ends = (self._lowest(placed) for placed in self._pool.values())
        fitting = (each for each in ends if each is not None)
        return min(fitting, key=lambda each: each.performance.latency_s, default=None)

    def best(self, theta: float, bound_s: float) -> PlacedPoint | None:
        """The best schedule found within the bound at this theta; None where none keeps it."""
        if not self._pool:
            for start in self._planner.starts():
                if not self.search_time.is_over or self._is_needed(start, bound_s):
                    self._place(start, theta)
        best = self._best_known(theta, bound_s)
        if best is None:
            return None
        best = self._descend(best.start, theta, bound_s, best)
        for start in best.placed.near(best.placed.schedule(best.point)):
            if self.search_time.is_over:
                break
            best = self._descend(start, theta, bound_s, best)
        return self._best_crossed(theta, bound_s, best)

    def finalists(self, best: PlacedPoint, theta: float, bound_s: float) -> Iterator[PlacedPoint]:
        """Yield `best` and the best points on other placements that are as good by estimates, or
        nearly, the best ones first.
        """
        yield best
        others = [each for each in self._pool.values() if each.key != best.placed.key]
        found = (self._better(each, theta, bound_s, None) for each in others)
        most_s = (1 + DOUBT) * best.cost_s(theta)
        near = [each for each in found if each is not None and each.cost_s(theta) <= most_s]
        yield from sorted(near, key=lambda each: each.cost_s(theta))[: JUDGED - 1]

    def _is_needed(self, start: PlacingGoal, bound_s: float) -> bool:
        """Whether a start is taken however late it is: one of all bits, if none keeps the bound."""
        least = self.least
        keeps = least is not None and least.performance.latency_s <= bound_s
        return start.usable_bits is None and not keeps

    def _best_known(self, theta: float, bound_s: float) -> PlacedPoint | None:
        """The best on known placements, or on parts of the one with the least latency."""
        best = self._best_of(list(self._pool.values()), theta, bound_s)
        least = self.least
        if best is not None or least is None:
            return best
        return self._best_of(self._crossed(least.placed), theta, bound_s)

    def _best_of(
        self, placements: Sequence[ScheduleSpace], theta: float, bound_s: float
    ) -> PlacedPoint | None:

        def cost_s(placed: ScheduleSpace) -> float:
            evaluated = Evaluations(self._performance(placed), bound_s)
            rate = throughput_on_diagonal(placed.ranges, evaluated)
            return placed.job.prompts / rate + theta * placed.omega if rate else math.inf

        best: PlacedPoint | None = None
        for placed in sorted(placements, key=cost_s)[:FINALISTS]:
            best = self._better(placed, theta, bound_s, best) or best
        return best

    def _best_crossed(self, theta: float, bound_s: float, best: PlacedPoint) -> PlacedPoint:
        for _ in range(MOST_TURNS):
            if self.search_time.is_over:
                break
            before = best
            for placed in self._crossed(before.placed):
                best = self._better(placed, theta, bound_s, best) or best
            if best is before:
                break
        return best

    def _crossed(self, placed: ScheduleSpace) -> list[ScheduleSpace]:
        crossed = list(placed.crossed(list(self._pool.values())))
        return [self._pool.setdefault(each.key, each) for each in crossed]

    def _place(self, start: PlacingGoal, theta: float) -> ScheduleSpace | None:
        """The best placement for a schedule, which is known from then on; None where none fits."""
        key = start, theta
        if key not in self._placed:
            self._check_time()
            try:
                placed = self._planner.placed(start, theta, self.search_time.next_s())
            except InfeasibleError:
                self._placed[key] = None
            else:
                self._placed[key] = self._pool.setdefault(placed.key, placed)
        return self._placed[key]

    def _descend(
        self, start: PlacingGoal, theta: float, bound_s: float, best: PlacedPoint
    ) -> PlacedPoint:
        for _ in range(MOST_TURNS):
            if self.search_time.is_over:
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
        self, placed: ScheduleSpace, theta: float, bound_s: float, best: PlacedPoint | None
    ) -> PlacedPoint | None:
        more_than = 0.0 if best is None else placed.rate_for(best.cost_s(theta), theta)
        if math.isinf(more_than):
            return None
        evaluated = Evaluations(self._performance(placed), bound_s, more_than)
        found = best_within(placed.ranges, evaluated)
        return None if found is None else self._candidate(placed, found)

    def _performance(self, placed: ScheduleSpace) -> PerformanceOf:
        known = self._known.setdefault(placed.key, {})

        def performance(point: ControlPoint) -> Performance:
            if point not in known:
                self._check_time()
                known[point] = placed(point)
            return known[point]

        return performance

    def _candidate(self, placed: ScheduleSpace, point: ControlPoint) -> PlacedPoint:
        return PlacedPoint(placed, point, self._performance(placed)(point))

    def _lowest(self, placed: ScheduleSpace) -> PlacedPoint | None:
        """The schedule of least latency on a placement; None where not even that has room."""
        low = tuple(each[0] for each in placed.ranges)
        found = self._candidate(placed, low)
        return found if found.performance.latency_s < math.inf else None
