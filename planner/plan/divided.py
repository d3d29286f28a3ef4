"""Plans whose schedule divides the phases: some stages prefill, others decode; links between."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.costs.communication import handover_terms
from planner.plan.spec import PlanSpec, StagePlan
from quant.common.errors import InfeasibleError, SpecError


def parts_of(plan: PlanSpec) -> tuple[PlanSpec, ...]:
    """The plans of stages that prefill and that decode, or `plan`; both have the origin of the
    whole.
    """
    prefills = plan.prefill_plan
    return (plan,) if prefills is None else (replace(prefills, origin=plan.origin), plan)


def all_stages(plan: PlanSpec) -> tuple[StagePlan, ...]:
    stages = [stage for part in parts_of(plan) for stage in part.stages]
    return tuple(replace(stage, index=number) for number, stage in enumerate(stages))


def undivided(plan: PlanSpec) -> PlanSpec:
    """Make one plan of all stages, to show and not to run: layers come twice."""
    prefills = plan.prefill_plan
    if prefills is None:
        return plan
    predicted = replace(
        plan.predicted,
        busy_share=prefills.predicted.busy_share + plan.predicted.busy_share,
        prefill_bottleneck=prefills.predicted.prefill_bottleneck,
        decode_bottleneck=len(prefills.stages) + plan.predicted.decode_bottleneck,
    )
    return replace(plan, stages=all_stages(plan), predicted=predicted, prefill_plan=None)


@dataclass(frozen=True)
class HandoverLink:
    """Seconds of a message, and of every token in it, from the host of one stage to another's."""

    latency_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.token_s

    def beside(self, other: HandoverLink) -> HandoverLink:
        """Both over one network link, one after the other."""
        return HandoverLink(max(self.latency_s, other.latency_s), self.token_s + other.token_s)


def handover_link(
    plan: PlanSpec, prefill: PlanSpec, pair: tuple[StagePlan, StagePlan], layers: int
) -> HandoverLink | None:
    """The link for `layers` of a `pair` (a stage of `prefill`, one of `plan`); None where either is
    real, times are off, both are on a node, or the cluster is unknown.
    """
    source, target = pair
    if not (source.emulated and target.emulated and plan.time_scale) or plan.origin is None:
        return None
    try:
        cluster = plan.origin.cluster_spec()
    except (SpecError, InfeasibleError):
        return None
    devices = {device.name: device for device in cluster.devices}
    if source.device not in devices or target.device not in devices:
        return None
    latency_s, byte_s = handover_terms(cluster, devices[source.device], devices[target.device])
    held_bytes = source.degree * source.memory.kv_cache / prefill.workload.kv_tokens
    token_s = byte_s * held_bytes * layers / len(source.layers)
    if not latency_s + token_s:
        return None
    return HandoverLink(plan.time_scale * latency_s, plan.time_scale * token_s)
