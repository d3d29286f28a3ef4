"""Another schedule for the stages of a plan whose requests have other lengths than were planned for
(ExeGPT section 7.6): layers and bitwidths stay where they are, so that the stages follow it while
they run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.cluster.groups import grouped_cluster
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.latency_bound.bounded_plan import latency_forecast
from planner.latency_bound.bounded_search import bound_not_met
from planner.latency_bound.judged import Judge, Scheduled
from planner.latency_bound.placed_layers import PhaseDivision, PlacedLayers
from planner.latency_bound.rra import RraSpace
from planner.latency_bound.schedules import PROMPTS, BoundRequest, most_in_group, sampled_lengths
from planner.latency_bound.waa import WaaSpace
from planner.lengths import RequestLengths
from planner.model.shape import ModelShape
from planner.optimiser.assignment import Assignment
from planner.options import AUTO, PlanOptions
from planner.plan.builder import Solution
from planner.plan.kv_copies import handed_over_tokens, host_tokens
from planner.plan.spec import PlanSpec, parts_of
from planner.scheduling import BOUNDED, PolicyOptions, RequestSchedule
from planner.search.request import PlanningRequest, costs_of
from planner.workload import Job
from quant.common.errors import InfeasibleError, SpecError

SAMPLING_ERROR = 0.03
"""By which the mean prompt of a few hundred rows may be off. Where token slots are short, turns are
smaller; a tenth of them is in use only while groups are larger than in the mean."""


@dataclass(frozen=True)
class RunningSizes:
    """The sizes of stages: the most requests in flight and in one decode micro-batch, the token
    slots that requests may reserve, the requests of a prefill micro-batch, and the tokens of
    prompts that have room in host memory, where keys and values are handed over (else 0).
    """

    in_flight: int
    decode_micro_batch: int
    reservable_tokens: int
    prefill_micro_batch: int
    host_tokens: int = 0

    @classmethod
    def of(cls, plan: PlanSpec) -> RunningSizes:
        now, workload = plan.policy.followed_schedule, plan.workload
        in_flight = max(workload.global_batch, now.most_in_flight)
        in_group = max(plan.micro_batches.decode, most_in_group(now))
        prefills = plan.prefill_plan
        if prefills is None:
            return cls(in_flight, in_group, workload.reservable_tokens, now.prefill_micro_batch)
        host = min(host_tokens(part) for part in parts_of(plan))
        return cls(
            in_flight,
            in_group,
            workload.reservable_tokens,
            prefills.micro_batches.prefill,
            max(host, int(handed_over_tokens(now, len(prefills.stages), now.mean_prompt_tokens))),
        )

    def have_room(self, stages: RunningSpace, schedule: RequestSchedule) -> bool:
        """Whether requests fit where they decode."""
        in_flight = schedule.most_in_flight
        if in_flight > self.in_flight or most_in_group(schedule) > self.decode_micro_batch:
            return False
        # independent lengths, and all new tokens
        each = stages.request.lengths.prompts.mean + stages.job.lengths.longest_output
        return in_flight * each <= (1 + SAMPLING_ERROR) * self.reservable_tokens


def placements_of(
    plan: PlanSpec, cluster: ClusterSpec, shape: ModelShape, options: PlanOptions, job: Job
) -> tuple[PlacedLayers, ...]:
    """The placement of all stages; or of those that decode, then of those that prefill."""
    options = replace(
        options,
        policy=BOUNDED,
        group=1,
        in_flight=AUTO,
        kv_bits=plan.kv_bits,
        max_omega=None,
        head_bits=(plan.head_bits,),
    )
    costs = costs_of(PlanningRequest.of(cluster, shape, job, options))[0]
    prefills = () if plan.prefill_plan is None else (plan.prefill_plan,)
    return tuple(_placement(part, costs) for part in (plan, *prefills))


def _placement(plan: PlanSpec, costs: CostModel) -> PlacedLayers:
    devices = grouped_cluster(costs.cluster, [stage.device_names for stage in plan.stages]).devices
    bits = tuple(costs.options.bits.index(b) for stage in plan.stages for b in stage.bitwidths)
    ends = (stage.layers.stop for stage in plan.stages)
    assignment = Assignment((0, *ends), bits, 0.0, 0.0, "as it is", 0.0)
    solution = Solution(
        workload=plan.workload,
        devices=devices,
        sizes=plan.micro_batches,
        assignment=assignment,
        head_on_first=plan.head_on_first,
    )
    return PlacedLayers(costs, solution)


@dataclass(frozen=True, eq=False, kw_only=True)
class RunningRra(RraSpace):
    sizes: RunningSizes

    def _reservable_tokens(self, schedule: RequestSchedule) -> int:
        return self.sizes.reservable_tokens

    def _turns(self, newcomers: int, groups: int) -> tuple[int, ...]:
        return (self.sizes.prefill_micro_batch,)

    def _has_room(self, schedule: RequestSchedule, prefill_micro_batch: int) -> bool:
        return self.sizes.have_room(self, schedule)


@dataclass(frozen=True, eq=False, kw_only=True)
class RunningWaa(WaaSpace):
    """Stages that prefill or decode; prefills may become smaller, and groups more, where room is
    short.
    """

    sizes: RunningSizes

    def _reservable_tokens(self, schedule: RequestSchedule) -> int:
        return self.sizes.reservable_tokens

    def _of(self, requests: int) -> RequestSchedule:
        fastest = super()._of(requests)
        least = -(-fastest.most_in_flight // self.sizes.decode_micro_batch)
        groups = min(requests, max(least, fastest.decode_micro_batches))
        return replace(fastest, decode_micro_batches=groups)

    def _decodes(self, schedule: RequestSchedule) -> bool:
        return self.sizes.have_room(self, schedule)

    def _prefills(self, schedule: RequestSchedule) -> bool:
        if schedule.prefill_micro_batch > self.sizes.prefill_micro_batch:
            return False
        stages, mean = len(self.prefill.devices), self.request.lengths.prompts.mean
        tokens = handed_over_tokens(schedule, stages, mean)
        return schedule.prefill_requests == 1 or tokens <= self.sizes.host_tokens


RunningSpace = RunningRra | RunningWaa
"""Stages that run, and the requests that were measured."""


def running_stages(
    plan: PlanSpec, placements: tuple[PlacedLayers, ...], job: Job, request: BoundRequest
) -> RunningSpace:
    sizes, (placement, *prefilling) = RunningSizes.of(plan), placements
    if not prefilling:
        return RunningRra(placement, job, request, sizes=sizes)
    (prefill,) = prefilling
    division = PhaseDivision(prefill.devices, placement.devices)
    kind = plan.policy.followed_schedule.kind
    return RunningWaa(kind, division, placement, prefill, job, request, sizes=sizes)


def reschedule(
    plan: PlanSpec,
    shape: ModelShape,
    options: PlanOptions,
    lengths: RequestLengths,
    margin: float | None = None,
) -> PlanSpec:
    """`plan` with the schedule of most throughput for `lengths`, of its kind, bound and memory;
    `options` are those of its origin, `margin` is the plan's where None. `SpecError` for a plan
    without forecast or origin, `BoundNotMetError` with the least feasible bound, `InfeasibleError`
    where not even one request has room.
    """
    now, forecast = plan.policy.followed_schedule, plan.latency
    if forecast is None or plan.origin is None:
        raise SpecError("only a plan with the forecast of its schedule and its origin has another")
    request = BoundRequest(
        *(lengths, forecast.bound_s, forecast.quantile, (now.kind,), forecast.prompts),
        margin=forecast.margin if margin is None else margin,
    )
    measured = sampled_lengths(lengths)
    limit = max(plan.workload.new_tokens, measured.longest_output)
    limited = replace(measured, output_limit=limit)
    job = Job(request.prompts or PROMPTS, limited, heads=lengths.heads)
    placements = placements_of(plan, plan.origin.cluster_spec(), shape, options, job)
    found, evaluations = _best(running_stages(plan, placements, job, request), now)
    policy = PolicyOptions(BOUNDED, schedule=found.schedule)
    made = latency_forecast(found, evaluations)
    return replace(plan, policy=policy, latency=replace(made, prompts=forecast.prompts))


def _best(stages: RunningSpace, now: RequestSchedule) -> tuple[Scheduled, int]:
    """The best schedule, or the present one where as fast within the bound, and how many points
    were evaluated.
    """
    limit_s, judge = stages.request.limit_s, Judge()
    judge.look(stages, (stages.ranges,), limit_s)
    kept = list(judge.kept(limit_s))
    if stages.has_room(now):
        present = Scheduled.of(stages, now, limit_s)
        if present.latency_s <= limit_s:
            kept.insert(0, present)
    if kept:
        return min(kept, key=lambda each: each.seconds), judge.evaluations
    least = stages.schedule(tuple(each[0] for each in stages.ranges))
    if not stages.has_room(least):
        raise InfeasibleError("the token slots of the stages have no room for the longer requests")
    found = Scheduled.of(stages, least)
    if found.latency_s > limit_s:
        kind = f"{stages.kind}, with layers where they are"
        raise bound_not_met(stages.request, found.latency_s, kind)
    return found, judge.evaluations
