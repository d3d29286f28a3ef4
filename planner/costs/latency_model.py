"""The interface of latency models: seconds of a decoder layer, embedding or head on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.model.shape import ModelShape
from planner.scheduling import Phase


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of a layer's attention, which goes by requests and their lengths, and of its rest,
    which goes by new tokens (profiled apart as in ExeGPT section 3).
    """

    attention_s: float
    rest_s: float

    @property
    def whole_s(self) -> float:
        return self.attention_s + self.rest_s


class LatencyModel(ABC):
    """Times of the parts of the model `shape`; a 16-bit layer stands for the compute type `dtype`,
    whatever its width.
    """

    shape: ModelShape

    @abstractmethod
    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        """Seconds of a layer; `length` is that of each prompt, or of each context before the new
        token.
        """

    @abstractmethod
    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Seconds of looking up `tokens` tokens on the first stage."""

    @abstractmethod
    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Seconds of final norm, LM head and sampling of `rows` tokens on the last stage."""

    @abstractmethod
    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Where the times come from; the text starts with `estimated` if none is measured."""

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        """Seconds of one decoder layer over the prompts of a micro-batch."""
        parts = self.layer_seconds(device, bits, "prefill", micro_batch, prompt_length, dtype)
        return parts.whole_s

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        """Seconds of one decoder layer for a new token a request after `context_length` others."""
        parts = self.layer_seconds(device, bits, "decode", micro_batch, context_length, dtype)
        return parts.whole_s


class DerivedLatency(LatencyModel):
    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.shape = model.shape

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        return self.model.layer_seconds(device, bits, phase, micro_batch, length, dtype)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self.model.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self.model.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return self.model.provenance(device, dtype, bits)


class RememberedLatency(DerivedLatency):
    def __init__(self, model: LatencyModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[Hashable, ...], float] = {}
        self._layers: dict[tuple[Hashable, ...], LayerSeconds] = {}

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        key = device.time_kind, bits, phase, micro_batch, length, dtype
        if key not in self._layers:
            workload = bits, phase, micro_batch, length, dtype
            self._layers[key] = self.model.layer_seconds(device, *workload)
        return self._layers[key]

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self._once(self.model.embedding_s, device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self._once(self.model.final_s, device, rows, dtype)

    def _once(self, seconds: Callable[..., float], device: Device, *workload: Hashable) -> float:
        key = seconds.__name__, device.time_kind, *workload
        if key not in self._known:
            self._known[key] = seconds(device, *workload)
        return self._known[key]
