"""Throughput against the bound on latency by kind of schedule: which is best where, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from planner.cluster.spec import ClusterSpec
from planner.latency_bound.front import LatencyPoint, latency_front
from planner.latency_bound.request import BoundRequest
from planner.model.finding import ModelShape
from planner.options import PlanOptions
from planner.scheduling import ScheduleKind
from quant.common.errors import InfeasibleError


@dataclass(frozen=True)
class LeftOut:
    """A kind of schedule that cannot be had, and the problem with it."""

    kind: ScheduleKind
    problem: str


@dataclass(frozen=True)
class BoundRow:
    """For one bound the schedule of each kind that keeps it with the most requests per second."""

    bound_s: float
    points: tuple[LatencyPoint, ...]

    def of(self, kind: ScheduleKind) -> LatencyPoint | None:
        """The point of a kind; None where none keeps the bound."""
        return next((each for each in self.points if each.schedule.kind == kind), None)

    @property
    def best(self) -> LatencyPoint:
        """The point of the most requests per second."""
        return max(self.points, key=lambda each: each.requests_per_s)


@dataclass(frozen=True)
class KindFronts:
    """The fronts of all kinds that can be had: `points`, and the kinds that cannot."""

    points: tuple[LatencyPoint, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def kinds(self) -> tuple[ScheduleKind, ...]:
        """The kinds that there are points of, in the order in which these stand."""
        return tuple(dict.fromkeys(each.schedule.kind for each in self.points))

    def front(self, kind: ScheduleKind) -> list[LatencyPoint]:
        """The points of a kind, the tightest bound first."""
        own = (each for each in self.points if each.schedule.kind == kind)
        return sorted(own, key=lambda each: each.bound_s)

    @property
    def rows(self) -> list[BoundRow]:
        """The bounds from which on the best schedule has more throughput, ascending."""
        rows: list[BoundRow] = []
        for bound_s in sorted({each.bound_s for each in self.points}):
            fronts = ([p for p in self.front(kind) if p.bound_s <= bound_s] for kind in self.kinds)
            row = BoundRow(bound_s, tuple(kept[-1] for kept in fronts if kept))
            if not rows or row.best.requests_per_s > rows[-1].best.requests_per_s:
                rows.append(row)
        return rows

    @property
    def runs(self) -> list[list[BoundRow]]:
        """The rows in runs of which one kind is the best."""
        return [list(run) for _, run in groupby(self.rows, key=lambda row: row.best.schedule.kind)]

    def to_json(self) -> str:
        """Points and kinds that are left out as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def kind_fronts(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> KindFronts:
    """The fronts of the kinds that are asked for; each search has its own time limit.

    Raises as `planner.latency_bound.front.latency_front` where no kind can be had.
    """
    points: list[LatencyPoint] = []
    errors: dict[ScheduleKind, InfeasibleError] = {}
    for kind in request.kinds:
        own = replace(request, kinds=(kind,))
        try:
            points += latency_front(cluster, shape, source, own, options, clock)
        except InfeasibleError as error:
            errors[kind] = error
    if not points:
        raise next(iter(errors.values()))
    left_out = (LeftOut(kind, error.problem) for kind, error in errors.items())
    return KindFronts(tuple(points), tuple(left_out))


def reason_of(run: Sequence[BoundRow]) -> str:
    """What the best kind of these rows has that the next best of the last one has not."""
    row = run[-1]
    best = row.best.schedule
    others = [each for each in row.points if each.schedule.kind != best.kind]
    if not others:
        return "the only one that keeps the bound"
    other = max(others, key=lambda each: each.requests_per_s).schedule
    if best.divides and not other.divides:
        return (
            f"its decode steps wait for no prefill, where {_name(other.kind)} prefills "
            f"{other.prefill_requests:,} requests after every {other.decode_steps:,} steps"
        )
    more = f"{best.decode_requests:,} requests decode at a time, {other.decode_requests:,} with"
    if best.decode_requests > other.decode_requests:
        room = "one copy of the layers leaves room: " if other.divides != best.divides else ""
        return f"{room}{more} {_name(other.kind)}"
    if not best.divides:
        return f"all devices serve either phase, where {_name(other.kind)} has some for each alone"
    return (
        f"its sides take more equally long than those of {_name(other.kind)}, "
        f"with {best.decode_requests:,} requests that decode at a time"
    )


def _name(kind: ScheduleKind) -> str:
    return kind.upper()
