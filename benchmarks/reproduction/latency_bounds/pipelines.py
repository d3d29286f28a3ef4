"""Pipelines over equal GPUs: layers spread evenly, some GPUs in tensor-parallel groups.

ExeGPT section 4.2, partial tensor parallelism: so many of the GPUs are in groups of one degree, the
others are stages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.reproduction.latency_bounds.models import BITS
from planner.cluster.device import Device
from planner.cluster.spec import group_of
from planner.costs.memory import kv_token_bytes, layer_weight_bytes
from planner.costs.model import CostModel
from planner.latency_bound.stage_times import GridTimes, PipelineTimes
from planner.length_distribution import RequestLengths
from planner.micro_batches import MicroBatches
from planner.workload import Workload

TYPICAL_BATCH = 32
"""Requests of a decode step by which layers are spread over unlike stages."""


@dataclass(frozen=True)
class Layout:
    """How GPUs share layers: the first `grouped` ones in groups of `degree`."""

    degree: int = 1
    grouped: int = 0

    @property
    def label(self) -> str:
        """The groups after other controls; nothing where there are none."""
        return f", T_P={self.degree}x{self.grouped}" if self.grouped else ""

    def stages_of(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The stages on these GPUs, groups first."""
        starts = range(0, self.grouped, self.degree)
        groups = [group_of(devices[first : first + self.degree]) for first in starts]
        return (*groups, *devices[self.grouped :])


@dataclass(frozen=True)
class Work:
    """The most that a pipeline does at once, for its memory: requests of a prefill micro-batch and
    their mean prompt, requests of a decode step, and the longest output.
    """

    prefill_requests: int
    prompt_tokens: float
    decode_requests: int
    new_tokens: int


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in order, with the layers from `first_layer` [N+1]."""

    costs: CostModel
    stages: tuple[Device, ...]
    first_layer: tuple[int, ...]

    @classmethod
    def of(
        cls,
        costs: CostModel,
        devices: Sequence[Device],
        layout: Layout,
        lengths: RequestLengths,
    ) -> Pipeline | None:
        """The pipeline of a layout; None where it has more stages than the model has layers."""
        stages = layout.stages_of(devices)
        if len(stages) > costs.shape.layers:
            return None
        speeds = [1 / _request_layer_s(costs, stage, lengths) for stage in stages]
        return cls(costs, stages, spread(costs.shape.layers, speeds))

    @cached_property
    def times(self) -> PipelineTimes:
        """Seconds of its stages."""
        bitwidth = (0,) * self.costs.shape.layers
        return PipelineTimes(self.costs, self.stages, self.first_layer, bitwidth)

    @cached_property
    def grid_times(self) -> GridTimes:
        """The same on a grid of sizes and lengths, as searches have them."""
        return GridTimes(self.times)

    def token_slots(self, work: Work) -> int:
        """Tokens whose keys and values have room beside weights and the activations of `work`;
        below 0 where the rest does not fit.
        """
        return min(self._slots_of(stage, work) for stage in range(len(self.stages)))

    def _slots_of(self, stage: int, work: Work) -> int:
        device = self.stages[stage]
        layers = self.first_layer[stage + 1] - self.first_layer[stage]
        each = Workload(
            max(work.prefill_requests, work.decode_requests),
            max(1, round(work.prompt_tokens)),
            work.new_tokens,
        )
        costs = replace(self.costs, workload=each)
        sizes = MicroBatches(work.prefill_requests, work.decode_requests)
        shape, dtype = costs.shape_on(device), costs.dtype(device)
        fixed = costs.fixed_memory(self.stages, stage, sizes).total
        weights = layers * layer_weight_bytes(shape, BITS, device, dtype)
        slot = 2 * layers * kv_token_bytes(shape, BITS, dtype)
        return (costs.limit_bytes(device) - fixed - weights) // slot


def spread(layers: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Boundaries [N+1] of stages whose slowest takes the least time, at least one layer each:
    `speeds` are layers per second.
    """
    counts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        soonest = min(range(len(speeds)), key=lambda j: (counts[j] + 1) / speeds[j])
        counts[soonest] += 1
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return tuple(bounds)


def _request_layer_s(costs: CostModel, device: Device, lengths: RequestLengths) -> float:
    """Seconds of a layer for a mean request: its prompt, and its share of decode steps."""
    latency, dtype = costs.latency, costs.dtype(device)
    prompt, output = lengths.prompts.mean, lengths.outputs.mean
    prefill_s = latency.layer_prefill_s(device, BITS, 1, round(prompt), dtype)
    context = round(prompt + output / 2)
    step_s = latency.layer_decode_s(device, BITS, TYPICAL_BATCH, context, dtype)
    return prefill_s + output * step_s / TYPICAL_BATCH
