"""Dividing a cluster into pipelines that together finish a job soonest, by decomposition: make-ups
are priced by the search for a plan each, an integer programme chooses among them, proven up to its
gap; what was not priced is bounded by the ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.fleet.division import Column, FleetDivision, divide, fleet_plans, place
from planner.fleet.fleet_spec import FleetRecord, FleetSpec, plan_devices
from planner.fleet.makeups import MakeUp, Pools, grouped_make_ups, make_ups
from planner.fleet.pricing import (
    Priced,
    Pricing,
    ceiling_tokens_per_s,
    device_tokens_per_s,
    simulate_fleet,
)
from planner.model.shape import ModelShape
from planner.optimiser.names import BASELINE_METHODS
from planner.options import AUTO, PlanOptions, quality_of
from planner.plan.file import PLAN_VERSION
from planner.planning_rules import BOUNDS
from planner.profiles.sensitivity import Omega
from planner.search.fitting import degrees_of, first_sets
from planner.search.qualities import SLOWER, TIE_BREAK, bits_by_quality
from planner.search.remedies import naming_remedies
from planner.search.request import PlanningRequest, costs_of, with_fitting_ends, with_heads
from planner.workload import Job, Workload
from quant.common.errors import DoesNotFitError, InfeasibleError, SpecError

PRICING_S, PRICING_S_PER_DEVICE = 5.0, 0.03
"""Seconds in which make-ups are priced for their speed: at least so many, and as many for every
device, as long as `search_time_limit` allows them."""

QUALITY_TIME = 0.4
"""The share of the time that is left for the quality that is wanted, once speeds are known."""

HIGH_WORTH = 4.0
"""How much more sensitivity counts for `high` than for `balanced`."""


@dataclass(frozen=True, eq=False)
class FleetRequest:
    """Pipelines of `shape` that share `job`; `number` None: as many as are best."""

    cluster: ClusterSpec
    shape: ModelShape
    source: str
    job: Job
    options: PlanOptions
    number: int | None = None


def find_fleet(request: FleetRequest, clock: Callable[[], float] = time.perf_counter) -> FleetSpec:
    _check(request)
    request = replace(request, job=with_heads(request.job, request.options))
    asked = PlanningRequest.of(request.cluster, request.shape, request.job, request.options)
    with naming_remedies(asked):
        return with_fitting_ends(
            asked,
            lambda each: _find(replace(request, options=each.options), *costs_of(each), clock),
        )


def number_of(replicas: int | str) -> int | None:
    if replicas == AUTO:
        return None
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise SpecError(f"replicas is {replicas!r}; give auto, or a whole number of at least 1")
    return replicas


def as_job(workload: Workload | Job) -> Job:
    if isinstance(workload, Job):
        return workload
    return Job.of_batch(workload)


def _check(request: FleetRequest) -> None:
    options, number = request.options, request.number
    devices = len(request.cluster.devices)
    if number is not None and not 1 <= number <= devices:
        raise SpecError(
            f"replicas is {number}, but cluster {request.cluster.name} has {devices} devices; give "
            f"auto or 1 to {devices}"
        )
    if options.method in BASELINE_METHODS:
        raise SpecError(f"method {options.method} makes one pipeline; leave replicas out")
    if options.policy == AUTO:
        raise SpecError("policy auto compares two plans of one pipeline; choose a policy")
    for name in (*BOUNDS, "max_request_latency_s", "in_flight"):
        if getattr(options, name) not in (None, AUTO):
            raise SpecError(
                f"{name} is of one pipeline, and replicas have one each; leave one of them out"
            )


def _find(
    request: FleetRequest, costs: CostModel, omega: Omega, clock: Callable[[], float]
) -> FleetSpec:
    began = clock()
    asked = request.options.tensor_parallel
    pools = Pools.of(request.cluster, 1 if asked == AUTO else int(asked))
    if not pools.pools:
        raise _refusal(costs)
    pricing = _pricing(request, costs, pools, began, clock)
    for make_up in _make_ups(request, pricing):
        pricing.price(make_up)
    if not pricing.priced:
        raise _refusal(costs)
    return _fleet(request, omega, pricing, *_chosen(request, pricing))


def _refusal(costs: CostModel) -> InfeasibleError:
    try:
        next(first_sets(costs))
    except DoesNotFitError as error:
        return error
    return InfeasibleError(
        f"{costs.shape.name} fits cluster {costs.cluster.name} as one pipeline, but none of the "
        "make-ups of a fleet holds it; leave replicas out"
    )


def _pricing(
    request: FleetRequest, costs: CostModel, pools: Pools, began: float, clock: Callable[[], float]
) -> Pricing:
    devices = len(request.cluster.devices)
    limit_s = max(PRICING_S, PRICING_S_PER_DEVICE * devices)
    limit_s = min(request.options.search_time_limit / (1 + QUALITY_TIME), limit_s)
    rates = [device_tokens_per_s(costs, request.job, kind) for kind in pools.kinds]
    total = sum(rate * pools.devices_of(kind) for kind, rate in enumerate(rates))
    shares = tuple(rate / total for rate in rates)
    return Pricing(costs, request.job, pools, shares, began, limit_s, clock)


def _make_ups(request: FleetRequest, pricing: Pricing) -> Iterator[MakeUp]:
    pools = pricing.pools
    degrees = degrees_of(pricing.costs) if request.options.tensor_parallel == AUTO else ()
    fastest = sorted(range(len(pools.kinds)), key=lambda kind: -pricing.shares[kind])
    for make_up in make_ups(pools, fastest, request.number, pricing.fits, pricing.speed):
        yield make_up
        yield from grouped_make_ups(make_up, degrees)


def _chosen(request: FleetRequest, pricing: Pricing) -> tuple[FleetDivision, list[Priced]]:
    fast, quality = _fastest(request, pricing), quality_of(request.options)
    worth = _worth(request, pricing, fast)
    if worth <= TIE_BREAK:
        return fast, pricing.priced
    pricing.limit_s *= 1 + QUALITY_TIME
    counts = zip(pricing.priced, fast.counts, strict=True)
    taken = {each.make_up for each, count in counts if count}
    known = sorted(pricing.priced, key=lambda each: (each.make_up not in taken, -each.per_device))
    every = pricing.costs.bits
    for bits in bits_by_quality(every) if quality else (every,):
        usable = pricing if bits == every else pricing.of_bits(bits)
        for make_up in chain([each.make_up for each in known], _make_ups(request, usable)):
            usable.price(make_up, worth)
        with suppress(InfeasibleError):
            speed = _tokens_per_s(usable.priced, _fastest(request, usable))
            least = (1 - SLOWER) * speed if quality == "high" else 0.0
            columns = _columns(usable.priced, worth / pricing.worst_sensitivity)
            found = divide(columns, pricing.pools.counts(), request.number, least * (1 - 1e-6))
            return found, usable.priced
    return fast, pricing.priced


def _fastest(request: FleetRequest, pricing: Pricing) -> FleetDivision:
    pools = pricing.pools.counts()
    try:
        return divide(_columns(pricing.priced, 0.0), pools, request.number)
    except InfeasibleError as error:
        alike = [Column(each.make_up, 1.0, 1.0) for each in pricing.priced]
        most = sum(divide(alike, pools).counts)
        raise InfeasibleError(
            f"replicas is {request.number}, but cluster {request.cluster.name} has devices for at "
            f"most {most} pipelines that hold {request.shape.name}; give auto or 1 to {most}"
        ) from error


def _worth(request: FleetRequest, pricing: Pricing, fast: FleetDivision) -> float:
    quality, worst = quality_of(request.options), pricing.worst_sensitivity
    if request.options.theta is not None:
        seconds = request.job.output_tokens / _tokens_per_s(pricing.priced, fast)
        return request.options.theta * worst / seconds
    mean = _sensitivity(pricing.priced, fast)
    if quality in (None, "fast") or mean <= 0:
        return 0.0
    return SLOWER * worst / mean * (HIGH_WORTH if quality == "high" else 1.0)


def _columns(priced: Sequence[Priced], worth: float) -> list[Column]:
    return [
        Column(p.make_up, p.tokens_per_s, p.tokens_per_s * (1 - worth * p.sensitivity))
        for p in priced
    ]


def _tokens_per_s(priced: Sequence[Priced], division: FleetDivision) -> float:
    pairs = zip(priced, division.counts, strict=False)
    return sum(count * each.tokens_per_s for each, count in pairs)


def _sensitivity(priced: Sequence[Priced], division: FleetDivision) -> float:
    pairs = zip(priced, division.counts, strict=False)
    total = sum(count * each.tokens_per_s * each.sensitivity for each, count in pairs)
    return total / _tokens_per_s(priced, division)


def _fleet(
    request: FleetRequest,
    omega: Omega,
    pricing: Pricing,
    division: FleetDivision,
    chosen: Sequence[Priced],
) -> FleetSpec:
    placed = place(division, [each.make_up for each in chosen], pricing.pools)
    cluster, job = request.cluster, request.job
    plans = tuple(fleet_plans(cluster, request.source, omega, chosen, placed))
    row_tokens = job.lengths.mean_output
    seconds = simulate_fleet(
        [(p.workload.global_batch, p.predicted.tokens_per_s / row_tokens) for p in plans], job
    )
    used = {name for plan in plans for name in plan_devices(plan)}
    return FleetSpec(
        version=PLAN_VERSION,
        cluster=cluster.name,
        replicas=plans,
        unused_devices=tuple(d.name for d in cluster.devices if d.name not in used),
        latency_s=seconds,
        tokens_per_s=job.output_tokens / seconds,
        record=FleetRecord(
            seconds=pricing.clock() - pricing.began_s,
            priced=len(pricing.priced),
            gap=division.gap,
            ceiling_tokens_per_s=ceiling_tokens_per_s(pricing.costs, job, cluster.devices),
        ),
    )
