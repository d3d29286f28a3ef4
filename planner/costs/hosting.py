"""Experts in the memory of a GPU's host: who multiplies there, in which type, and the bytes.

Devices of a node share its cores evenly, its memory as their stages need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from planner.cluster.accelerators import find_accelerator
from planner.cluster.device import Device
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from quant.backends.table import HOST_BACKENDS, rule_for
from quant.scheme import DTYPE_BYTES, Processor

HOST = "CPU"
"""The accelerator that a host is."""

HOST_THREADS = 8
"""Cores of a host whose number no cluster file states: those of the smallest machines that cloud
providers rent with one T4 and 30 GB and more have as many, or twice."""

COPY_S = 2e-5
"""Seconds of waiting for a copy to or from a host, beside its bytes: assumed."""

_CODE_BYTES, _FLOAT32_BYTES = 1, 4


def can_host(device: Device) -> bool:
    """Whether experts of a stage may lie in its host's memory."""
    stated = device.host_memory_bytes is not None
    return stated and not device.accelerator.is_cpu and device.degree == 1


def host_memories(devices: Iterable[Device]) -> dict[str, int]:
    """What stages on some devices of each node have of its memory together: a part for each of its
    GPUs, as others of them may be another pipeline's.
    """
    found = dict[str, int]()
    for device in devices:
        held = device.host_memory_bytes
        if held is not None and not device.accelerator.is_cpu:
            own = device.degree * (held // device.host_devices)
            found[device.node] = found.get(device.node, 0) + own
    return found


def host_threads(device: Device) -> int:
    return max(1, (device.host_threads or HOST_THREADS) // device.host_devices)


def host_dtype(dtype: str) -> str:
    """The type that the host computes in; float16 takes CPUs a hundred times as long."""
    return "float32" if dtype == "float32" else "bfloat16"


def host_cpu(device: Device) -> Device:
    """The device's share of its host as a device that multiplies."""
    return Device(
        accelerator=find_accelerator(HOST),
        node=device.node,
        index=0,
        memory_bytes=device.host_memory_bytes or 0,
        link_bytes_per_s=device.host_link_bytes_per_s,
        threads=host_threads(device),
    )


@cache
def experts_bytes(shape: ModelShape, bits: int, processor: Processor, dtype: str) -> int:
    """Bytes of all experts of a layer where the layer lies, without biases."""
    if shape.experts is None:
        return 0
    each = (
        rule_for(processor, own.stored_bits or bits, own, dtype).nbytes(own, dtype)
        for own in shape.at(bits).expert_linears
    )
    return shape.experts.count * sum(each)


@cache
def hosted_bytes(shape: ModelShape, bits: int, dtype: str) -> int:
    """Bytes of all experts of a layer in the host's memory; biases are counted on the device."""
    if shape.experts is None:
        return 0
    own = host_dtype(dtype)
    held = [(each.stored_bits or bits, each) for each in shape.at(bits).expert_linears]
    rules = [(rule_for(Processor(), b, x, own, HOST_BACKENDS.get(b)), x) for b, x in held]
    return shape.experts.count * sum(rule.nbytes(linear, own) for rule, linear in rules)


def streaming_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes on the device of one weight on its way and while it is restored, at any bitwidth."""
    largest = max(
        (each.parameters for kind in shape.kind_shapes for each in kind.expert_linears), default=0
    )
    element = DTYPE_BYTES[dtype]
    return largest * (max(element, _FLOAT32_BYTES) + _CODE_BYTES + _FLOAT32_BYTES + element)


def host_bytes(shape: ModelShape, layers: range, choices: Sequence[LayerChoice], dtype: str) -> int:
    """Bytes of the experts of a stage in its host's memory."""
    chosen = zip(layers, choices, strict=True)
    return sum(
        hosted_bytes(shape.layer(layer), choice.expert_bits, dtype)
        for layer, choice in chosen
        if choice.on_host
    )
