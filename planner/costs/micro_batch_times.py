"""Seconds of micro-batches whose sizes are means, or whose prompts are unlike.

In a batch all requests are alike. In a job micro-batches have their mean size, a prefill the mean
over prompts, and a decode step the mean context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, floor
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from planner.cluster.device import Device
from planner.costs.latency_model import LatencyModel
from planner.lengths import Lengths
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import FloatArray, JobPasses
from planner.workload import Workload

PROMPT_CLASSES = 12
"""Prompts are timed in so many classes of equal numbers, each at its mean length."""

_MEANS: WeakKeyDictionary[LatencyModel, dict[Hashable, float]] = WeakKeyDictionary()
"""Mean seconds of prefills, which a search asks for again and again, by latency model."""


@dataclass(frozen=True)
class MicroBatchTimes:
    """Times of micro-batches, linear between whole sizes; `prompts`: lengths with the share of
    requests of each.
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
        """Full micro-batches at the mean context, with half of the new tokens (LLM-PQ eq. 6)."""
        context = workload.prompt_length + workload.new_tokens // 2
        prompts = ((workload.prompt_length, 1.0),)
        return cls(latency, sizes.prefill, sizes.decode, prompts, context)

    @classmethod
    def of_job(cls, latency: LatencyModel, lengths: Lengths, passes: JobPasses) -> MicroBatchTimes:
        context = round(lengths.mean_context)
        prompts = _classes(lengths)
        return cls(latency, passes.prefill_requests, passes.decode_requests, prompts, context)

    def prefill_s(self, device: Device, bits: int, dtype: str) -> float:
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
        layer_s = self.latency.layer_decode_s
        return _at(
            self.decode_requests, lambda size: layer_s(device, bits, size, self.context, dtype)
        )

    def embedding_s(self, device: Device, dtype: str) -> tuple[float, float]:
        tokens = self.prefill_requests * sum(length * share for length, share in self.prompts)
        prefill, decode = (
            _at(count, lambda rows: self.latency.embedding_s(device, rows, dtype))
            for count in (tokens, self.decode_requests)
        )
        return prefill, decode

    def final_s(self, device: Device, dtype: str) -> tuple[float, float]:
        prefill, decode = (
            _at(count, lambda rows: self.latency.final_s(device, rows, dtype))
            for count in (self.prefill_requests, self.decode_requests)
        )
        return prefill, decode


@cache
def _classes(lengths: Lengths) -> tuple[tuple[int, float], ...]:
    ordered = np.sort(np.array(lengths.prompt_tokens))
    parts = np.array_split(ordered, min(PROMPT_CLASSES, len(np.unique(ordered))))
    return tuple((round(float(part.mean())), len(part) / len(ordered)) for part in parts)


def _at(size: float, seconds: Callable[[int], float]) -> float:
    """As `between` for sizes from 1, but for the last digit, by which a search tells plans that are
    as good.
    """
    low = max(1, floor(size))
    share = size - low
    if share <= 0:
        return seconds(low)
    return (1 - share) * seconds(low) + share * seconds(low + 1)


_Seconds = TypeVar("_Seconds", float, FloatArray)


def between(at: float, low: int, high: int, seconds: Callable[[int], _Seconds]) -> _Seconds:
    """Seconds at a number between two whole ones, where time is taken as linear."""
    below = seconds(low)
    if at <= low:
        return below
    return below + (at - low) / (high - low) * (seconds(high) - below)


def together_s(prefill_s: FloatArray, decode_s: FloatArray, least_s: FloatArray) -> FloatArray:
    """Seconds of prompts and decode steps in one micro-batch: both less the least step, as weights
    are read once, and at least either. Exact where time is a constant and a sum over requests.
    """
    both_s = prefill_s + decode_s - least_s
    return np.maximum(np.maximum(prefill_s, decode_s), both_s)


LENGTH_STEP = 0.02  # relative

PartsOf = Callable[[int, int], tuple[FloatArray, FloatArray]]
"""Seconds of attention and of the rest [N] for so many prompts that are all so long."""


def unlike_prompts_s(prompts: Sequence[int], parts: PartsOf) -> FloatArray:
    """Seconds of a micro-batch of `prompts` [N]: the rest of a layer as for prompts of their mean
    length, attention as each prompt's share among as many of its own length (alone it would be 10
    to 15 % less on a CPU).
    """
    requests, mean = len(prompts), sum(prompts) / len(prompts)
    low, high = lengths_around(mean)
    rest_s = between(mean, low, high, lambda length: parts(requests, length)[1])
    lengths = Counter(near_length(prompt) for prompt in prompts)
    attention_s = [count * parts(requests, length)[0] for length, count in lengths.items()]
    return np.asarray(np.sum(attention_s, axis=0) / requests + rest_s)


def near_length(tokens: int) -> int:
    """A length within half a `LENGTH_STEP` of this one, so that latency models are asked for few;
    short ones exact.
    """
    step = max(1, round(tokens * LENGTH_STEP))
    return step * ((2 * tokens + step) // (2 * step))


def lengths_around(length: float) -> tuple[int, int]:
    """The whole lengths, some `LENGTH_STEP` apart, between which time is taken as linear."""
    step = 1 << max(0, floor(length * LENGTH_STEP).bit_length() - 1)
    return floor(length / step) * step, ceil(length / step) * step
