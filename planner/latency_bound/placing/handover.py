"""Seconds in which keys and values go from stages that prefill to stages that decode."""

from __future__ import annotations

from planner.cluster.device import Device
from planner.costs.communication import handover_terms
from planner.latency_bound.placing.placement import Placement


def handover_s_per_token(prefill: Placement, decode: Placement) -> float:
    """Seconds for a token of a prompt: copied to the hosts of all stages that prefill at once, sent
    to other nodes layer by layer, and copied to the stages that decode.
    """
    cluster = prefill.costs.cluster
    owners = _owners(prefill), _owners(decode)
    network_s = sum(
        handover_terms(cluster, sender, receiver)[1] * _token_bytes(prefill, sender)
        for sender, receiver in zip(*owners, strict=True)
    )
    return _slowest_copy_s(prefill) + network_s + _slowest_copy_s(decode)


def _owners(placement: Placement) -> list[Device]:
    """The device of each layer [L]."""
    bounds = placement.stages.first_layer
    return [
        device
        for j, device in enumerate(placement.devices)
        for _ in range(bounds[j], bounds[j + 1])
    ]


def _slowest_copy_s(placement: Placement) -> float:
    """Seconds of a token's copy between devices and hosts, where it takes longest; the ranks of a
    group copy theirs at once.
    """
    bounds = placement.stages.first_layer
    return max(
        (bounds[j + 1] - bounds[j])
        * _token_bytes(placement, device)
        / device.degree
        / device.host_link_bytes_per_s
        for j, device in enumerate(placement.devices)
    )


def _token_bytes(placement: Placement, device: Device) -> float:
    """Bytes of a token's keys and values in a layer, of all ranks of a device."""
    costs = placement.costs
    return device.degree * costs.kv_bytes_per_layer(device) / costs.workload.kv_tokens
