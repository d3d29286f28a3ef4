"""Checking before a run what would crash or hang it: devices, kernels and bytes of every stage. The
digest refuses edited files (`planner.plan.file`); here are those without one, of earlier versions,
and bytes of another version's memory model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import attrgetter

from planner.adapters import with_adapters
from planner.cluster.device import Device
from planner.costs.communication import cache_tensors
from planner.costs.hosting import host_bytes, host_memories
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    memory_with_layers,
    state_bytes,
)
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.plan.spec import PlanSpec, StagePlan, all_stages
from quant.backends.table import backend_name
from quant.common.errors import InfeasibleError, SpecError
from quant.scheme import FULL_BITS

_host_bytes = attrgetter("host_bytes")

Derived = tuple[str, object, object, str]
"""A field, what stands there, what was computed, and from what that follows."""


def check_plan(plan: PlanSpec, shape: ModelShape | None, source: str = "plan") -> None:
    """Compute again what follows from workload, micro-batches, devices and layers; without `shape`,
    bytes are only added up. SpecError names the first field that differs, and the remedy.
    """
    if shape is not None and plan.adapters is not None:
        kinds = len(shape.kind_shapes)
        _refuse_first([("adapters.ranks", len(plan.adapters.ranks), kinds, "its kinds")], source)
        shape = with_adapters(shape, plan.adapters.of_kinds)
    if shape is not None:
        shape = shape.with_all(head_bits=plan.head_bits)
    for stage in plan.stages:
        _refuse_first(_device_fields(plan, stage, source), source)
    _refuse_first(_origin(plan, source), source)
    for stage in plan.stages:
        where = f"stages.{stage.index}.memory_bytes"
        found, offered = stage.memory_bytes, stage.memory_limit_bytes
        if found > offered:
            raise SpecError(
                f"{source}: field {where}: {found} where {stage.device} offers {offered}; plan "
                "again with llmpq plan, with fewer bits or a smaller batch"
            )
        if shape is not None:
            _check_joined(stage, shape, source)
            _refuse_first(_kernels_and_bytes(plan, stage, shape), source)
        _refuse_first([(where, found, stage.memory.total, "its parts")], source)


def _check_joined(stage: StagePlan, shape: ModelShape, source: str) -> None:
    """Refuse a cut between a layer and one that reads its keys and values."""
    first = stage.layers.start
    if first in shape.joined:
        raise SpecError(
            f"{source}: field stages.{stage.index}: its first layer, {first}, must be on the stage "
            f"of layer {first - 1}: one of these layers reads the keys and values of an earlier "
            "one; plan again with llmpq plan"
        )


def _refuse_first(fields: Iterator[Derived] | list[Derived], source: str) -> None:
    for field, found, computed, why in fields:
        if found != computed:
            raise SpecError(
                f"{source}: field {field}: {found!r:.80} where {why} make it {computed!r:.80}; the "
                "file was changed, or made by another version of llmpq: plan again with llmpq plan"
            )


def _device_fields(plan: PlanSpec, stage: StagePlan, source: str) -> Iterator[Derived]:
    where = f"stages.{stage.index}"
    try:
        accelerator = stage.kind
        device = _device(plan, stage)
        device.compute_dtype(stage.dtype)
    except SpecError as error:
        raise SpecError(f"{source}: field {where}: {error}") from error
    yield f"{where}.accelerator", stage.accelerator, accelerator.name, "its aliases"
    names = tuple(each.name for each in device.members)
    yield f"{where}.device", stage.device, names[0], "node, accelerator and number"
    yield f"{where}.devices", stage.device_names, names, "its node and type"
    if stage.custom_resource is not None:  # Ray would wait for any other one
        why = "resources that the planner knows (the accelerator's name, or null)"
        yield f"{where}.custom_resource", stage.custom_resource, stage.accelerator, why
    if not accelerator.is_cpu:
        offered, most = device.memory_bytes, accelerator.nominal_memory_bytes
        why = f"the {most} bytes of a {accelerator.name}"
        yield f"{where}.memory_limit_bytes", offered, min(offered, most), why


def _origin(plan: PlanSpec, source: str) -> Iterator[Derived]:
    if plan.origin is None:
        return
    try:
        cluster = plan.origin.cluster_spec()
    except (SpecError, InfeasibleError) as error:
        raise SpecError(f"{source}: field origin: {error}") from error
    for node, held in host_memories(cluster.devices).items():
        own = [stage for stage in all_stages(plan) if stage.node == node]
        if (taken := sum(stage.host_bytes for stage in own)) > held:
            raise SpecError(
                f"{source}: field stages.{max(own, key=_host_bytes).index}.host_bytes: stages on "
                f"node {node} keep {taken} bytes in its host's memory, where they have {held}; "
                "plan again with llmpq plan, with fewer bits or more host_memory_gib"
            )
    used = (name for stage in all_stages(plan) for name in stage.device_names)
    here = sorted([*used, *plan.unused_devices])
    names = sorted(device.name for device in cluster.devices)
    yield "stages and unused_devices", here, names, "origin.cluster without the lost devices"


def _device(plan: PlanSpec, stage: StagePlan) -> Device:
    accelerator = stage.kind
    numbers = [name.rpartition(":")[2] for name in stage.device_names]
    indices = [int(each) if each.isdecimal() and len(each) <= 9 else 0 for each in numbers]
    device = Device(
        accelerator=accelerator,
        node=stage.node,
        index=indices[0],
        memory_bytes=stage.memory_limit_bytes + stage.memory_margin_bytes,
        link_bytes_per_s=accelerator.link_bytes_per_s,
        threads=stage.threads if accelerator.is_cpu else None,
        custom_resource=stage.custom_resource,
        emulated=stage.emulated,
        stand_in=plan.stand_in is not None,
    )
    if not stage.devices:
        return device
    return replace(device, ranks=tuple(replace(device, index=index) for index in indices))


def _kernels_and_bytes(plan: PlanSpec, stage: StagePlan, shape: ModelShape) -> list[Derived]:
    """Kernel and bytes of each bitwidth; quantized checkpoints run with their original's plan."""
    found = list(_fields_of(plan, stage, shape))
    if shape.stored is None or all(one == other for _, one, other, _ in found):
        return found
    return list(_fields_of(plan, stage, shape.plain))


