"""What a latency model answers: seconds of one decoder layer, embedding or head on one device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from planner.cluster.device import Device
from planner.model.finding import ModelShape


class LatencyModel(Protocol):
    """Times of the parts of one model, `shape`; micro-batches in requests, lengths in tokens.

    `dtype` is a concrete compute type. A 16-bit layer stands for that type, whatever its width.
    """

    @property
    def shape(self) -> ModelShape:
        """The model that the times are of."""

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        """One decoder layer over the prompts of a micro-batch."""

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        """One decoder layer for one new token a request, `context_length` tokens before it."""

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Looking up `tokens` tokens on the first stage."""

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Final norm, LM head and sampling of `rows` tokens on the last stage."""

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Where this device's times of these bitwidths come from; starts with `estimated` if none
        is measured.
        """


class RememberedLatency:
    """`model`, asked once for each kind of device and micro-batch: searches ask again and again."""

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._known: dict[tuple[Hashable, ...], float] = {}

    @property
    def shape(self) -> ModelShape:
        """The model that the times are of."""
        return self._model.shape

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        """One decoder layer over the prompts of a micro-batch."""
        workload = bits, micro_batch, prompt_length, dtype
        return self._once(self._model.layer_prefill_s, device, *workload)

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        """One decoder layer for one new token a request."""
        workload = bits, micro_batch, context_length, dtype
        return self._once(self._model.layer_decode_s, device, *workload)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Looking up `tokens` tokens on the first stage."""
        return self._once(self._model.embedding_s, device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Final norm, LM head and sampling of `rows` tokens on the last stage."""
        return self._once(self._model.final_s, device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Where this device's times come from."""
        return self._model.provenance(device, dtype, bits)

    def _once(self, seconds: Callable[..., float], device: Device, *workload: Hashable) -> float:
        key = seconds.__name__, device.time_kind, *workload
        if key not in self._known:
            self._known[key] = seconds(device, *workload)
        return self._known[key]
