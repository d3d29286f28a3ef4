"""Another schedule for the stages of a plan whose requests have other lengths than were planned for
(ExeGPT section 7.6): layers and bitwidths stay where they are, so that the stages follow it while
they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from planner.cluster.device import Device
from planner.cluster.groups import devices_of
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.bounded_search import TOLERANCE
from planner.latency_bound.controls import rra_schedule
from planner.latency_bound.job import PROMPTS, most_in_flight, sampled_lengths
from planner.latency_bound.placing.kind_search import LEAST_LATE, KindSearch, Scheduled
from planner.latency_bound.placing.placed import Start
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.placing.rra import RraPlaced
from planner.latency_bound.plan import latency_forecast
from planner.latency_bound.refusals import bound_not_met
from planner.latency_bound.request import BoundRequest
from planner.length_distribution import RequestLengths
from planner.model.finding import ModelShape
from planner.optimiser.assignment import Assignment
from planner.options import AUTO, PlanOptions
from planner.plan.builder import Solution
from planner.plan.spec import PlanSpec
from planner.schedule.turns import Turns
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule
from planner.search.candidate_search import SearchTime
from planner.search.remedies import PlanningRequest
from planner.search.search import costs_of
from planner.workload import Job
from quant.common.errors import InfeasibleError, SpecError


@dataclass(frozen=True)
class RunningSizes:
    """What stages that run have been given: the most requests in flight and in one decode
    micro-batch, the token slots of the KV cache, and the requests of a prefill micro-batch.
    """

    in_flight: int
    decode_micro_batch: int
    kv_tokens: int
    prefill_micro_batch: int

    @classmethod
    def of(cls, plan: PlanSpec) -> RunningSizes:
        """The sizes of a plan's stages, which it keeps when its schedule becomes another."""
        now = plan.policy.followed_schedule
        in_group = plan.micro_batches.decode - 1  # a schedule's own limit may be one below the room
        return cls(
            max(plan.workload.global_batch, most_in_flight(now)),
            max(in_group, Turns.of(now).most),
            plan.workload.kv_tokens,
            now.prefill_micro_batch,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _RunningStages(RraPlaced):
    """Stages that run: schedules have no room beyond their sizes, and prefills stay as they are."""

    sizes: RunningSizes

    def near(self, schedule: RequestSchedule) -> Iterator[Start]:
        """Yield nothing: layers stay where they are."""
        return iter(())

    def as_now(self, now: RequestSchedule) -> Scheduled | None:
        """The controls that are followed now, with as many requests in flight as their turns bring
        of the new lengths; None where these have no room.
        """
        lengths, size = self.request.lengths, self.sizes.prefill_micro_batch
        groups, steps = now.decode_micro_batches, now.decode_steps
        schedule = rra_schedule(lengths, now.prefill_requests, steps, groups, size)
        if not self._has_room(schedule, size):
            return None
        timeline = self.timeline(schedule, self.request.quantile)
        seen = self.observed(schedule, ceil(LEAST_LATE / (1 - self.request.quantile)))
        latency_s = seen.latency_s(self.request.quantile)
        seconds = self.job.prompts / seen.requests_per_s
        return Scheduled(self, schedule, timeline, seen, latency_s, seconds)

    def _turns(self, newcomers: int, groups: int) -> tuple[int, ...]:
        return (self.sizes.prefill_micro_batch,)

    def _has_room(self, schedule: RequestSchedule, prefill_micro_batch: int) -> bool:
        sizes, in_flight = self.sizes, most_in_flight(schedule)
        if in_flight > sizes.in_flight or Turns.of(schedule).most > sizes.decode_micro_batch:
            return False
        workload = self.placement.costs.in_flight(self.job, in_flight)
        return workload.kv_tokens <= sizes.kv_tokens


@dataclass(frozen=True)
class _AsItIs:
    """Plans nothing: the one placement is that of the stages."""

    stages: _RunningStages
    begun: RequestSchedule

    def starts(self) -> Iterator[Start]:
        """Yield the schedule that is followed now."""
        yield Start(self.begun)

    def placed(self, start: Start, theta: float, limit_s: float) -> _RunningStages:
        """The stages as they are."""
        return self.stages


def reschedule(
    plan: PlanSpec,
    shape: ModelShape,
    options: PlanOptions,
    lengths: RequestLengths,
    clock: Callable[[], float] = time.perf_counter,
) -> PlanSpec:
    """`plan` with the schedule of most throughput for requests of these `lengths`, within its bound
    and the memory of its stages; `options` are those of its origin, without files that are gone.

    Raises `SpecError` for a plan without a schedule of kind `rra` or without an origin,
    `BoundNotMetError` with the least feasible bound where no schedule keeps that of the plan, and
    `InfeasibleError` where not even one request has room.
    """
    now, forecast = plan.policy.followed_schedule, plan.latency
    if now.divides or forecast is None or plan.origin is None:
        raise SpecError("only a plan with a schedule rra, its forecast and its origin has another")
    request = BoundRequest(
        lengths, forecast.bound_s, forecast.quantile, (now.kind,), forecast.prompts
    )
    job = _job(plan, request)
    placement = _placement(plan, plan.origin.cluster_spec(), shape, options, job)
    stages = _RunningStages(placement, job, request, sizes=RunningSizes.of(plan))
    search_time = SearchTime(options.search_time_limit, clock)
    search = KindSearch(_AsItIs(stages, now), job.prompts, request.quantile, search_time, TOLERANCE)
    found = _better(search.best(0.0, request.limit_s), stages.as_now(now), request.limit_s)
    if found is None:
        raise _refusal(search.least, request)
    policy = PolicyOptions(BOUNDED, schedule=found.schedule)
    made = latency_forecast(found, request, search.evaluations)
    return replace(plan, policy=policy, latency=replace(made, prompts=forecast.prompts))


def _job(plan: PlanSpec, request: BoundRequest) -> Job:
    """The job of the request's lengths; each reserves as many new tokens as when it was planned."""
    lengths = sampled_lengths(request.lengths)
    limit = max(plan.workload.new_tokens, lengths.longest_output)
    return Job(request.prompts or PROMPTS, replace(lengths, output_limit=limit))


def _placement(
    plan: PlanSpec, cluster: ClusterSpec, shape: ModelShape, options: PlanOptions, job: Job
) -> Placement:
    """The layers of the stages where they lie, at the costs that they were planned with."""
    options = replace(
        options, policy=BOUNDED, group=1, in_flight=AUTO, kv_bits=plan.kv_bits, max_omega=None
    )
    costs, _ = costs_of(PlanningRequest.of(cluster, shape, job, options))
    devices = devices_of(cluster, tuple(stage.device_names for stage in plan.stages))
    return Placement(costs, _solution(plan, costs, devices))


def _solution(plan: PlanSpec, costs: CostModel, devices: tuple[Device, ...]) -> Solution:
    bits = tuple(costs.options.bits.index(b) for stage in plan.stages for b in stage.bitwidths)
    ends = (stage.layers.stop for stage in plan.stages)
    assignment = Assignment((0, *ends), bits, 0.0, 0.0, "as it is", 0.0)
    return Solution(
        workload=plan.workload,
        devices=devices,
        sizes=plan.micro_batches,
        assignment=assignment,
        lower_bound=0.0,
        candidates=1,
        solved=0,
        seconds=0.0,
        head_on_first=plan.head_on_first,
    )


def _better(found: Scheduled | None, as_now: Scheduled | None, limit_s: float) -> Scheduled | None:
    """The one with the most throughput of those within the limit."""
    kept = (each for each in (found, as_now) if each is not None and each.latency_s <= limit_s)
    return min(kept, key=lambda each: each.seconds, default=None)


def _refusal(least: Scheduled | None, request: BoundRequest) -> InfeasibleError:
    if least is None:
        return InfeasibleError("the token slots of the stages have no room for the longer requests")
    return bound_not_met(request, least.latency_s, "rra, with layers where they are")
