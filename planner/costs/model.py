"""Computing the numbers of an `AssignmentProblem` from cluster, model and workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.communication import Transfers
from planner.costs.latency_model import LatencyModel
from planner.costs.memory import (
    StageEnds,
    StageMemory,
    StageWork,
    fixed_stage_memory,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    margin_bytes,
)
from planner.costs.micro_batch_times import MicroBatchTimes
from planner.micro_batches import MicroBatches
from planner.model.finding import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.optimiser.assignment import Assignment
from planner.optimiser.problem import AssignmentProblem, FloatArray, JobPasses
from planner.options import PlanOptions, kv_bits_of
from planner.schedule.job_passes import job_passes
from planner.scheduling import TOKEN_POLICIES, PolicyOptions
from planner.workload import Job, Workload
from quant.common.errors import SpecError
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class CostModel:
    """The costs of a model on a cluster, for any device order and micro-batch sizes.

    `sensitivity`: omega `[layers, bitwidths of options.bits]`. `theta`: seconds that a unit of it
    is worth. Costs are of one batch of `workload`, or where there is a `job` of all its prompts,
    of which as many as a batch has are in flight. `only_bits`: the one bitwidth of
    `options.bits` that layers may have; None for all.
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
    only_bits: int | None = None

    def head_stage(self, stages: int) -> int:
        """The stage that has LM head and sampling."""
        return 0 if self.head_on_first else stages - 1

    def shape_on(self, device: Device) -> ModelShape:
        """The model as `device` holds it: of a group what its first rank has."""
        return largest_rank_shape(self.shape, device.degree)

    def dtype(self, device: Device) -> str:
        """The compute type on `device`."""
        return device.compute_dtype(self.options.dtype)

    @property
    def kv_bits(self) -> int:
        """Bits of keys and values."""
        return kv_bits_of(self.options)

    def kv_bytes_per_layer(self, device: Device) -> int:
        """Bytes of the KV cache of one layer on `device` for the whole batch."""
        shape, dtype = self.shape_on(device), self.dtype(device)
        return kv_cache_bytes_per_layer(shape, self.workload, self.kv_bits, dtype)

    def policy(self, sizes: MicroBatches) -> PolicyOptions:
        """The scheduling policy with its sizes: where it mixes the phases and the options do not
        say it, a micro-batch has as many requests as a decode step.
        """
        chosen = self.options.scheduling
        if chosen.name not in TOKEN_POLICIES:
            return chosen
        return replace(chosen, max_batch_size=chosen.max_batch_size or sizes.decode)

    def in_flight(self, job: Job, requests: int) -> Workload:
        """The workload of so many requests of `job` in flight under the policy."""
        return job.in_flight(requests, self.options.policy)

    def limit_bytes(self, device: Device) -> int:
        """Bytes of `device` that a stage may fill: all but the margin."""
        return device.memory_bytes - margin_bytes(device, self.options.memory_margin)

    @property
    def generated_tokens(self) -> float:
        """New tokens of the batch, or of the whole job."""
        if self.job is not None:
            return self.job.output_tokens
        return self.workload.global_batch * self.workload.new_tokens

    def passes(self, sizes: MicroBatches, stages: int) -> JobPasses | None:
        """The passes of the job on so many stages; None for a batch."""
        if self.job is None:
            return None
        return job_passes(self.job, self.workload.global_batch, sizes, stages)

    def times(self, sizes: MicroBatches, stages: int) -> MicroBatchTimes:
        """Seconds of the micro-batches that `problem` counts."""
        passes = self.passes(sizes, stages)
        if self.job is None or passes is None:
            return MicroBatchTimes.of_batch(self.latency, self.workload, sizes)
        return MicroBatchTimes.of_job(self.latency, self.job.lengths, passes)

    def transfers(self, sizes: MicroBatches, stages: int) -> Transfers:
        """The hops between stages, of micro-batches that `problem` counts."""
        passes = self.passes(sizes, stages)
        if self.job is None or passes is None:
            both, prompt = (sizes.prefill, sizes.decode), self.workload.prompt_length
            return Transfers(self.cluster, self.shape, both, prompt, self.head_on_first)
        mean = passes.prefill_requests, passes.decode_requests
        prompt_mean = self.job.lengths.mean_prompt
        return Transfers(self.cluster, self.shape, mean, prompt_mean, self.head_on_first)

    def fixed_memory(
        self, devices: Sequence[Device], stage: int, sizes: MicroBatches
    ) -> StageMemory:
        """The memory of stage number `stage` on `devices` besides its layers."""
        device, quantized = devices[stage], min(self.options.bits) < FULL_BITS
        work = StageWork(
            self.shape_on(device),
            self.workload,
            sizes,
            self.dtype(device),
            quantized,
            self.kv_bits,
            self.policy(sizes).mixed_requests,
            self.shape.vocab_size,
        )
        ends = StageEnds.of(stage, len(devices), self.head_on_first)
        return fixed_stage_memory(work, device, ends)

    def problem(self, devices: Sequence[Device], sizes: MicroBatches) -> AssignmentProblem:
        """Make the assignment problem of one device order and pair of micro-batch sizes."""
        batch, stages = self.workload.global_batch, len(devices)
        dtypes, times = [self.dtype(device) for device in devices], self.times(sizes, stages)
        prefill_comm, decode_comm = self.transfers(sizes, stages).of_order(devices, dtypes)
        fixed_prefill, fixed_decode = self._fixed_times(devices, times)
        net = [
            self.limit_bytes(device) - self.fixed_memory(devices, j, sizes).total
            for j, device in enumerate(devices)
        ]
        return AssignmentProblem(
            prefill_s=self._table(devices, lambda d, b: times.prefill_s(d, b, self.dtype(d))),
            decode_s=self._table(devices, lambda d, b: times.decode_s(d, b, self.dtype(d))),
            fixed_prefill_s=fixed_prefill,
            fixed_decode_s=fixed_decode,
            prefill_comm_s=prefill_comm,
            decode_comm_s=decode_comm,
            layer_bytes=self._table(devices, self._layer_bytes),
            memory_bytes=np.array(net, dtype=np.float64),
            sensitivity=self.sensitivity,
            theta=self.theta,
            bitwidths=self.options.bits,
            prefill_micro_batches=-(-batch // sizes.prefill),
            decode_micro_batches=-(-batch // sizes.decode),
            new_tokens=self.workload.new_tokens,
            objective=self.options.objective if self.job is None else "job",
            available=np.array([self.only_bits in (None, bits) for bits in self.options.bits]),
            passes=self.passes(sizes, stages),
        )

    def _table(self, devices: Sequence[Device], cost: Callable[[Device, int], float]) -> FloatArray:
        """Compute `cost` of every stage and bitwidth, `[N, K]`, once for equal devices."""
        rows: dict[object, list[float]] = {}
        kinds = [device.time_kind for device in devices]
        for kind, device in zip(kinds, devices, strict=True):
            if kind not in rows:
                rows[kind] = [float(cost(device, bits)) for bits in self.options.bits]
        return np.array([rows[kind] for kind in kinds])

    def _layer_bytes(self, device: Device, bits: int) -> float:
        weights = layer_weight_bytes(self.shape_on(device), bits, device, self.dtype(device))
        return weights + self.kv_bytes_per_layer(device)

    def _fixed_times(
        self, devices: Sequence[Device], times: MicroBatchTimes
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of embedding and head per prefill and per decode micro-batch, each `[N]`."""
        seconds = np.zeros((2, len(devices)))
        first, head_stage = devices[0], self.head_stage(len(devices))
        head = devices[head_stage]
        seconds[:, 0] += times.embedding_s(first, self.dtype(first))
        seconds[:, head_stage] += times.final_s(head, self.dtype(head))
        return seconds[0], seconds[1]


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
