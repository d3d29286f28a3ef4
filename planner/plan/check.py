"""Checking a plan against what follows from its own figures: one that was edited by hand, damaged,
or computed by another version's memory model is refused before a device is touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from planner.cluster.described import entry_of
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    kv_cache_bytes_per_layer,
    stage_memory,
)
from planner.model.finding import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.optimiser.assignment import stage_times
from planner.optimiser.names import BATCH_OBJECTIVES, JOB_OBJECTIVE, Objective
from planner.optimiser.problem import AssignmentProblem
from planner.options import AUTO
from planner.plan.divided import all_stages
from planner.plan.job_forecast import JobForecast
from planner.plan.origin import PlanOrigin
from planner.plan.spec import PlanSpec, StagePlan
from quant.backends.selection import backend_name
from quant.common.errors import InfeasibleError, SpecError
from quant.scheme import FULL_BITS

_ROUNDING = 1e-6  # relative error of sums and quotients of seconds


@dataclass(frozen=True)
class Derived:
    """A field of a plan: its value there, the value computed, and from what (`why`) it follows."""

    field: str
    found: object
    computed: object
    why: str

    @property
    def agrees(self) -> bool:
        """Whether both values are the same; floats up to rounding."""
        if isinstance(self.found, float) and isinstance(self.computed, float):
            return math.isclose(self.found, self.computed, rel_tol=_ROUNDING)
        return self.found == self.computed


def check_plan(plan: PlanSpec, shape: ModelShape | None, source: str = "plan") -> None:
    """Compute again every field that follows from workload, micro-batches, devices and layers.

    `shape` is the planned model's; without it bytes are only added up. Raises `SpecError` naming
    `source`, the first field that differs, what stands there, what it should be, and the remedy.
    """
    _refuse_first(_devices(plan, source), source)
    _refuse_first(_origin(plan, source), source)
    for stage in plan.stages:
        if shape is not None:
            _refuse_first(_bytes(plan, stage, shape), source)
        _refuse_first(_sums(stage), source)
        if stage.memory_bytes > stage.memory_limit_bytes:
            raise SpecError(
                f"{source}: field stages.{stage.index}.memory_bytes: {stage.memory_bytes} where "
                f"{stage.device} offers {stage.memory_limit_bytes}; plan again with llmpq plan, "
                "with fewer bits or a smaller batch"
            )
    _refuse_first(_prediction(plan), source)


def _refuse_first(checks: Iterator[Derived], source: str) -> None:
    wrong = next((each for each in checks if not each.agrees), None)
    if wrong is not None:
        raise SpecError(
            f"{source}: field {wrong.field}: {wrong.found!r:.80} where {wrong.why} make it "
            f"{wrong.computed!r:.80}; the file was changed, or made by another version of llmpq: "
            "plan again with llmpq plan"
        )


def _devices(plan: PlanSpec, source: str) -> Iterator[Derived]:
    """Fields that follow from a device's type, node and number."""
    for stage in plan.stages:
        field = f"stages.{stage.index}"
        try:
            accelerator = stage.kind
            device = _device(plan, stage)
            device.compute_dtype(stage.dtype)
        except SpecError as error:
            raise SpecError(f"{source}: field {field}: {error}") from error
        yield Derived(f"{field}.accelerator", stage.accelerator, accelerator.name, "its aliases")
        name = f"{stage.node}/{stage.accelerator}:{device.index}"
        yield Derived(f"{field}.device", stage.device, name, "node, accelerator and number")
        if stage.devices:
            named = tuple(f"{stage.node}/{stage.accelerator}:{each}" for each in _numbers(stage))
            why = "field device first, and others of its node and type"
            yield Derived(f"{field}.devices", stage.devices, named, why)
            yield Derived(f"{field}.devices", stage.devices[0], stage.device, "field device")
        known = (None, stage.accelerator)
        resource = stage.custom_resource if stage.custom_resource in known else stage.accelerator
        why = "resources that the planner knows (the accelerator's name, or null)"
        yield Derived(f"{field}.custom_resource", stage.custom_resource, resource, why)
        if not accelerator.is_cpu:
            yield Derived(f"{field}.threads", stage.threads, 1, "GPUs")
            most = accelerator.nominal_memory_bytes
            offered = stage.memory_limit_bytes + stage.memory_margin_bytes
            why = f"the {most} bytes of a {accelerator.name}"
            yield Derived(f"{field}.memory_limit_bytes", offered, min(offered, most), why)


def _device(plan: PlanSpec, stage: StagePlan) -> Device:
    """The stage's device, as far as memory and kernels depend on it."""
    accelerator = stage.kind
    numbers = _numbers(stage)
    device = Device(
        accelerator=accelerator,
        node=stage.node,
        index=numbers[0],
        memory_bytes=stage.memory_limit_bytes + stage.memory_margin_bytes,
        link_bytes_per_s=accelerator.link_bytes_per_s,
        threads=stage.threads if accelerator.is_cpu else None,
        custom_resource=stage.custom_resource,
        emulated=stage.emulated,
        stand_in=plan.stand_in is not None,
    )
    if not stage.devices:
        return device
    return replace(device, ranks=tuple(replace(device, index=number) for number in numbers))


