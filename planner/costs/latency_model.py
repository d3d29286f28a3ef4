"""The interface of latency models: seconds of a decoder layer, embedding or head on a device; and
by them seconds of micro-batches whose sizes are means, or whose prompts are unlike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, floor
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from weakref import WeakKeyDictionary

import numpy as np

from planner.cluster.device import Device
from planner.lengths import NO_HEADS, Lengths, PlannedHeads
from planner.model.shape import ModelShape
from planner.optimiser.problem import FloatArray, JobPasses
from planner.scheduling import Phase
from planner.workload import Job, MicroBatches, Workload


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of a layer's attention, which goes by requests and their lengths, and of its rest,
    which goes by new tokens (profiled apart as in ExeGPT section 3); of the rest `experts_s` are
    those of experts, where they are told apart.
    """

    attention_s: float
    rest_s: float
    experts_s: float = 0.0

    @property
    def whole_s(self) -> float:
        return self.attention_s + self.rest_s


class HostedSeconds(NamedTuple):
    """Seconds of experts in the host's memory: of tokens on their way there and back, of its CPU's
    products of them, and, in place of both, of weights on their way to the device and products.
    """

    copies_s: float
    computed_s: float
    streamed_s: float

    @property
    def there_s(self) -> float:
        return self.copies_s + self.computed_s


