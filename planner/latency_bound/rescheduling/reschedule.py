"""Another schedule for the stages of a plan whose requests have other lengths than were planned for
(ExeGPT section 7.6): layers and bitwidths stay where they are, so that the stages follow it while
they run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from planner.latency_bound.bounded_search import TOLERANCE
from planner.latency_bound.branch_and_bound import Evaluations, Point, best_evaluated
from planner.latency_bound.placing.job import PROMPTS, sampled_lengths
from planner.latency_bound.placing.kind_search import CHECKS, Scheduled, kept_below, scheduled
from planner.latency_bound.plan import latency_forecast
from planner.latency_bound.refusals import bound_not_met
from planner.latency_bound.request import BoundRequest
from planner.latency_bound.rescheduling.placements import placements_of
from planner.latency_bound.rescheduling.running_stages import RunningStages, running_stages
from planner.length_distribution import RequestLengths
from planner.model.finding import ModelShape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule
from planner.workload import Job
from quant.common.errors import InfeasibleError, SpecError


def reschedule(
    plan: PlanSpec,
    shape: ModelShape,
    options: PlanOptions,
    lengths: RequestLengths,
) -> PlanSpec:
    """`plan` with the schedule of most throughput for requests of these `lengths`, of the same kind
    and within its bound and the memory of its stages; `options` are those of its origin, without
    files that are gone.

    Raises `SpecError` for a plan without a forecast of its schedule or without an origin,
    `BoundNotMetError` with the least feasible bound where no schedule keeps that of the plan, and
    `InfeasibleError` where not even one request has room.
    """
    now, forecast = plan.policy.followed_schedule, plan.latency
    if forecast is None or plan.origin is None:
        raise SpecError("only a plan with the forecast of its schedule and its origin has another")
    request = BoundRequest(
        lengths, forecast.bound_s, forecast.quantile, (now.kind,), forecast.prompts
    )
    job = _job(plan, request)
    placements = placements_of(plan, plan.origin.cluster_spec(), shape, options, job)
    found, evaluations = _best(running_stages(plan, placements, job, request), now)
    policy = PolicyOptions(BOUNDED, schedule=found.schedule)
    made = latency_forecast(found, request, evaluations)
    return replace(plan, policy=policy, latency=replace(made, prompts=forecast.prompts))


def _best(stages: RunningStages, now: RequestSchedule) -> tuple[Scheduled, int]:
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
        kind = f"{stages.kind}, with layers where they are"
        raise bound_not_met(request, found.latency_s, kind)
    return found, evaluations


def _searched(stages: RunningStages) -> tuple[Scheduled | None, int]:
    """The schedule that branch and bound finds; it goes by timelines, of which a second is enough
    for all controls where there is one placement.
    """
    request, evaluations = stages.request, 0
    point: Point | None = None
    for share, late in CHECKS:
        quantile, bound_s = 1 - late * (1 - request.quantile), share * request.limit_s
        evaluated = Evaluations(partial(stages.exact, quantile=quantile), bound_s)
        best = best_evaluated(stages.ranges, evaluated, bound_s, TOLERANCE)
        evaluations += evaluated.count
        if best is None:
            break
        point, found = best.point, _scheduled(stages, best.point)
        if found.latency_s <= request.limit_s:
            return found, evaluations
    if point is None:
        return None, evaluations
    kept = kept_below(stages, point, request.limit_s, lambda _, each: _scheduled(stages, each))
    return kept, evaluations


def _least(stages: RunningStages) -> Scheduled:
    """The schedule with the least latency; InfeasibleError where not even that has room."""
    found = stages.schedule(_least_point(stages))
    if not stages.has_room(found):
        raise InfeasibleError("the token slots of the stages have no room for the longer requests")
    return _scheduled(stages, _least_point(stages))


def _least_point(stages: RunningStages) -> Point:
    return tuple(each[0] for each in stages.ranges)


def _scheduled(stages: RunningStages, point: Point) -> Scheduled:
    schedule = stages.schedule(point)
    return scheduled(stages, schedule, stages.request.quantile, stages.job.prompts)


def _job(plan: PlanSpec, request: BoundRequest) -> Job:
    """The job of the request's lengths; each reserves as many new tokens as when it was planned."""
    lengths = sampled_lengths(request.lengths)
    limit = max(plan.workload.new_tokens, lengths.longest_output)
    return Job(request.prompts or PROMPTS, replace(lengths, output_limit=limit))