def _numbers(stage: StagePlan) -> list[int]:
    """The numbers of the stage's devices; 0 for what is no number."""
    numbers = [name.rpartition(":")[2] for name in stage.device_names]
    return [int(each) if each.isdecimal() and len(each) <= 9 else 0 for each in numbers]


def _bytes(plan: PlanSpec, stage: StagePlan, shape: ModelShape) -> Iterator[Derived]:
    """The kernels and the memory of a stage.

    A checkpoint that is quantized already also runs with the plan for its 16-bit original.
    """
    device, found = _device(plan, stage), list[Derived]()
    for planned in (shape, replace(shape, stored=None)):
        found = [*_kernels(plan, stage, device, planned), *_memory(plan, stage, device, planned)]
        if shape.stored is None or all(each.agrees for each in found):
            break
    yield from found


def _kernels(
    plan: PlanSpec, stage: StagePlan, device: Device, shape: ModelShape
) -> Iterator[Derived]:
    """The kernel backend of each bitwidth."""
    is_stored, rows = shape.stored is not None, plan.micro_batches.decode
    backends = {
        bits: backend_name(device.processor, bits, stage.dtype, is_stored, rows)
        for bits in sorted(set(stage.bitwidths))
    }
    why = "bitwidths, device, compute type and decode micro-batch"
    yield Derived(f"stages.{stage.index}.backends", dict(stage.backends), backends, why)


def _memory(
    plan: PlanSpec, stage: StagePlan, device: Device, shape: ModelShape
) -> Iterator[Derived]:
    """The parts of a stage's bytes, by the planner's memory model."""
    computed = asdict(_stage_memory(plan, stage, device, shape, quantized=True))
    if set(stage.bitwidths) == {FULL_BITS}:
        # Nothing is kept for other kernels where no other bitwidth was allowed.
        plain = asdict(_stage_memory(plan, stage, device, shape, quantized=False))
        if asdict(stage.memory) == plain:
            computed = plain
    why = "workload, micro-batches, layers and bitwidths"
    for part, found in asdict(stage.memory).items():
        yield Derived(f"stages.{stage.index}.memory.{part}", found, computed[part], why)


def _stage_memory(
    plan: PlanSpec, stage: StagePlan, device: Device, shape: ModelShape, quantized: bool
) -> StageMemory:
    """Memory as the planner counts it; `quantized` as in `planner.costs.memory.StageWork`."""
    mixed = plan.policy.mixed_requests
    sizes, kv_bits = plan.micro_batches, plan.kv_bits
    vocabulary, shape = shape.vocab_size, largest_rank_shape(shape, stage.degree)
    work = StageWork(
        shape, plan.workload, sizes, stage.dtype, quantized, kv_bits, mixed, vocabulary
    )
    ends = StageEnds.of(stage.index, len(plan.stages), plan.head_on_first)
    fixed = fixed_stage_memory(work, device, ends)
    kv_bytes = kv_cache_bytes_per_layer(shape, plan.workload, plan.kv_bits, stage.dtype)
    return stage_memory(shape, stage.bitwidths, kv_bytes, device, stage.dtype, fixed)


def _sums(stage: StagePlan) -> Iterator[Derived]:
    field = f"stages.{stage.index}.memory_bytes"
    yield Derived(field, stage.memory_bytes, stage.memory.total, "its parts")


def _prediction(plan: PlanSpec) -> Iterator[Derived]:
    """Figures of the prediction that follow from its other figures."""
    p, workload = plan.predicted, plan.workload
    job = plan.job
    tokens = workload.global_batch * workload.new_tokens if job is None else job.job.output_tokens
    rate = tokens / p.latency_s
    yield Derived("predicted.tokens_per_s", p.tokens_per_s, rate, "workload and latency")
    if job is not None:
        yield from _job(plan, job)
    both = p.prefill_s + p.decode_s
    yield Derived("predicted.latency_s", p.latency_s, both, "prefill_s and decode_s")
    shares = tuple(min(max(share, 0.0), 1 + _ROUNDING) for share in p.busy_share)
    yield Derived("predicted.busy_share", p.busy_share, shares, "shares of the latency")
    kinds = BATCH_OBJECTIVES if plan.job is None else (JOB_OBJECTIVE,)
    named = plan.solver.objective_kind
    kind = next((each for each in kinds if each == named), None)
    if kind is None:
        yield Derived("solver.objective_kind", named, kinds, "the objectives that there are")
        return
    problem = _problem(plan, kind)
    latency_s = stage_times(problem, *_one_layer_each(plan)).latency_s
    why = "micro-batches and the stages' times"
    yield Derived("predicted.objective_latency_s", p.objective_latency_s, latency_s, why)