class LatencyModel(ABC):
    """Times of the parts of the model `shape`; a 16-bit layer stands for the compute type `dtype`,
    whatever its width. Where layers are of several kinds, those of each are asked of `of_kind`.
    """

    shape: ModelShape

    def of_kind(self, kind: int) -> LatencyModel:
        """Times of a model with only layers of that kind of `shape`, the same object each time."""
        return self._of_kinds[kind] if self.shape.kinds else self

    @cached_property
    def _of_kinds(self) -> tuple[LatencyModel, ...]:
        return tuple(self._of_kind(kind) for kind in range(len(self.shape.kinds)))

    @abstractmethod
    def _of_kind(self, kind: int) -> LatencyModel:
        """The model of one of several kinds, made anew."""

    @abstractmethod
    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        """Seconds of a layer; `length` is that of each prompt, or context before the new token."""

    @abstractmethod
    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        """About the seconds of the products of a layer's experts, of its `rest_s`."""

    @abstractmethod
    def hosted_experts_s(
        self, device: Device, bits: int, tokens: int, dtype: str
    ) -> HostedSeconds: ...

    @cached_property
    def parts(self) -> LayerParts:
        """Times of parts of layers; `shape` has layers of one kind."""
        return LayerParts(*(PartLatency(self, part) for part in get_args(Part)))

    @abstractmethod
    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Seconds of looking up `tokens` tokens on the first stage."""

    @abstractmethod
    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Seconds of final norm, LM head and sampling of `rows` tokens on the last stage."""

    @abstractmethod
    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Where the times come from; the text starts with `estimated` if none is measured."""

    def spread(self, device: Device, dtype: str, bits: Sequence[int]) -> float:
        """By what share of them the times of one pass vary, as measured; 0 where none were."""
        return 0.0

    def layer_prefill_s(
        self,
        device: Device,
        bits: int,
        micro_batch: int,
        prompt_length: int,
        dtype: str,
        shared: int = 0,
    ) -> float:
        """Seconds of a layer, of prompts whose first `shared` tokens it has in its cache."""

        def parts(length: int) -> tuple[float, float]:
            each = self.layer_seconds(device, bits, "prefill", micro_batch, length, dtype)
            return each.attention_s, each.rest_s

        return sum(behind_head(prompt_length, shared, parts))

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        parts = self.layer_seconds(device, bits, "decode", micro_batch, context_length, dtype)
        return parts.whole_s


_Part = TypeVar("_Part", float, FloatArray)


def behind_head(
    length: int, shared: int, parts: Callable[[int], tuple[_Part, _Part]]
) -> tuple[_Part, _Part]:
    """Seconds of attention and of the rest for prompts of `length` whose first `shared` tokens are
    there, all but one at most. By those of whole prompts: attention is a longer one's less a
    shorter one's, the rest that of the tokens that are left.
    """
    there = min(shared, length - 1)
    if there <= 0:
        return parts(length)
    attention_s = parts(length)[0] - parts(there)[0] + parts(1)[0]
    return attention_s, parts(length - there)[1]


class DerivedLatency(LatencyModel):
    def __init__(self, model: LatencyModel, *own: Any) -> None:
        self.model, self._own = model, own  # all that a subclass is made with
        self.shape = model.shape

    def _of_kind(self, kind: int) -> LatencyModel:
        return type(self)(self.model.of_kind(kind), *self._own)

    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        return self.model.experts_s(device, bits, tokens, dtype)

    def hosted_experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> HostedSeconds:
        return self.model.hosted_experts_s(device, bits, tokens, dtype)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self.model.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self.model.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return self.model.provenance(device, dtype, bits)

    def spread(self, device: Device, dtype: str, bits: Sequence[int]) -> float:
        return self.model.spread(device, dtype, bits)


Part = Literal["rest", "experts", "hosted"]


class PartLatency(DerivedLatency):
    """Times of layers without their experts, or of these alone, where the layer lies or on the
    host, as is sooner; those of both parts at one bitwidth are those of the layer.
    """

    def __init__(self, model: LatencyModel, part: Part) -> None:
        super().__init__(model, part)
        self.part = part

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        tokens = micro_batch * length if phase == "prefill" else micro_batch
        if self.part == "hosted":
            hosted = self.hosted_experts_s(device, bits, tokens, dtype)
            return LayerSeconds(0.0, min(hosted.there_s, hosted.streamed_s))
        whole = self.model.layer_seconds(device, bits, phase, micro_batch, length, dtype)
        own_s = min(self.experts_s(device, bits, tokens, dtype), whole.rest_s)
        if self.part == "experts":
            return LayerSeconds(0.0, own_s)
        return LayerSeconds(whole.attention_s, whole.rest_s - own_s)


class LayerParts(NamedTuple):
    rest: LatencyModel
    experts: LatencyModel
    hosted: LatencyModel


_Times = TypeVar("_Times", float, HostedSeconds)


class RememberedLatency(DerivedLatency):
    def __init__(self, model: LatencyModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[Hashable, ...], Any] = {}
        self._layers: dict[tuple[Hashable, ...], LayerSeconds] = {}

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        key = device.time_kind, bits, phase, micro_batch, length, dtype
        if key not in self._layers:
            self._layers[key] = self.model.layer_seconds(device, *key[1:])
        return self._layers[key]

    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        return self._once(self.model.experts_s, device, bits, tokens, dtype)

    def hosted_experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> HostedSeconds:
        return self._once(self.model.hosted_experts_s, device, bits, tokens, dtype)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self._once(self.model.embedding_s, device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self._once(self.model.final_s, device, rows, dtype)

    def _once(self, seconds: Callable[..., _Times], device: Device, *workload: Hashable) -> _Times:
        key = seconds.__name__, device.time_kind, *workload
        if key not in self._known:
            self._known[key] = seconds(device, *workload)
        found: _Times = self._known[key]
        return found


PROMPT_CLASSES = 12
"""Prompts are timed in so many classes of equal numbers, each at its mean length."""

_MEANS: WeakKeyDictionary[LatencyModel, dict[Hashable, float]] = WeakKeyDictionary()
"""Mean seconds of prefills, which a search asks for again and again, by latency model."""


@dataclass(frozen=True)
class MicroBatchTimes:
    """Times of micro-batches, linear between whole sizes: of a batch all requests are alike; of a
    job micro-batches have their mean size, a prefill the mean over `prompts` (lengths with the
    share of requests of each), a decode step the mean context. The passes of `heads` count as parts
    of all `prefills`.
    """

    latency: LatencyModel
    prefill_requests: float
    decode_requests: float
    prompts: tuple[tuple[int, float], ...]
    context: int
    heads: PlannedHeads = NO_HEADS
    prefills: float = 1.0

    @classmethod
    def of_batch(
        cls, latency: LatencyModel, workload: Workload, sizes: MicroBatches
    ) -> MicroBatchTimes:
        """Full micro-batches at the mean context, with half of the new tokens (LLM-PQ eq. 6)."""
        context = workload.prompt_length + workload.new_tokens // 2
        prompts = ((workload.prompt_length, 1.0),)
        prefills = ceil(workload.global_batch / sizes.prefill)
        return cls(latency, sizes.prefill, sizes.decode, prompts, context, workload.heads, prefills)

    @classmethod
    def of_job(cls, latency: LatencyModel, job: Job, passes: JobPasses) -> MicroBatchTimes:
        context = round(job.lengths.mean_context)
        prompts = _classes(job.lengths)
        both = passes.prefill_requests, passes.decode_requests
        return cls(latency, *both, prompts, context, job.heads, max(1.0, passes.prefills))

    def of_kind(self, kind: int) -> MicroBatchTimes:
        """Those of a model with only layers of one kind."""
        return replace(self, latency=self.latency.of_kind(kind))

    def prefill_s(self, device: Device, bits: int, dtype: str) -> float:
        known = _MEANS.setdefault(self.latency, {})
        layer_s, shared = self.latency.layer_prefill_s, self.heads.shared_tokens

        def mean_s(size: int) -> float:
            key = self.prompts, shared, device.time_kind, bits, size, dtype
            if key not in known:
                known[key] = sum(
                    share * layer_s(device, bits, size, length, dtype, shared)
                    for length, share in self.prompts
                )
            return known[key]

        prefill_s = _at(self.prefill_requests, mean_s)
        if not self.heads.kept_tokens:
            return prefill_s
        return prefill_s + layer_s(device, bits, 1, self.heads.kept_tokens, dtype) / self.prefills

    def decode_s(self, device: Device, bits: int, dtype: str) -> float:
        layer_s = self.latency.layer_decode_s
        return _at(
            self.decode_requests, lambda size: layer_s(device, bits, size, self.context, dtype)
        )

    def embedding_s(self, device: Device, dtype: str) -> tuple[float, float]:
        mean = sum(self.heads.computed(length) * share for length, share in self.prompts)
        tokens = self.prefill_requests * mean
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
    """As `between` from 1 on, but for the last digit, by which searches tell equal plans."""
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


def unlike_prompts_s(prompts: Sequence[int], parts: PartsOf, shared: int = 0) -> FloatArray:
    """Seconds of a micro-batch of `prompts` [N], the first `shared` tokens of which are there: the
    rest of a layer as for prompts of their mean length, attention as each prompt's share among as
    many of its own length (alone it would be 10 to 15 % less on a CPU).
    """
    requests = len(prompts)
    mean = sum(max(1, each - shared) for each in prompts) / requests
    low, high = lengths_around(mean)
    rest_s = between(mean, low, high, lambda length: parts(requests, length)[1])
    lengths = Counter(near_length(prompt) for prompt in prompts)
    of_length = partial(parts, requests)
    attention_s = [
        count * behind_head(length, shared, of_length)[0] for length, count in lengths.items()
    ]
    return np.asarray(np.sum(attention_s, axis=0) / requests + rest_s)


def near_length(tokens: int) -> int:
    """A length within half a `LENGTH_STEP`, so that models are asked for few; short ones exact."""
    step = max(1, round(tokens * LENGTH_STEP))
    return step * ((2 * tokens + step) // (2 * step))


def lengths_around(length: float) -> tuple[int, int]:
    """The whole lengths, some `LENGTH_STEP` apart, between which time is taken as linear."""
    step = 1 << max(0, floor(length * LENGTH_STEP).bit_length() - 1)
    return floor(length / step) * step, ceil(length / step) * step
