"""Copies of keys and values: of requests and of heads that prompts share, in host memory, and from
prefill to decode stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import HostCopies, handover_terms, park_tokens_from
from planner.costs.stored_bytes import HEAD_SHARE, LEAST_HEAD_TOKENS, kept_of_requests
from planner.lengths import FloatArray
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec, StagePlan, parts_of
from planner.schedule.turns import WAITING
from planner.scheduling import RequestSchedule
from planner.workload import Workload
from quant.common.errors import InfeasibleError, SpecError
from quant.scheme import FULL_BITS

HOST_SHARE = 0.5
"""Share of a node's memory that its stages may park in: loading and Ray's object store need the
rest."""

MOVING = 1
"""Turns whose keys and values are on their way from stages that prefill to stages that decode."""

UNSTATED_BYTES = 4 * 2**30
"""Bytes of each device's host memory where the cluster file does not state any: what vLLM takes for
its swap space."""

PINNED_ROUNDING = 2
"""A block of host memory that is pinned for a GPU takes less than so many times the bytes that are
kept in it: torch rounds each up to a power of two."""


class Parking(NamedTuple):
    """Preempted requests of at least `tokens_from` tokens are parked (0: none)."""

    tokens_from: int
    most_tokens: int


def parking(plan: PlanSpec) -> Parking:
    longest = plan.workload.total_length
    copies = host_copies(plan)
    compute_s = [_compute_s(plan, stage, longest) for stage in plan.stages]
    least = park_tokens_from(copies, compute_s)
    most = min(plan.workload.kv_tokens, *_rooms(plan, copies, max(1, least), 1 - HEAD_SHARE))
    return Parking(least, most) if 0 < least <= most else Parking(0, 0)


def host_tokens(plan: PlanSpec) -> int:
    """Tokens whose keys and values have room in host memory on every stage, with the states of as
    many requests as have so many tokens in the KV cache.
    """
    workload = plan.workload
    mean = workload.kv_tokens / workload.global_batch
    return min(_rooms(plan, host_copies(plan), mean, 1 - HEAD_SHARE))


def head_tokens(plan: PlanSpec) -> int:
    """Tokens of heads that prompts share, with room in host memory on every stage: at most as many
    as the KV cache has.
    """
    rooms = _rooms(plan, host_copies(plan), LEAST_HEAD_TOKENS, HEAD_SHARE)
    return min(plan.workload.kv_tokens, *rooms)


def warned_of_heads(plan: PlanSpec) -> bool:
    """Whether copies of the planned heads have no room, of which a warning is given then."""
    wanted = min(plan.workload.heads.kept_tokens, plan.workload.kv_tokens)
    room = head_tokens(parts_of(plan)[0]) if wanted else 0
    if room >= wanted:
        return False
    warnings.warn(
        f"heads that prompts share have {wanted} tokens, but the hosts' memory has room for copies "
        f"of {room}; planned as if none were shared: state more host_memory_gib",
        stacklevel=2,
    )
    return True


def handed_over_tokens(schedule: RequestSchedule, stages: int, mean_prompt: float) -> float:
    """Prompt tokens in host memory or soon there: a turn a stage that prefills, those that wait or
    are on their way.
    """
    return (stages + WAITING + MOVING) * schedule.prefill_requests * mean_prompt


def warn_of_handover(plan: PlanSpec) -> None:
    """Warn where prompts that wait to decode have no room; forecasts are of hosts that have it."""
    if plan.prefill_plan is None:
        return
    schedule = plan.policy.followed_schedule
    stages = len(plan.prefill_plan.stages)
    wanted = round(handed_over_tokens(schedule, stages, schedule.mean_prompt_tokens))
    room = min(host_tokens(part) for part in parts_of(plan))
    if room < wanted:
        warnings.warn(
            f"prompts that wait to decode have {wanted:,} tokens, but the hosts' memory has room "
            f"for {room:,}, so that fewer requests/s may come than are planned: state more "
            "host_memory_gib",
            stacklevel=2,
        )


def _cluster(plan: PlanSpec) -> ClusterSpec | None:
    if plan.origin is None:
        return None
    try:
        return plan.origin.cluster_spec()
    except (SpecError, InfeasibleError):
        return None


def _devices(plan: PlanSpec) -> dict[str, Device]:
    cluster = _cluster(plan)
    return {} if cluster is None else {device.name: device for device in cluster.devices}


def host_copies(plan: PlanSpec) -> list[HostCopies]:
    """How each stage's cache goes to its host [stages], at the file's or datasheet's rate."""
    devices = _devices(plan)
    return [
        HostCopies(
            _token_bytes(plan, stage),
            stage.cache_tensors or 2 * len(stage.layers),  # which older files do not say
            devices.get(stage.device, stage.kind).host_link_bytes_per_s,
            stage.state_bytes,
        )
        for stage in plan.stages
    ]


