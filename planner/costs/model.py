"""Computing the numbers of an `AssignmentProblem` from cluster, model and workload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import Transfers
from planner.costs.latency import LatencyModel
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    margin_bytes,
)
from planner.micro_batches import MicroBatches
from planner.model.finding import ModelShape
from planner.optimiser.assignment import Assignment
from planner.optimiser.problem import AssignmentProblem, FloatArray
from planner.options import PlanOptions, kv_bits_of
from planner.workload import Workload
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class CostModel:
    """The costs of a model on a cluster, for any device order and micro-batch sizes.

    `sensitivity`: omega `[layers, bitwidths of options.bits]`.
    """

    cluster: ClusterSpec
    shape: ModelShape
    workload: Workload
    options: PlanOptions
    latency: LatencyModel
    sensitivity: FloatArray
    head_on_first: bool = False

    def head_stage(self, stages: int) -> int:
        """The stage that has LM head and sampling."""
        return 0 if self.head_on_first else stages - 1

    def dtype(self, device: Device) -> str:
        """The compute type on `device`."""
        return device.compute_dtype(self.options.dtype)

    @property
    def kv_bits(self) -> int:
        """Bits of keys and values."""
        return kv_bits_of(self.options)

    def kv_bytes_per_layer(self, device: Device) -> int:
        """Bytes of the KV cache of one layer on `device` for the whole batch."""
        return kv_cache_bytes_per_layer(self.shape, self.workload, self.kv_bits, self.dtype(device))

    def limit_bytes(self, device: Device) -> int:
        """Bytes of `device` that a stage may fill: all but the margin."""
        return device.memory_bytes - margin_bytes(device, self.options.memory_margin)

    def transfers(self, sizes: MicroBatches) -> Transfers:
        """The hops between stages."""
        return Transfers(self.cluster, self.shape, self.workload, sizes, self.head_on_first)

    def fixed_memory(
        self, devices: Sequence[Device], stage: int, sizes: MicroBatches
    ) -> StageMemory:
        """The memory of stage number `stage` on `devices` besides its layers."""
        device, quantized = devices[stage], min(self.options.bits) < FULL_BITS
        work = StageWork(
            self.shape, self.workload, sizes, self.dtype(device), quantized, self.kv_bits
        )
        ends = StageEnds.of(stage, len(devices), self.head_on_first)
        return fixed_stage_memory(work, device, ends)

    def problem(self, devices: Sequence[Device], sizes: MicroBatches) -> AssignmentProblem:
        """Make the assignment problem of one device order and pair of micro-batch sizes."""
        batch = self.workload.global_batch
        dtypes = [self.dtype(device) for device in devices]
        prefill_comm, decode_comm = self.transfers(sizes).of_order(devices, dtypes)
        fixed_prefill, fixed_decode = self._fixed_times(devices, sizes)
        net = [
            self.limit_bytes(device) - self.fixed_memory(devices, j, sizes).total
            for j, device in enumerate(devices)
        ]
        return AssignmentProblem(
            prefill_s=self._table(devices, lambda d, b: self._prefill_s(d, b, sizes)),
            decode_s=self._table(devices, lambda d, b: self._decode_s(d, b, sizes)),
            fixed_prefill_s=fixed_prefill,
            fixed_decode_s=fixed_decode,
            prefill_comm_s=prefill_comm,
            decode_comm_s=decode_comm,
            layer_bytes=self._table(devices, self._layer_bytes),
            memory_bytes=np.array(net, dtype=np.float64),
            sensitivity=self.sensitivity,
            theta=self.options.theta,
            bitwidths=self.options.bits,
            prefill_micro_batches=-(-batch // sizes.prefill),
            decode_micro_batches=-(-batch // sizes.decode),
            new_tokens=self.workload.new_tokens,
            objective=self.options.objective,
            available=np.ones((len(devices), len(self.options.bits)), dtype=bool),
        )

    def _table(self, devices: Sequence[Device], cost: Callable[[Device, int], float]) -> FloatArray:
        """Compute `cost` of every stage and bitwidth, `[N, K]`, once for equal devices."""
        rows: dict[object, list[float]] = {}
        kinds = [device.time_kind for device in devices]
        for kind, device in zip(kinds, devices, strict=True):
            if kind not in rows:
                rows[kind] = [float(cost(device, bits)) for bits in self.options.bits]
        return np.array([rows[kind] for kind in kinds])

    def _prefill_s(self, device: Device, bits: int, sizes: MicroBatches) -> float:
        return self.latency.layer_prefill_s(
            device, bits, sizes.prefill, self.workload.prompt_length, self.dtype(device)
        )

    def _decode_s(self, device: Device, bits: int, sizes: MicroBatches) -> float:
        """Seconds of a layer at the mean context: with half of the new tokens (LLM-PQ eq. 6)."""
        context = self.workload.prompt_length + self.workload.new_tokens // 2
        return self.latency.layer_decode_s(device, bits, sizes.decode, context, self.dtype(device))

    def _layer_bytes(self, device: Device, bits: int) -> float:
        kind = device.time_kind, bits
        if kind not in self._known_layer_bytes:
            weights = layer_weight_bytes(self.shape, bits, device, self.dtype(device))
            self._known_layer_bytes[kind] = weights + self.kv_bytes_per_layer(device)
        return self._known_layer_bytes[kind]

    @cached_property
    def _known_layer_bytes(self) -> dict[Hashable, float]:
        """Bytes of a layer by kind of device and bitwidth, kept for many problems."""
        return {}

    def _fixed_times(
        self, devices: Sequence[Device], sizes: MicroBatches
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of embedding and head per prefill and per decode micro-batch, each `[N]`."""
        prefill, decode = np.zeros(len(devices)), np.zeros(len(devices))
        first, head_stage = devices[0], self.head_stage(len(devices))
        head = devices[head_stage]
        prompt_tokens = sizes.prefill * self.workload.prompt_length
        prefill[0] += self.latency.embedding_s(first, prompt_tokens, self.dtype(first))
        decode[0] += self.latency.embedding_s(first, sizes.decode, self.dtype(first))
        prefill[head_stage] += self.latency.final_s(head, sizes.prefill, self.dtype(head))
        decode[head_stage] += self.latency.final_s(head, sizes.decode, self.dtype(head))
        return prefill, decode


def grouped(problem: AssignmentProblem, group: int) -> AssignmentProblem:
    """Join every `group` successive layers of a problem (LLM-PQ section 4.3, optimisation 2).

    Raises `SpecError` unless `group` divides the number of layers.
    """
    if group == 1:
        return problem
    if problem.layers % group:
        raise SpecError(
            f"group is {group}, which does not divide the model's {problem.layers} layers; "
            f"use one of {[g for g in range(1, problem.layers + 1) if problem.layers % g == 0]}"
        )
    return replace(
        problem,
        prefill_s=problem.prefill_s * group,
        decode_s=problem.decode_s * group,
        layer_bytes=problem.layer_bytes * group,
        sensitivity=problem.sensitivity.reshape(-1, group, len(problem.bitwidths)).sum(axis=1),
    )


def expanded(assignment: Assignment, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Boundaries and bitwidth indices by layer of an assignment of groups of `group` layers."""
    first_layer = tuple(group * boundary for boundary in assignment.first_layer)
    return first_layer, tuple(choice for choice in assignment.bitwidth for _ in range(group))
