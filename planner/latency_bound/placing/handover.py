"""How keys and values go from where prompts are prefilled to where they are decoded."""

from __future__ import annotations

from collections import defaultdict

from planner.cluster.device import Device
from planner.costs.communication import handover_terms
from planner.costs.preemption import HostCopies, cache_tensors
from planner.latency_bound.placing.placement import Placement
from planner.latency_bound.steady_state.waa.handover import Handover, StageCopies


def handover_of(prefill: Placement, decode: Placement) -> Handover:
    """The handover between placements of all layers. Nodes send at once what they hold, each over
    its own link, and the slowest one counts.
    """
    cluster = prefill.costs.cluster
    message_s: dict[str, float] = defaultdict(float)
    token_s: dict[str, float] = defaultdict(float)
    for sender, receiver in zip(_owners(prefill), _owners(decode), strict=True):
        latency_s, byte_s = handover_terms(cluster, sender, receiver)
        message_s[sender.node] = max(message_s[sender.node], latency_s)
        token_s[sender.node] += byte_s * _token_bytes(prefill, sender)
    return Handover(
        _copies(prefill), _copies(decode), max(message_s.values()), max(token_s.values())
    )


def _owners(placement: Placement) -> list[Device]:
    """The device of each layer [L]."""
    counted = zip(placement.devices, placement.layer_counts, strict=True)
    return [device for device, layers in counted for _ in range(layers)]


def _copies(placement: Placement) -> StageCopies:
    """The copies of each stage; the ranks of a group copy theirs at once."""
    kv_bits = placement.costs.kv_bits
    return StageCopies.of(
        [
            HostCopies(
                layers * _token_bytes(placement, device) / device.degree,
                cache_tensors(kv_bits, layers),
                device.host_link_bytes_per_s,
            )
            for device, layers in zip(placement.devices, placement.layer_counts, strict=True)
        ]
    )


def _token_bytes(placement: Placement, device: Device) -> float:
    """Bytes of a token's keys and values in a layer, of all ranks of a device."""
    costs = placement.costs
    return device.degree * costs.kv_bytes_per_layer(device) / costs.workload.kv_tokens
