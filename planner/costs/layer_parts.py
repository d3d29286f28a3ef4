"""Bytes and seconds of layers whose experts have bits of their own, or lie in a host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.costs.hosting import experts_bytes, hosted_bytes, streaming_bytes
from planner.costs.memory import StageMemory, StageWork
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape


def chosen_bytes(shape: ModelShape, choice: LayerChoice, device: Device, dtype: str) -> int:
    """Bytes on the device of the weights of a layer of one kind."""
    whole = layer_weight_bytes(shape, choice.bits, device, dtype)
    if shape.experts is None or choice == LayerChoice.whole(choice.bits):
        return whole
    rest = whole - experts_bytes(shape, choice.bits, device.processor, dtype)
    if choice.on_host:
        return rest
    return rest + experts_bytes(shape, choice.expert_bits, device.processor, dtype)


def with_streaming(memory: StageMemory, shape: ModelShape, dtype: str) -> StageMemory:
    """The memory of a stage to which experts may come from its host."""
    return replace(memory, temporary=memory.temporary + streaming_bytes(shape, dtype))


def memory_with_layers(
    work: StageWork,
    device: Device,
    layers: range,
    choices: Sequence[LayerChoice],
    fixed: StageMemory,
) -> StageMemory:
    """Fill up `fixed` with these layers of the model and their KV cache."""
    shapes, kinds = work.shape.kind_shapes, work.shape.kind_of_layer[layers.start : layers.stop]
    held = [
        (chosen_bytes(shapes[kind], choice, device, work.dtype), kind)
        for kind, choice in zip(kinds, choices, strict=True)
    ]
    kept = [
        kv_cache_bytes_per_layer(own, work.workload, work.kv_bits, work.dtype) for own in shapes
    ]
    found = replace(
        fixed,
        weights=fixed.weights + sum(own for own, _ in held),
        kv_cache=fixed.kv_cache + sum(kept[kind] for _, kind in held),
    )
    hosted = any(choice.on_host for choice in choices)
    return with_streaming(found, work.shape, work.dtype) if hosted else found


def host_bytes(shape: ModelShape, layers: range, choices: Sequence[LayerChoice], dtype: str) -> int:
    """Bytes of the experts of a stage in its host's memory."""
    chosen = zip(layers, choices, strict=True)
    return sum(
        hosted_bytes(shape.layer(layer), choice.expert_bits, dtype)
        for layer, choice in chosen
        if choice.on_host
    )
