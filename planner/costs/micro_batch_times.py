"""Seconds of one layer, and of embedding and head, for the micro-batches of a batch or of a job.

In a batch all requests are alike. In a job micro-batches have their mean size, a prefill the mean
over prompts, and a decode step the mean context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np

from planner.cluster.device import Device
from planner.costs.latency_model import LatencyModel
from planner.lengths import Lengths
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import JobPasses
from planner.workload import Workload

PROMPT_CLASSES = 12
"""Prompts are timed in so many classes of equal numbers, each at its mean length."""

_MEANS: WeakKeyDictionary[LatencyModel, dict[Hashable, float]] = WeakKeyDictionary()
"""Mean seconds of prefills, which a search asks for again and again, by latency model."""


@dataclass(frozen=True)
class MicroBatchTimes:
    """Times of micro-batches by `latency`; sizes may be fractions, between which time is linear.

    `prompts`: lengths with the share of requests that have them.
    """

    latency: LatencyModel
    prefill_requests: float
    decode_requests: float
    prompts: tuple[tuple[int, float], ...]
    context: int

    @classmethod
    def of_batch(
        cls, latency: LatencyModel, workload: Workload, sizes: MicroBatches
    ) -> MicroBatchTimes:
        """The full micro-batches of a batch at the mean context: with half of the new tokens
        (LLM-PQ eq. 6).
        """
        context = workload.prompt_length + workload.new_tokens // 2
        prompts = ((workload.prompt_length, 1.0),)
        return cls(latency, sizes.prefill, sizes.decode, prompts, context)

    @classmethod
    def of_job(cls, latency: LatencyModel, lengths: Lengths, passes: JobPasses) -> MicroBatchTimes:
        """The mean micro-batches of a job."""
        context = round(lengths.mean_context)
        prompts = _classes(lengths)
        return cls(latency, passes.prefill_requests, passes.decode_requests, prompts, context)

    def prefill_s(self, device: Device, bits: int, dtype: str) -> float:
        """Seconds of a layer for a prefill micro-batch."""
        known = _MEANS.setdefault(self.latency, {})

        def mean_s(size: int) -> float:
            key = self.prompts, device.time_kind, bits, size, dtype
            if key not in known:
                layer_s = self.latency.layer_prefill_s
                known[key] = sum(
                    share * layer_s(device, bits, size, length, dtype)
                    for length, share in self.prompts
                )
            return known[key]

        return _at(self.prefill_requests, mean_s)

    def decode_s(self, device: Device, bits: int, dtype: str) -> float:
        """Seconds of a layer for a decode step."""
        layer_s = self.latency.layer_decode_s
        return _at(
            self.decode_requests, lambda size: layer_s(device, bits, size, self.context, dtype)
        )

    def embedding_s(self, device: Device, dtype: str) -> tuple[float, float]:
        """Seconds of the embedding for a prefill and for a decode micro-batch."""
        tokens = self.prefill_requests * sum(length * share for length, share in self.prompts)
        prefill, decode = (
            _at(count, lambda rows: self.latency.embedding_s(device, rows, dtype))
            for count in (tokens, self.decode_requests)
        )
        return prefill, decode

    def final_s(self, device: Device, dtype: str) -> tuple[float, float]:
        """Seconds of final norm, head and sampling for a prefill and for a decode micro-batch."""
        prefill, decode = (
            _at(count, lambda rows: self.latency.final_s(device, rows, dtype))
            for count in (self.prefill_requests, self.decode_requests)
        )
        return prefill, decode


@cache
def _classes(lengths: Lengths) -> tuple[tuple[int, float], ...]:
    """The mean prompt of each class, and the share of requests in it."""
    ordered = np.sort(np.array(lengths.prompt_tokens))
    parts = np.array_split(ordered, min(PROMPT_CLASSES, len(np.unique(ordered))))
    return tuple((round(float(part.mean())), len(part) / len(ordered)) for part in parts)


def _at(size: float, seconds: Callable[[int], float]) -> float:
    """Seconds at a size between whole ones; sizes are at least 1."""
    low = max(1, math.floor(size))
    share = size - low
    if share <= 0:
        return seconds(low)
    return (1 - share) * seconds(low) + share * seconds(low + 1)
