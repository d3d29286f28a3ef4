"""What a search for schedules is given: layers that have been placed, and who places them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.latency_bound.branch_and_bound import Point
from planner.latency_bound.events.watch import Observed
from planner.latency_bound.placing.divisions import Division
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.steady_state.performance import Performance
from planner.latency_bound.steady_state.timeline import Timeline
from planner.scheduling import RequestSchedule, ScheduleKind


@dataclass(frozen=True)
class Start:
    """A schedule to place layers for; `free`: its groups may be others, as many as stages. With
    `usable_bits` layers have none but these bitwidths; with `on_all` no device is left out.
    `division`: the devices that prefill and those that decode, where they are divided; `slack`: how
    many times quality counts on either.
    """

    schedule: RequestSchedule
    free: bool = True
    usable_bits: tuple[int, ...] | None = None
    on_all: bool = False
    division: Division | None = None
    slack: tuple[float, float] = (1.0, 1.0)


class Placed(Protocol):
    """Layers on devices, and the performance of every point of the controls there."""

    @property
    def kind(self) -> ScheduleKind:
        """The kind of the schedules."""

    @property
    def key(self) -> Hashable:
        """A key that is equal for equal placements."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement; or that of the stages that decode, then that of those that prefill."""

    @property
    def omega(self) -> float:
        """Summed sensitivity of the layers' bitwidths."""

    @property
    def ranges(self) -> Sequence[range]:
        """The box of the controls."""

    def around(self, point: Point) -> Sequence[range]:
        """The box of the controls up to somewhat more than a point."""

    def __call__(self, point: Point) -> Performance:
        """The estimated performance of a point; latency is infinite where requests have no room."""

    def exact(self, point: Point, quantile: float) -> Performance:
        """The performance of a point by its timeline at a quantile of the latency, as above."""

    def schedule(self, point: Point) -> RequestSchedule:
        """The schedule of a point."""

    def has_room(self, schedule: RequestSchedule) -> bool:
        """Whether the requests of a schedule have room, as it is."""

    def timeline(self, schedule: RequestSchedule, quantile: float) -> Timeline:
        """The timeline of a schedule."""

    def observed(self, schedule: RequestSchedule, count: int) -> Observed:
        """What is seen of so many requests in a simulation of a schedule's events."""

    def start(self, schedule: RequestSchedule) -> Start:
        """To place layers again for a schedule."""

    def near(self, schedule: RequestSchedule) -> Iterator[Start]:
        """Yield what to place layers for besides, where a schedule is the best so far."""

    def crossed(self, others: Sequence[Placed]) -> Iterator[Placed]:
        """Yield placements that have parts of this one and parts of others."""


class Planner(Protocol):
    """Finds placements for schedules of one kind."""

    def starts(self) -> Iterator[Start]:
        """Yield what to begin with, the schedule with the least latency among it."""

    def placed(self, start: Start, theta: float, limit_s: float) -> Placed:
        """The best placement for a schedule; InfeasibleError where none fits."""


def scaled_count(count: int, ratio: float) -> int:
    """About `ratio` times as many, but at least one more or fewer, and at least one."""
    scaled = round(ratio * count)
    return max(1, max(scaled, count + 1) if ratio > 1 else min(scaled, count - 1))
