"""Throughput against the bound on latency, as far as either can be had."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster.spec import ClusterSpec
from planner.latency_bound.bounded_search import BoundedSearch
from planner.latency_bound.placing.job import job_of
from planner.latency_bound.placing.kind_search import Scheduled
from planner.latency_bound.refusals import NoScheduleError, nothing_fits
from planner.latency_bound.request import BoundRequest
from planner.latency_bound.search import bounded_options
from planner.model.finding import ModelShape
from planner.options import AUTO, PlanOptions
from planner.scheduling import RequestSchedule
from planner.search.remedies import PlanningRequest, naming_remedies
from planner.search.search import REMEDY_PLANNER, costs_of, with_fitting_cache

POINTS = 8


@dataclass(frozen=True)
class LatencyPoint:
    """The best schedule within a bound: requests and tokens per second, and the latency that it
    takes of the bound.
    """

    bound_s: float
    schedule: RequestSchedule
    requests_per_s: float
    tokens_per_s: float
    latency_s: float


def latency_front(
    cluster: ClusterSpec,
    shape: ModelShape,
    source: str,
    request: BoundRequest,
    options: PlanOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LatencyPoint, ...]:
    """Points of ascending bounds and throughput, from the least feasible bound to that beyond
    which throughput does not grow; errors as of `planner.latency_bound.search.find_bounded_plan`,
    but that the request's own bound is left aside.
    """
    planned = PlanningRequest.of(cluster, shape, job_of(request), bounded_options(options))

    def trace(chosen: PlanOptions) -> tuple[LatencyPoint, ...]:
        return _front(replace(planned, options=chosen), request, clock)

    named = naming_remedies(planned, REMEDY_PLANNER) if "rra" in request.kinds else nullcontext()
    with named:
        if planned.options.kv_bits == AUTO:
            return with_fitting_cache(planned.options, trace)
        return trace(planned.options)


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
    bounds = np.geomspace(least.latency_s, fastest.latency_s, POINTS)
    found = list(_points(search, request, bounds[:-1].tolist()))
    return _ascending([*found, _point(float(bounds[-1]), fastest, request)])


def _points(
    search: BoundedSearch, request: BoundRequest, bounds: list[float]
) -> Iterator[LatencyPoint]:
    """Yield the best schedule within each bound that can be kept."""
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
    """The points with more throughput than all of lower bounds."""
    kept: list[LatencyPoint] = []
    for point in sorted(points, key=lambda each: each.bound_s):
        if not kept or point.requests_per_s > kept[-1].requests_per_s:
            kept.append(point)
    return tuple(kept)
