"""Another schedule for the stages of a plan whose requests have other lengths than were planned for
(ExeGPT section 7.6): layers and bitwidths stay where they are, so that the stages follow it while
they run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from planner.cluster.device import Device
from planner.cluster.groups import devices_of
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.bounded_search import TOLERANCE
from planner.latency_bound.branch_and_bound import Evaluations, best_evaluated
from planner.latency_bound.placing.job import PROMPTS, most_in_flight, sampled_lengths
from planner.latency_bound.placing.kind_search import CHECKS, Scheduled, scheduled
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
from planner.search.remedies import PlanningRequest
from planner.search.search import costs_of
from planner.workload import Job
from quant.common.errors import InfeasibleError, SpecError

SAMPLING_ERROR = 0.03
"""By which the mean prompt of a few hundred rows may be off. Where token slots are short, turns are
smaller; a tenth of them is in use only while groups are larger than in the mean."""


@dataclass(frozen=True)
class RunningSizes:
    """What stages that run have been given: the most requests in flight and in one decode
    micro-batch, the token slots that they may reserve, and the requests of a prefill micro-batch.
    """

    in_flight: int
    decode_micro_batch: int
    reservable_tokens: int
    prefill_micro_batch: int

    @classmethod
    def of(cls, plan: PlanSpec) -> RunningSizes:
        """The sizes of a plan's stages, which it keeps when its schedule becomes another."""
        now = plan.policy.followed_schedule
        in_group = plan.micro_batches.decode - 1  # a schedule's own limit may be one below the room
        return cls(
            max(plan.workload.global_batch, most_in_flight(now)),
            max(in_group, Turns.of(now).most),
            plan.workload.reservable_tokens,
            now.prefill_micro_batch,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _RunningStages(RraPlaced):
    """Stages that run: schedules have no room beyond their sizes, and prefills stay as they are."""

    sizes: RunningSizes

    def has_room(self, schedule: RequestSchedule) -> bool:
        """Whether the stages may follow a schedule as it is."""
        return self._has_room(schedule, self.sizes.prefill_micro_batch)

    def _turns(self, newcomers: int, groups: int) -> tuple[int, ...]:
        return (self.sizes.prefill_micro_batch,)

    def _has_room(self, schedule: RequestSchedule, prefill_micro_batch: int) -> bool:
        sizes, in_flight = self.sizes, most_in_flight(schedule)
        if in_flight > sizes.in_flight or Turns.of(schedule).most > sizes.decode_micro_batch:
            return False
        # Lengths are drawn apart from each other, and every request reserves all new tokens.
        reserved = self.request.lengths.prompts.mean + self.job.lengths.longest_output
        return in_flight * reserved <= (1 + SAMPLING_ERROR) * sizes.reservable_tokens


def reschedule(
    plan: PlanSpec,
    shape: ModelShape,
    options: PlanOptions,
    lengths: RequestLengths,
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
    found, evaluations = _best(stages, now)
    policy = PolicyOptions(BOUNDED, schedule=found.schedule)
    made = latency_forecast(found, request, evaluations)
    return replace(plan, policy=policy, latency=replace(made, prompts=forecast.prompts))


def _best(stages: _RunningStages, now: RequestSchedule) -> tuple[Scheduled, int]:
    """The best schedule, and how many points were evaluated: the one that timelines lead to, or the
    present one where that keeps the bound and is as fast.
    """
    request = stages.request
    found, evaluations = _searched(stages)
    if stages.has_room(now):
        present = scheduled(stages, now, request.quantile, stages.job.prompts)
        keeps = present.latency_s <= request.limit_s
        if keeps and (found is None or present.seconds <= found.seconds):
            found = present
    if found is None:
        found = _least(stages)
    if found.latency_s > request.limit_s:
        raise bound_not_met(request, found.latency_s, "rra, with layers where they are")
    return found, evaluations


def _searched(stages: _RunningStages) -> tuple[Scheduled | None, int]:
    """The schedule that branch and bound finds; it goes by timelines, of which a second is enough
    for all controls where there is one placement.
    """
    request, evaluations = stages.request, 0
    for share, late in CHECKS:
        quantile, bound_s = 1 - late * (1 - request.quantile), share * request.limit_s
        evaluated = Evaluations(partial(stages.exact, quantile=quantile), bound_s)
        best = best_evaluated(stages.ranges, evaluated, bound_s, TOLERANCE)
        evaluations += evaluated.count
        if best is None:
            break
        schedule = stages.schedule(best.point)
        found = scheduled(stages, schedule, request.quantile, stages.job.prompts)
        if found.latency_s <= request.limit_s:
            return found, evaluations
    return None, evaluations


def _least(stages: _RunningStages) -> Scheduled:
    """The schedule with the least latency; InfeasibleError where not even that has room."""
    low = tuple(each[0] for each in stages.ranges)
    schedule = stages.schedule(low)
    if not stages.has_room(schedule):
        raise InfeasibleError("the token slots of the stages have no room for the longer requests")
    return scheduled(stages, schedule, stages.request.quantile, stages.job.prompts)


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