def _token_bytes(plan: PlanSpec, stage: StagePlan) -> float:
    """Bytes of a token's keys and values on a stage, without what a request has at any length."""
    states = plan.workload.global_batch * stage.state_bytes
    return (stage.memory.kv_cache - states) / plan.workload.kv_tokens


def _compute_s(plan: PlanSpec, stage: StagePlan, longest: int) -> FloatArray:
    """Seconds that a prompt of 1 to `longest` tokens adds to a micro-batch `[longest]`."""
    tokens = np.arange(1, longest + 1, dtype=np.float64)
    times = stage.modelled
    if times is None:
        prompt = plan.workload.heads.computed(plan.workload.prompt_length)
        return tokens * (stage.prefill_s / (plan.micro_batches.prefill * prompt))
    curve = times.prefill[0]
    whole_s = curve.seconds_at(tokens) / curve.requests
    return np.maximum(0.0, whole_s - times.decode[0].seconds[0])


def _rooms(
    plan: PlanSpec, copies: Sequence[HostCopies], request_tokens: float, share: float
) -> list[int]:
    """Host tokens by stage, of requests of at least `request_tokens`, in that share of the room; a
    CPU's is what its limit leaves.
    """
    devices = _devices(plan)
    held = [each.kv_bytes_per_token + each.state_bytes / request_tokens for each in copies]
    stages = [(stage, own) for stage, own in zip(plan.stages, held, strict=True) if own]
    on_node: dict[str, float] = {}
    for stage, own in stages:
        on_node[stage.node] = on_node.get(stage.node, 0.0) + own
    rooms = []
    for stage, own in stages:
        host = devices[stage.device].host_memory_bytes if stage.device in devices else None
        if stage.kind.is_cpu:
            left, per_token = stage.memory_limit_bytes - stage.memory_bytes, own
        elif host is not None:
            experts = sum(each.host_bytes for each in plan.stages if each.node == stage.node)
            free = max(0, host - experts)
            left, per_token = round(HOST_SHARE * free), PINNED_ROUNDING * on_node[stage.node]
        else:
            left, per_token = UNSTATED_BYTES, PINNED_ROUNDING * own
        rooms.append(max(0, int(share * left / per_token)))
    return rooms


@dataclass(frozen=True)
class HandoverLink:
    """Seconds of a message, and of each token and request in it, from host to host."""

    latency_s: float
    token_s: float
    request_s: float = 0.0

    def seconds(self, tokens: int, requests: int) -> float:
        return self.latency_s + tokens * self.token_s + requests * self.request_s

    def beside(self, other: HandoverLink) -> HandoverLink:
        """Both over one network link, one after the other."""
        return HandoverLink(
            max(self.latency_s, other.latency_s),
            self.token_s + other.token_s,
            self.request_s + other.request_s,
        )


def handover_link(
    plan: PlanSpec,
    prefill: PlanSpec,
    pair: tuple[StagePlan, StagePlan],
    shares: tuple[float, float],
) -> HandoverLink | None:
    """The link of a `pair` (a stage of `prefill`, one of `plan`) for these `shares` of what the
    first keeps of a token and of a request; None where either is real, times are off, both are on a
    node, or the cluster is unknown.
    """
    source, target = pair
    cluster, devices = _cluster(plan), _devices(plan)
    if cluster is None or not (source.emulated and target.emulated and plan.time_scale):
        return None
    if source.device not in devices or target.device not in devices:
        return None
    latency_s, byte_s = handover_terms(cluster, devices[source.device], devices[target.device])
    token_s, request_s = (
        byte_s * source.degree * held_bytes * share
        for held_bytes, share in zip(
            (_token_bytes(prefill, source), source.state_bytes), shares, strict=True
        )
    )
    if not latency_s + token_s + request_s:
        return None
    return HandoverLink(*(plan.time_scale * each for each in (latency_s, token_s, request_s)))


def kept_shares(
    workload: Workload, shape: ModelShape, layers: range, held: range
) -> tuple[float, float]:
    """The shares of `layers` in what all that are `held` keep of a token and of a request."""

    kinds = [kept_of_requests(each, workload, FULL_BITS, "float32") for each in shape.kind_shapes]

    def share(place: int) -> float:
        own, whole = (
            sum(kinds[shape.kind_of_layer[layer]][place] for layer in part)
            for part in (layers, held)
        )
        return own / whole if whole else 0.0

    return share(0), share(1)