def _job(plan: PlanSpec, job: JobForecast) -> Iterator[Derived]:
    """Fields that a job, its slots and the prediction share."""
    p, slots = plan.predicted, plan.workload
    yield Derived("job.seconds", job.seconds, p.latency_s, "predicted.latency_s")
    yield Derived("job.tokens_per_s", job.tokens_per_s, p.tokens_per_s, "predicted.tokens_per_s")
    longest = job.job.in_flight(slots.global_batch, plan.policy.name)
    yield Derived("workload.prompt_length", slots.prompt_length, longest.prompt_length, "lengths")
    yield Derived("workload.new_tokens", slots.new_tokens, longest.new_tokens, "lengths")
    yield Derived("workload.slot_tokens", slots.slot_tokens, longest.slot_tokens, "lengths")
    yield Derived("workload.n_slots", slots.n_slots, longest.n_slots, "lengths")


def _problem(plan: PlanSpec, objective: Objective) -> AssignmentProblem:
    """The optimiser's problem of the plan's stages, whose times are all fixed."""
    batch, sizes, stages = plan.workload.global_batch, plan.micro_batches, plan.stages
    nothing = np.zeros((len(stages), 1))
    return AssignmentProblem(
        prefill_s=nothing,
        decode_s=nothing,
        fixed_prefill_s=np.array([stage.prefill_s for stage in stages]),
        fixed_decode_s=np.array([stage.decode_s for stage in stages]),
        prefill_comm_s=np.array([stage.prefill_comm_s for stage in stages]),
        decode_comm_s=np.array([stage.decode_comm_s for stage in stages]),
        layer_bytes=nothing,
        memory_bytes=nothing[:, 0],
        sensitivity=nothing,
        theta=0.0,
        bitwidths=(FULL_BITS,),
        prefill_micro_batches=-(-batch // sizes.prefill),
        decode_micro_batches=-(-batch // sizes.decode),
        new_tokens=plan.workload.new_tokens,
        objective=objective,
        available=np.ones((len(stages), 1), dtype=bool),
        passes=None if plan.job is None else plan.job.passes,
    )


def _one_layer_each(plan: PlanSpec) -> tuple[range, list[int]]:
    """An assignment of as many layers as there are stages."""
    return range(len(plan.stages) + 1), [0] * len(plan.stages)


def _origin(plan: PlanSpec, source: str) -> Iterator[Derived]:
    """Fields that follow from the cluster and the options of the plan's origin."""
    if plan.origin is None:
        return
    try:
        cluster = plan.origin.cluster_spec()
    except (SpecError, InfeasibleError) as error:
        raise SpecError(f"{source}: field origin: {error}") from error
    why = "origin.cluster without the lost devices"
    used = (name for stage in all_stages(plan) for name in stage.device_names)
    here = sorted([*used, *plan.unused_devices])
    names = sorted(device.name for device in cluster.devices)
    yield Derived("stages and unused_devices", here, names, why)
    emulate = cluster.emulate
    yield Derived("time_scale", plan.time_scale, emulate.time_scale if emulate else 0.0, why)
    yield Derived("stand_in", plan.stand_in, emulate.stand_in if emulate else None, why)
    prefills = () if plan.prefill_plan is None else plan.prefill_plan.stages
    for where, stages in (("", plan.stages), ("prefill_plan.", prefills)):
        for stage in stages:
            field = f"{where}stages.{stage.index}"
            yield from _origin_stage(plan.origin, cluster, stage, field)
    options, why = plan.origin.options, "origin.options"
    if options.kv_bits != AUTO:
        yield Derived("kv_bits", plan.kv_bits, options.kv_bits, why)
    yield Derived("rounding", plan.rounding, options.rounding, why)
    sizes = plan.micro_batches
    prefill, decode = options.prefill_micro_batch, options.decode_micro_batch
    yield Derived("micro_batches.prefill", sizes.prefill, prefill or sizes.prefill, why)
    yield Derived("micro_batches.decode", sizes.decode, decode or sizes.decode, why)
    asked, policy = options.scheduling, plan.policy
    yield Derived("policy.name", policy.name, asked.name, why)
    most = asked.max_batch_size or policy.max_batch_size
    yield Derived("policy.max_batch_size", policy.max_batch_size, most, why)


def _origin_stage(
    origin: PlanOrigin, cluster: ClusterSpec, stage: StagePlan, field: str
) -> Iterator[Derived]:
    """Fields of a stage that follow from the origin: its device, compute type and bitwidths."""
    device = next(each for each in cluster.devices if each.name == stage.device)
    why = "origin.cluster and its options"
    kind = device.accelerator
    planned = stage.memory_limit_bytes + stage.memory_margin_bytes
    yield Derived(f"{field}.memory_limit_bytes", planned, device.memory_bytes, why)
    for name, computed in (
        ("emulated", device.emulated),
        ("threads", device.threads or 1),
        ("custom_resource", device.custom_resource),
        ("dtype", device.compute_dtype(origin.options.dtype)),
        ("described", None if kind.is_registered else entry_of(kind)),
    ):
        yield Derived(f"{field}.{name}", getattr(stage, name), computed, why)
    allowed = tuple(bits for bits in stage.bitwidths if bits in origin.options.bits)
    yield Derived(f"{field}.bitwidths", stage.bitwidths, allowed, why)
