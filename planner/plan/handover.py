"""How long keys and values of a prompt take from a stage that prefills to one that decodes."""

from __future__ import annotations

from dataclasses import dataclass

from planner.costs.communication import handover_terms
from planner.plan.spec import PlanSpec, StagePlan
from quant.common.errors import InfeasibleError, SpecError


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
