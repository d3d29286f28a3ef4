"""A model of the paper with a task: the pipeline of all rivals, its bounds, and what is found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from benchmarks.reproduction.latency_bounds.fixed_batches import (
    BatchTimeline,
    FixedBatch,
    batch_timeline,
)
from benchmarks.reproduction.latency_bounds.iteration_level import mean_held_tokens
from benchmarks.reproduction.latency_bounds.models import Model
from benchmarks.reproduction.latency_bounds.pipelines import Layout, Pipeline, Work
from planner.length_distribution import RequestLengths
from planner.workload import HOLES

QUANTILE = 0.99
"""Of outputs, whose latency is bounded (SLA b of section 7.6)."""
BATCH_STEP = 4
"""Batch sizes of FasterTransformer are its multiples (section 7.1)."""
LATENCY_SHARES = (0.1, 0.3, 0.7)
"""Quantiles of FasterTransformer's latencies over its batch sizes that are bounds."""
PREFILL_SPLITS = (1, 2, 4, 8)
"""Prefill micro-batches for each stage that DeepSpeed may have."""


@dataclass(frozen=True)
class Chosen:
    """A schedule in words, with its requests a second and the latency that is bounded."""

    label: str
    requests_per_s: float
    latency_s: float


class Scheduler(Protocol):
    """A way to schedule requests that finds its best sizes."""

    def best(self, bound_s: float) -> Chosen | None:
        """The most requests a second within the bound; None where nothing keeps it."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A model of the paper with requests of these lengths, on groups of whole nodes."""

    model: Model
    lengths: RequestLengths

    @cached_property
    def pipeline(self) -> Pipeline:
        """The most tensor parallelism within a node, and one stage a node: all rivals have it."""
        devices = self.model.costs.cluster.devices
        layout = Layout(self.model.whole_node, len(devices))
        found = Pipeline.of(self.model.costs, devices, layout, self.lengths)
        assert found is not None
        return found

    @cached_property
    def bounded_output(self) -> int:
        """Tokens of the output whose latency is bounded."""
        return self.lengths.outputs.quantile(QUANTILE)

    @cached_property
    def batches(self) -> tuple[BatchTimeline, ...]:
        """FasterTransformer's batches of every size that memory has room for."""
        return tuple(self._fixed(1))

    @cached_property
    def hybrid_batches(self) -> tuple[BatchTimeline, ...]:
        """DeepSpeed's, which may have more prefill micro-batches."""
        return tuple(each for split in PREFILL_SPLITS for each in self._fixed(split))

    def _fixed(self, prefill_split: int) -> Iterator[BatchTimeline]:
        stages = len(self.pipeline.stages)
        requests = BATCH_STEP
        while True:
            decode = min(stages, requests)
            batch = FixedBatch(requests, min(prefill_split * stages, requests), decode)
            if not self._has_room(batch):
                return
            yield batch_timeline(self.pipeline.times, self.lengths, batch)
            requests += BATCH_STEP

    def _has_room(self, batch: FixedBatch) -> bool:
        prompt, output = self.lengths.prompts.longest, self.lengths.outputs.longest
        prefill = math.ceil(batch.requests / batch.prefill_micro_batches)
        decode = math.ceil(batch.requests / batch.decode_micro_batches)
        work = Work(prefill, prompt, decode, output)
        return self.pipeline.token_slots(work) >= batch.requests * (prompt + output)

    @cached_property
    def bounds_s(self) -> tuple[float, ...]:
        """The bounds of section 7.1: quantiles of FasterTransformer's latencies, and none."""
        latencies = [each.latency_of(self.bounded_output) for each in self.batches]
        return (*np.quantile(latencies, LATENCY_SHARES).tolist(), math.inf)

    @cached_property
    def most_in_group(self) -> int:
        """Requests of an iteration-level group for whose tokens memory has room."""
        stages, prompt = len(self.pipeline.stages), self.lengths.prompts.mean
        each, low, high = mean_held_tokens(self.lengths), 0, 2**14
        while low < high:
            middle = (low + high + 1) // 2
            work = Work(1, prompt, middle, self.lengths.outputs.longest)
            room = (1 - HOLES) * self.pipeline.token_slots(work)
            low, high = (middle, high) if middle * stages * each <= room else (low, middle - 1)
        return low
