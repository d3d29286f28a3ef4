"""Computing the numbers of an `AssignmentProblem` from cluster, model and workload."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import HostCopies, Transfers, cache_tensors
from planner.costs.hosting import can_host, experts_bytes, host_memories, hosted_bytes
from planner.costs.latency_model import LatencyModel, MicroBatchTimes
from planner.costs.layer_units import grouped, told_apart
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    margin_bytes,
    with_streaming,
)
from planner.costs.placing import Placing
from planner.costs.stage_rows import StageRows
from planner.costs.stored_bytes import (
    HEAD_SHARE,
    LEAST_HEAD_TOKENS,
    kept_of_requests,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
)
from planner.lengths import PlannedHeads
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.optimiser.feasibility import is_feasible, stages_hold
from planner.optimiser.problem import AssignmentProblem, BoolArray, FloatArray, Host, JobPasses
from planner.options import PlanOptions, kv_bits_of
from planner.schedule.job_passes import SteadyCycle, job_passes
from planner.scheduling import TOKEN_POLICIES, PolicyOptions
from planner.workload import Job, MicroBatches, Workload
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class CostModel:
    """The costs of a model on a cluster, for any device order and micro-batch sizes. `sensitivity`:
    omega `[layers, bitwidths of options.bits]`, and `expert_sensitivity` the part of experts in it,
    None where it was not measured. `theta`: seconds that a unit of it is worth. `job`:
    costs are of all its prompts, of which as many as `workload` has are in flight. `cycle`: by
    which the passes of the policy `exegpt` are counted. `experts_apart`: their bits may be others
    than those of the rest of their layer; with `hosting` they may lie in hosts' memory too.
    """

    cluster: ClusterSpec
    shape: ModelShape
    workload: Workload
    options: PlanOptions
    latency: LatencyModel
    sensitivity: FloatArray
    theta: float = 0.0
    job: Job | None = None
    head_on_first: bool = False
    usable_bits: tuple[int, ...] | None = None
    cycle: SteadyCycle | None = None
    experts_apart: bool = False
    hosting: bool = False
    expert_sensitivity: FloatArray | None = None
    _rows: dict[Hashable, StageRows] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _bytes: dict[Hashable, list[float]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    _unit_bytes: dict[Hashable, FloatArray] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def of_batch(self) -> CostModel:
        """The costs of the requests in flight as one batch, whose memory is that of the job."""
        return self if self.job is None else replace(self, job=None, cycle=None)

    @property
    def bits(self) -> tuple[int, ...]:
        return self.options.bits if self.usable_bits is None else self.usable_bits

    @cached_property
    def whole(self) -> CostModel:
        """The costs where all of a layer has one bitwidth and lies on the device."""
        if not self.experts_apart:
            return self
        return replace(self, experts_apart=False, hosting=False)

    @cached_property
    def placing(self) -> Placing:
        hosting = self.hosting and self.experts_apart
        omega = self.sensitivity, self.expert_sensitivity
        return Placing(self.shape, self.options, *omega, self.experts_apart, hosting)

    def is_usable(self, kind: ModelShape, bits: int) -> bool:
        """Whether layers of a kind may have so many bits: those that are usable, and those that
        they are stored with, by which they lose nothing.
        """
        return bits in self.bits or (kind.stored is not None and not kind.rounds(bits))

    @property
    def _usable(self) -> BoolArray:
        """Which bits layers of each kind may have: `[C, K]`."""
        kinds, bits = self.shape.kind_shapes, self.options.bits
        return np.array([[self.is_usable(kind, each) for each in bits] for kind in kinds])

    def head_stage(self, stages: int) -> int:
        return 0 if self.head_on_first else stages - 1

    def shape_on(self, device: Device) -> ModelShape:
        """The model as `device` holds it: of a group what its first rank has."""
        # to look a shape up takes longer than all else that is asked of one device
        return self.shape if device.degree == 1 else largest_rank_shape(self.shape, device.degree)

    def dtype(self, device: Device) -> str:
        return device.compute_dtype(self.options.dtype)

    @property
    def kv_bits(self) -> int:
        return kv_bits_of(self.options)

    @property
    def heads(self) -> PlannedHeads:
        return self.workload.heads

    def kv_bytes_per_layer(self, device: Device, kind: int | None = None) -> int:
        """Bytes of what a layer of a kind keeps of requests; None where there is but one kind. On a
        CPU the room in which a run keeps heads is there too.
        """
        shape, dtype = self.shape_on(device), self.dtype(device)
        own = shape if kind is None else shape.kind_shapes[kind]
        kept = kv_cache_bytes_per_layer(own, self.workload, self.kv_bits, dtype)
        if not (self.heads.kept_tokens and device.accelerator.is_cpu):
            return kept
        token, state = kept_of_requests(own, self.workload, self.kv_bits, dtype)
        held = self.heads.kept_tokens * (token + state / LEAST_HEAD_TOKENS)
        return kept + ceil(held / HEAD_SHARE)

    def head_copy_s(self, device: Device, kind: int) -> float:
        """Seconds in which a layer of a kind restores what it holds of a head, for one prompt."""
        if not self.heads.shared_tokens:
            return 0.0
        shape = self.shape_on(device).kind_shapes[kind]
        held = kept_of_requests(shape, self.workload, self.kv_bits, self.dtype(device))
        tensors, link = cache_tensors(self.kv_bits, [shape]), device.host_link_bytes_per_s
        return HostCopies(held[0], tensors, link, held[1]).one_way_s(self.heads.shared_tokens)

    def policy(self, sizes: MicroBatches) -> PolicyOptions:
        """The policy; mixed micro-batches have by default as many requests as a decode step."""
        chosen = self.options.scheduling
        if chosen.name not in TOKEN_POLICIES:
            return chosen
        return replace(chosen, max_batch_size=chosen.max_batch_size or sizes.decode)

    def in_flight(self, job: Job, requests: int) -> Workload:
        return job.in_flight(requests, self.options.scheduling.name)

    def with_in_flight(self, job: Job, requests: int) -> CostModel:
        return replace(self, workload=self.in_flight(job, requests))

    def on(self, devices: tuple[Device, ...]) -> CostModel:
        """The costs where the cluster has these devices only."""
        return replace(self, cluster=replace(self.cluster, devices=devices))

    def limit_bytes(self, device: Device) -> int:
        return device.memory_bytes - margin_bytes(device, self.options.memory_margin)

    @property
    def generated_tokens(self) -> float:
        if self.job is not None:
            return self.job.output_tokens
        return self.workload.global_batch * self.workload.new_tokens

    def passes(self, sizes: MicroBatches, stages: int) -> JobPasses | None:
        """The passes of the job on so many stages; None for a batch."""
        if self.job is None:
            return None
        if self.cycle is not None:
            return self.cycle.passes(sizes)
        return job_passes(self.job, self.workload.global_batch, sizes, stages)

    def times(self, sizes: MicroBatches, stages: int) -> MicroBatchTimes:
        passes = self.passes(sizes, stages)
        if self.job is None or passes is None:
            return MicroBatchTimes.of_batch(self.latency, self.workload, sizes)
        return MicroBatchTimes.of_job(self.latency, self.job, passes)

    def transfers(self, sizes: MicroBatches, stages: int) -> Transfers:
        passes = self.passes(sizes, stages)
        prompt = self.heads.computed(self.workload.prompt_length)
        both: tuple[float, float] = sizes.prefill, sizes.decode
        if self.job is not None and passes is not None:
            both = passes.prefill_requests, passes.decode_requests
            prompt = self.job.computed_tokens
        return Transfers(self.cluster, self.shape, both, prompt, self.head_on_first)

    def fixed_memory(
        self, devices: Sequence[Device], stage: int, sizes: MicroBatches
    ) -> StageMemory:
        ends = StageEnds.of(stage, len(devices), self.head_on_first)
        return self.memory_with(devices[stage], ends, sizes)

    def memory_with(self, device: Device, ends: StageEnds, sizes: MicroBatches) -> StageMemory:
        """The memory of a stage besides its layers, whose experts may stream to it."""
        fixed = fixed_stage_memory(self.work_on(device, sizes), device, ends)
        if not (self.hosting and can_host(device)):
            return fixed
        return with_streaming(fixed, self.shape_on(device), self.dtype(device))

    def work_on(self, device: Device, sizes: MicroBatches) -> StageWork:
        quantized = min(self.options.bits) < FULL_BITS
        return StageWork(
            self.shape_on(device),
            self.workload,
            sizes,
            self.dtype(device),
            quantized,
            self.kv_bits,
            self.policy(sizes).mixed_requests,
            self.shape.vocab_size,
        )

    def problem(self, devices: Sequence[Device], sizes: MicroBatches) -> AssignmentProblem:
        if self.experts_apart:
            return self.whole.problem(devices, sizes)
        rows, ends = self._rows_of(sizes, len(devices)), range(len(devices))
        return self._problem(rows, list(zip(devices, ends, strict=True)), rows.hops(devices))

    def grouped_problem(self, devices: Sequence[Device], sizes: MicroBatches) -> AssignmentProblem:
        """The problem of `units`."""
        if not self.experts_apart:
            return grouped(self.problem(devices, sizes), self.options.group)
        rows, ends = self._rows_of(sizes, len(devices)), range(len(devices))
        found = self._problem(rows, list(zip(devices, ends, strict=True)), rows.hops(devices))
        return self._with_hosts(found, devices, devices)

    def problem_of_parts(
        self, kinds: Sequence[Device], sizes: MicroBatches, stages: int
    ) -> AssignmentProblem:
        """The problem of `units` on each of `kinds` as first stage, in between, and last."""
        places = [(device, j) for j in (0, 1, stages - 1) for device in kinds]
        rows = self._rows_of(sizes, stages)
        found = self._problem(rows, places, np.zeros((2, len(places))))
        if not self.experts_apart:
            return grouped(found, self.options.group)
        return self._with_hosts(found, [device for device, _ in places], self.cluster.devices)

    def _with_hosts(
        self, problem: AssignmentProblem, devices: Sequence[Device], every: Sequence[Device]
    ) -> AssignmentProblem:
        """The problem on `devices` where stages on `every` device share the memory of hosts. Those
        that cost the same have one limit, as orders of their kinds are bounded together.
        """
        if not self.hosting:
            return problem
        held, limits = host_memories(every), dict[Hashable, float]()
        for device in filter(can_host, every):
            known = limits.get(device.cost_kind, 0.0)
            limits[device.cost_kind] = max(known, held[device.node])
        own = [limits.get(device.cost_kind, 0.0) if can_host(device) else 0.0 for device in devices]
        stages = dict[str, tuple[int, ...]]()
        for stage, device in enumerate(devices if every is devices else ()):
            stages[device.node] = (*stages.get(device.node, ()), stage)
        hosts = tuple(Host(stages[node], float(memory)) for node, memory in held.items() if stages)
        return replace(problem, host_memory_bytes=np.array(own), hosts=hosts)

    def _problem(
        self, rows: StageRows, places: Sequence[tuple[Device, int]], hops: FloatArray
    ) -> AssignmentProblem:
        batch, sizes, devices = self.workload.global_batch, rows.sizes, [d for d, _ in places]
        fixed, units, joined = rows.fixed_s(places), self.placing.units, self.shape.joined
        host_bytes = np.zeros((1, 1))
        if self.experts_apart:
            tables, kinds = told_apart(rows.unit_tables(devices), units.kind_of_unit)
            host_bytes, usable, joined = tables[3], tables[4] == 0, units.joined
        else:
            layers = rows.layer_seconds(devices)
            held = self.layers_bytes(devices)
            usable = np.broadcast_to(self._usable.reshape(-1), held.shape)
            tables = np.stack([layers[:, 0], layers[:, 1], held, usable])
            tables, kinds = told_apart(tables, np.array(self.shape.kind_of_layer))
            usable = tables[3] > 0
        return AssignmentProblem(
            prefill_s=tables[0],
            decode_s=tables[1],
            fixed_prefill_s=fixed[0],
            fixed_decode_s=fixed[1],
            prefill_comm_s=hops[0],
            decode_comm_s=hops[1],
            layer_bytes=tables[2],
            memory_bytes=rows.free_bytes(places),
            sensitivity=self.placing.sensitivity if self.experts_apart else self.sensitivity,
            theta=self.theta,
            bitwidths=self.placing.bits,
            prefill_micro_batches=-(-batch // sizes.prefill),
            decode_micro_batches=-(-batch // sizes.decode),
            new_tokens=self.workload.new_tokens,
            objective=self.options.objective if self.job is None else "job",
            available=usable,
            passes=rows.passes,
            kind_of_layer=kinds,
            joined=joined,
            host_bytes=host_bytes,
        )

    def has_room(self, devices: Sequence[Device], sizes: MicroBatches) -> bool:
        """Whether memory allows a plan, as it does or not for the problem of the same order."""
        rows = self._rows_of(sizes, len(devices))
        free = rows.free_bytes([(device, j) for j, device in enumerate(devices)])
        if self.hosting:
            return is_feasible(self._bytes_problem(devices, free))
        units = self.whole.placing.units
        each = self.layers_bytes(devices).reshape(len(devices), -1, len(self.options.bits))
        smallest = units.summed(np.where(self._usable, each, np.inf).min(axis=2))
        return stages_hold(smallest, free, units.kind_of_unit, units.joined)

    def _bytes_problem(self, devices: Sequence[Device], free: FloatArray) -> AssignmentProblem:
        """The problem of `units` where nothing takes any time."""
        units, stages = self.placing.units, len(devices)
        for device in devices:
            if device.cost_kind not in self._unit_bytes:
                parts = [self.part_bytes(device, experts) for experts in (False, True)]
                self._unit_bytes[device.cost_kind] = units.summed(np.concatenate(parts, axis=1))
        tables = np.array([self._unit_bytes[device.cost_kind] for device in devices])
        held, hosted, lacks = tables.swapaxes(0, 1).reshape(3, stages, -1)
        none = np.zeros(stages)
        found = AssignmentProblem(
            prefill_s=np.zeros_like(held),
            decode_s=np.zeros_like(held),
            fixed_prefill_s=none,
            fixed_decode_s=none,
            prefill_comm_s=none,
            decode_comm_s=none,
            layer_bytes=held,
            memory_bytes=free,
            sensitivity=self.placing.sensitivity,
            theta=0.0,
            bitwidths=self.placing.bits,
            prefill_micro_batches=1,
            decode_micro_batches=1,
            new_tokens=1,
            available=lacks == 0,
            kind_of_layer=units.kind_of_unit,
            joined=units.joined,
            host_bytes=hosted,
        )
        return self._with_hosts(found, devices, devices)

    def part_bytes(self, device: Device, experts: bool) -> FloatArray:
        """Bytes on device and host at each choice, and whether it is lacking, `[3, C, K]`: of the
        experts of each kind that has some, or of the rest of each.
        """
        dtype, rows = self.dtype(device), list[list[tuple[float, float, bool]]]()
        for kind, shape in enumerate(self.shape_on(device).kind_shapes):
            if experts and shape.experts is None:
                continue
            rows.append([])
            for bits, on_host in self.placing.unit_choices:
                can = experts and can_host(device)
                lacks = on_host > can or not self.is_usable(shape, bits)
                held = experts_bytes(shape, bits, device.processor, dtype)
                if on_host and not lacks:
                    rows[-1].append((0.0, hosted_bytes(shape, bits, dtype), False))
                elif experts:
                    rows[-1].append((held, 0.0, lacks))
                else:
                    rows[-1].append((self.layer_bytes(device, bits, kind) - held, 0.0, lacks))
        return np.moveaxis(np.array(rows, dtype=np.float64), 2, 0)

    def _rows_of(self, sizes: MicroBatches, stages: int) -> StageRows:
        if (sizes, stages) not in self._rows:
            self._rows[sizes, stages] = StageRows(self, sizes, stages)
        return self._rows[sizes, stages]

    def layers_bytes(self, devices: Sequence[Device]) -> FloatArray:
        """Bytes of a layer with its KV cache by kind and bitwidth: `[N, C * K]`."""
        for device in devices:
            if device.cost_kind not in self._bytes:
                self._bytes[device.cost_kind] = [
                    float(self.layer_bytes(device, bits, kind))
                    for kind in range(len(self.shape.kind_shapes))
                    for bits in self.options.bits
                ]
        return np.array([self._bytes[device.cost_kind] for device in devices])

    def layer_bytes(self, device: Device, bits: int, kind: int) -> float:
        shape = self.shape_on(device).kind_shapes[kind]
        weights = layer_weight_bytes(shape, bits, device, self.dtype(device))
        return weights + self.kv_bytes_per_layer(device, kind)
