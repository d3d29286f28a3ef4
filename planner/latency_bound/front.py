"""Throughput against the bound on latency: which kind of schedule is best where, and why."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby

import numpy as np

from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_plan import bounded_options, nothing_fits
from planner.latency_bound.bounded_search import BoundedSearch, NoScheduleError, Scheduled
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.scheduling import RequestSchedule, ScheduleKind
from planner.search.remedies import naming_remedies
from planner.search.request import PlanningRequest, costs_of, with_fitting_cache
from quant.common.errors import InfeasibleError

POINTS = 8


@dataclass(frozen=True)
class LatencyPoint:
    """The best schedule within a bound: requests and tokens per second, and its latency."""

    bound_s: float
    schedule: RequestSchedule
    requests_per_s: float
    tokens_per_s: float
    latency_s: float


def latency_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LatencyPoint, ...]:
    """Points from the least feasible bound to that beyond which throughput does not grow, without
    the request's own bound; errors as `find_bounded_plan`.
    """
    planned = PlanningRequest.of(cluster, shape, job_of(request), bounded_options(options))

    def trace(chosen: PlanOptions) -> tuple[LatencyPoint, ...]:
        return _front(replace(planned, options=chosen), request, clock)

    with naming_remedies(planned) if "rra" in request.kinds else nullcontext():
        return with_fitting_cache(planned.options, trace)


def _front(
    planned: PlanningRequest, request: BoundRequest, clock: Callable[[], float]
) -> tuple[LatencyPoint, ...]:
    costs, _ = costs_of(planned)
    assert planned.job is not None, "schedules are planned for a job"
    search = BoundedSearch(costs, planned.job, request, clock)
    try:
        fastest = search.within(math.inf)
    except NoScheduleError:
        raise nothing_fits(costs, request) from None
    least = search.least
    assert least is not None, "where a schedule was found, one has the least latency"
    bounds = np.geomspace(least[0], fastest.latency_s, POINTS)
    found = list(_points(search, request, bounds[:-1].tolist()))
    return _ascending([*found, _point(float(bounds[-1]), fastest, request)])


def _points(
    search: BoundedSearch, request: BoundRequest, bounds: list[float]
) -> Iterator[LatencyPoint]:
    for bound_s in bounds:
        try:
            found = search.within(bound_s)
        except NoScheduleError:
            continue
        yield _point(bound_s, found, request)


def _point(bound_s: float, found: Scheduled, request: BoundRequest) -> LatencyPoint:
    rate = found.requests_per_s
    tokens_per_s = rate * request.lengths.outputs.mean
    return LatencyPoint(bound_s, found.schedule, rate, tokens_per_s, found.latency_s)


def _ascending(points: list[LatencyPoint]) -> tuple[LatencyPoint, ...]:
    kept: list[LatencyPoint] = []
    for point in sorted(points, key=lambda each: each.bound_s):
        if not kept or point.requests_per_s > kept[-1].requests_per_s:
            kept.append(point)
    return tuple(kept)


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
        return next((each for each in self.points if each.schedule.kind == kind), None)

    @property
    def best(self) -> LatencyPoint:
        return max(self.points, key=lambda each: each.requests_per_s)


@dataclass(frozen=True)
class KindFronts:
    """The fronts of all kinds that can be had: `points`, and the kinds that cannot."""

    points: tuple[LatencyPoint, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def kinds(self) -> tuple[ScheduleKind, ...]:
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
        return [list(run) for _, run in groupby(self.rows, key=lambda row: row.best.schedule.kind)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def kind_fronts(
    cluster: ClusterSpec,
    shape: ModelShape,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> KindFronts:
    """The fronts of the kinds asked for, each with its own time limit; raises where no kind can be
    had.
    """
    points: list[LatencyPoint] = []
    errors: dict[ScheduleKind, InfeasibleError] = {}
    for kind in request.kinds:
        own = replace(request, kinds=(kind,))
        try:
            points += latency_front(cluster, shape, own, options, clock)
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
            f"its decode steps wait for no prefill, where {other.kind.upper()} prefills "
            f"{other.prefill_requests:,} requests after every {other.decode_steps:,} steps"
        )
    more = f"{best.decode_requests:,} requests decode at a time, {other.decode_requests:,} with"
    if best.decode_requests > other.decode_requests:
        room = "one copy of the layers leaves room: " if other.divides != best.divides else ""
        return f"{room}{more} {other.kind.upper()}"
    if not best.divides:
        return f"all devices serve either phase, where {other.kind.upper()} has some for each alone"
    return (
        f"its sides take more equally long than those of {other.kind.upper()}, "
        f"with {best.decode_requests:,} requests that decode at a time"
    )
