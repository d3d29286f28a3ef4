"""What a latency model answers: seconds of one decoder layer, embedding or head on one device."""

from __future__ import annotations

from typing import Protocol

from planner.device import Device
from planner.model_shape import ModelShape


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

    def provenance(self, device: Device) -> str:
        """Where this device's times come from; starts with `estimated` if none is measured."""