def _fields_of(plan: PlanSpec, stage: StagePlan, shape: ModelShape) -> Iterator[Derived]:
    device, is_stored = _device(plan, stage), shape.stored is not None
    rows = plan.micro_batches.decode
    backends = {
        bits: backend_name(device.processor, bits, stage.dtype, is_stored, rows)
        for bits in {
            *(each.bits for each in stage.choices),
            *(each.expert_bits for each in stage.choices if not each.on_host),
        }
    }
    why = "bitwidths, device, compute type and decode micro-batch"
    yield f"stages.{stage.index}.backends", dict(stage.backends), backends, why
    work = _stage_work(plan, stage, shape)
    computed = _stage_memory(plan, stage, device, work)
    if {*stage.bitwidths, *stage.expert_bitwidths} == {FULL_BITS}:
        # Nothing is kept for other kernels where no other bitwidth was allowed.
        plain = _stage_memory(plan, stage, device, replace(work, quantized=False))
        computed = plain if stage.memory == plain else computed
    why = "workload, micro-batches, layers and bitwidths"
    hosted = host_bytes(shape, stage.layers, stage.choices, stage.dtype)
    yield f"stages.{stage.index}.host_bytes", stage.host_bytes, hosted, why
    for part, found in asdict(stage.memory).items():
        yield f"stages.{stage.index}.memory.{part}", found, getattr(computed, part), why
    states = state_bytes(work, stage.layers)
    yield f"stages.{stage.index}.state_bytes", stage.state_bytes, states, "its layers"
    if stage.cache_tensors:
        tensors = cache_tensors(plan.kv_bits, [shape.layer(i) for i in stage.layers])
        yield f"stages.{stage.index}.cache_tensors", stage.cache_tensors, tensors, "its layers"


def _stage_work(plan: PlanSpec, stage: StagePlan, shape: ModelShape) -> StageWork:
    return StageWork(
        largest_rank_shape(shape, stage.degree),
        plan.workload,
        plan.micro_batches,
        stage.dtype,
        kv_bits=plan.kv_bits,
        mixed=plan.policy.mixed_requests,
        vocabulary=shape.vocab_size,
    )


def _stage_memory(plan: PlanSpec, stage: StagePlan, device: Device, work: StageWork) -> StageMemory:
    ends = StageEnds.of(stage.index, len(plan.stages), plan.head_on_first)
    fixed = fixed_stage_memory(work, device, ends)
    return memory_with_layers(work, device, stage.layers, stage.choices, fixed)
