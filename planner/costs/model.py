"""Computing the numbers of an `AssignmentProblem` from cluster, model and workload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import Transfers
from planner.costs.latency_model import LatencyModel, MicroBatchTimes
from planner.costs.layer_units import LayerUnits, told_apart
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    margin_bytes,
)
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.optimiser.assignment import Assignment
from planner.optimiser.feasibility import stages_hold
from planner.optimiser.problem import (
    AssignmentProblem,
    BoolArray,
    FloatArray,
    JobPasses,
)
from planner.options import PlanOptions, kv_bits_of
from planner.schedule.job_passes import SteadyCycle, job_passes
from planner.scheduling import TOKEN_POLICIES, PolicyOptions
from planner.workload import Job, MicroBatches, Workload
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class CostModel:
    """The costs of a model on a cluster, for any device order and micro-batch sizes. `sensitivity`:
    omega `[layers, bitwidths of options.bits]`. `theta`: seconds that a unit of it is worth. `job`:
    costs are of all its prompts, of which as many as `workload` has are in flight. `cycle`: by
    which the passes of the policy `exegpt` are counted.
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
    _rows: dict[Hashable, _StageRows] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @cached_property
    def of_batch(self) -> CostModel:
        """The costs of the requests in flight as one batch, whose memory is that of the job."""
        return self if self.job is None else replace(self, job=None, cycle=None)

    @property
    def bits(self) -> tuple[int, ...]:
        return self.options.bits if self.usable_bits is None else self.usable_bits

    @property
    def _is_usable(self) -> BoolArray:
        usable = self.bits
        return np.array([bits in usable for bits in self.options.bits])

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

    def kv_bytes_per_layer(self, device: Device, kind: int | None = None) -> int:
        """Bytes of what a layer of a kind keeps of requests; None where there is but one kind."""
        shape, dtype = self.shape_on(device), self.dtype(device)
        own = shape if kind is None else shape.kind_shapes[kind]
        return kv_cache_bytes_per_layer(own, self.workload, self.kv_bits, dtype)

    def policy(self, sizes: MicroBatches) -> PolicyOptions:
        """The policy; mixed micro-batches have by default as many requests as a decode step."""
        chosen = self.options.scheduling
        if chosen.name not in TOKEN_POLICIES:
            return chosen
        return replace(chosen, max_batch_size=chosen.max_batch_size or sizes.decode)

    def in_flight(self, job: Job, requests: int) -> Workload:
        return job.in_flight(requests, self.options.policy)

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
        return MicroBatchTimes.of_job(self.latency, self.job.lengths, passes)

    def transfers(self, sizes: MicroBatches, stages: int) -> Transfers:
        passes = self.passes(sizes, stages)
        prompt: float = self.workload.prompt_length
        both: tuple[float, float] = sizes.prefill, sizes.decode
        if self.job is not None and passes is not None:
            both = passes.prefill_requests, passes.decode_requests
            prompt = self.job.lengths.mean_prompt
        return Transfers(self.cluster, self.shape, both, prompt, self.head_on_first)

    def fixed_memory(
        self, devices: Sequence[Device], stage: int, sizes: MicroBatches
    ) -> StageMemory:
        ends = StageEnds.of(stage, len(devices), self.head_on_first)
        return self.memory_with(devices[stage], ends, sizes)

    def memory_with(self, device: Device, ends: StageEnds, sizes: MicroBatches) -> StageMemory:
        """The memory of a stage besides its layers."""
        return fixed_stage_memory(self.work_on(device, sizes), device, ends)

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
        rows, ends = self._rows_of(sizes, len(devices)), range(len(devices))
        return self._problem(rows, list(zip(devices, ends, strict=True)), rows.hops(devices))

    def grouped_problem(self, devices: Sequence[Device], sizes: MicroBatches) -> AssignmentProblem:
        return grouped(self.problem(devices, sizes), self.options.group)

    def problem_of_parts(
        self, kinds: Sequence[Device], sizes: MicroBatches, stages: int
    ) -> AssignmentProblem:
        """The problem of each of `kinds` as first stage, then of each in between, then as last."""
        places = [(device, j) for j in (0, 1, stages - 1) for device in kinds]
        return self._problem(self._rows_of(sizes, stages), places, np.zeros((2, len(places))))

    def _problem(
        self, rows: _StageRows, places: Sequence[tuple[Device, int]], hops: FloatArray
    ) -> AssignmentProblem:
        batch, sizes, devices = self.workload.global_batch, rows.sizes, [d for d, _ in places]
        layers, fixed = rows.layer_seconds(devices), rows.fixed_s(places)
        tables = np.stack([layers[:, 0], layers[:, 1], rows.layer_bytes(devices)])
        tables, kinds = told_apart(tables, np.array(self.shape.kind_of_layer))
        return AssignmentProblem(
            prefill_s=tables[0],
            decode_s=tables[1],
            fixed_prefill_s=fixed[0],
            fixed_decode_s=fixed[1],
            prefill_comm_s=hops[0],
            decode_comm_s=hops[1],
            layer_bytes=tables[2],
            memory_bytes=rows.free_bytes(places),
            sensitivity=self.sensitivity,
            theta=self.theta,
            bitwidths=self.options.bits,
            prefill_micro_batches=-(-batch // sizes.prefill),
            decode_micro_batches=-(-batch // sizes.decode),
            new_tokens=self.workload.new_tokens,
            objective=self.options.objective if self.job is None else "job",
            available=self._is_usable,
            passes=rows.passes,
            kind_of_layer=kinds,
            joined=self.shape.joined,
        )

    def has_room(self, devices: Sequence[Device], sizes: MicroBatches) -> bool:
        """Whether memory allows a plan, as it does or not for the problem of the same order."""
        rows, units = self._rows_of(sizes, len(devices)), self._units
        each = rows.layer_bytes(devices).reshape(len(devices), -1, len(self.options.bits))
        smallest = units.summed(each[:, :, self._is_usable].min(axis=2))
        free = rows.free_bytes([(device, j) for j, device in enumerate(devices)])
        return stages_hold(smallest, free, units.kind_of_unit, units.joined)

    @cached_property
    def _units(self) -> LayerUnits:
        shape, kinds = self.shape, np.array(self.shape.kind_of_layer)
        return LayerUnits.of(kinds, shape.joined, self.options.group)

    def _rows_of(self, sizes: MicroBatches, stages: int) -> _StageRows:
        if (sizes, stages) not in self._rows:
            self._rows[sizes, stages] = _StageRows(self, sizes, stages)
        return self._rows[sizes, stages]

    def layer_bytes(self, device: Device, bits: int, kind: int) -> float:
        shape = self.shape_on(device).kind_shapes[kind]
        weights = layer_weight_bytes(shape, bits, device, self.dtype(device))
        return weights + self.kv_bytes_per_layer(device, kind)


class _StageRows:
    """The costs of stages at one pair of sizes, once a kind of device: orders are thousands."""

    def __init__(self, costs: CostModel, sizes: MicroBatches, stages: int) -> None:
        self._costs, self.sizes, self._stages = costs, sizes, stages
        self._bytes: dict[Hashable, list[float]] = {}
        self._seconds: dict[Hashable, list[list[float]]] = {}
        self._free: dict[Hashable, float] = {}
        self._hops: dict[Hashable, tuple[float, float]] = {}

    @cached_property
    def passes(self) -> JobPasses | None:
        return self._costs.passes(self.sizes, self._stages)

    @cached_property
    def _times(self) -> MicroBatchTimes:
        return self._costs.times(self.sizes, self._stages)

    @cached_property
    def _transfers(self) -> Transfers:
        return self._costs.transfers(self.sizes, self._stages)

    def layer_seconds(self, devices: Sequence[Device]) -> FloatArray:
        """Seconds of a layer in prefill and in decode by kind and bitwidth: `[N, 2, C * K]`."""
        for device in devices:
            if device.cost_kind not in self._seconds:
                self._seconds[device.cost_kind] = self._seconds_on(device)
        return np.array([self._seconds[device.cost_kind] for device in devices])

    def layer_bytes(self, devices: Sequence[Device]) -> FloatArray:
        """Bytes of a layer with its KV cache by kind and bitwidth: `[N, C * K]`."""
        costs = self._costs
        for device in devices:
            if device.cost_kind not in self._bytes:
                self._bytes[device.cost_kind] = [
                    float(costs.layer_bytes(device, bits, kind))
                    for kind in range(len(costs.shape.kind_shapes))
                    for bits in costs.options.bits
                ]
        return np.array([self._bytes[device.cost_kind] for device in devices])

    def free_bytes(self, places: Sequence[tuple[Device, int]]) -> FloatArray:
        """Bytes left for layers on devices as such stages [N]; negative where others do not fit."""
        return np.array([self._free_bytes(device, j) for device, j in places])

    def hops(self, devices: Sequence[Device]) -> FloatArray:
        """Seconds of the transfer behind each stage per prefill and decode micro-batch [2, N]."""
        onward = [self._hop_s(*pair, self._transfers.onward_s) for pair in pairwise(devices)]
        back = self._hop_s(devices[-1], devices[0], self._transfers.back_s)
        return np.array([*onward, back]).T

    def fixed_s(self, places: Sequence[tuple[Device, int]]) -> FloatArray:
        """Seconds of embedding and head per prefill and per decode micro-batch: `[2, N]`."""
        seconds = np.zeros((2, len(places)))
        head_stage = self._costs.head_stage(self._stages)
        for place, (device, stage) in enumerate(places):
            if stage == 0:
                seconds[:, place] += self._times.embedding_s(device, self._costs.dtype(device))
            if stage == head_stage:
                seconds[:, place] += self._times.final_s(device, self._costs.dtype(device))
        return seconds

    def _seconds_on(self, device: Device) -> list[list[float]]:
        dtype, bits = self._costs.dtype(device), self._costs.options.bits
        kinds = range(len(self._costs.shape.kind_shapes))
        cells = [(self._times.of_kind(kind), each) for kind in kinds for each in bits]
        return [
            [float(times.prefill_s(device, each, dtype)) for times, each in cells],
            [float(times.decode_s(device, each, dtype)) for times, each in cells],
        ]

    def _free_bytes(self, device: Device, stage: int) -> float:
        is_first, is_last = stage == 0, stage == self._stages - 1
        key = device.cost_kind, is_first, is_last
        if key not in self._free:
            ends = StageEnds.of(stage, self._stages, self._costs.head_on_first)
            held = self._costs.memory_with(device, ends, self.sizes).total
            self._free[key] = float(self._costs.limit_bytes(device) - held)
        return self._free[key]

    def _hop_s(
        self,
        sender: Device,
        receiver: Device,
        seconds: Callable[[Device, Device, str], tuple[float, float]],
    ) -> tuple[float, float]:
        key = sender.cost_kind, receiver.cost_kind, sender.node == receiver.node, seconds.__name__
        if key not in self._hops:
            self._hops[key] = seconds(sender, receiver, self._costs.dtype(sender))
        return self._hops[key]


def grouped(problem: AssignmentProblem, group: int) -> AssignmentProblem:
    """Join every `group` successive layers of a problem (LLM-PQ section 4.3, optimisation 2).

    Raises `SpecError` unless `group` divides the number of layers.
    """
    if group == 1:
        return problem
    units = LayerUnits.of(problem.kind_of_layer, problem.joined, group)
    lacking = units.summed_cells(problem, (~problem.available).astype(np.float64))
    return replace(
        problem,
        prefill_s=units.summed_cells(problem, problem.prefill_s),
        decode_s=units.summed_cells(problem, problem.decode_s),
        layer_bytes=units.summed_cells(problem, problem.layer_bytes),
        sensitivity=problem.sensitivity.reshape(-1, group, len(problem.bitwidths)).sum(axis=1),
        available=lacking == 0,
        kind_of_layer=units.kind_of_unit,
        joined=units.joined,
    )


def expanded(assignment: Assignment, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Boundaries and bitwidth indices by layer of an assignment of groups of `group` layers."""
    first_layer = tuple(group * boundary for boundary in assignment.first_layer)
    return first_layer, tuple(choice for choice in assignment.bitwidth for _ in range(group))
