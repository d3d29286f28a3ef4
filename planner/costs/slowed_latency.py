"""Times of devices that a run has found to be slower, or faster, than modelled."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cluster.device import AS_MODELLED, Device
from planner.costs.latency_model import LatencyModel, LayerSeconds, TimedInParts
from planner.model.finding import ModelShape
from planner.phases import Phase


class SlowedLatency(TimedInParts):
    """The times of `model`, multiplied by the `slowdown` of each device.

    Layers of prefill and of decode have a factor each. Embedding and head, whose phase a latency
    model does not know, have that of decode, where they weigh most.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._model = model

    @property
    def shape(self) -> ModelShape:
        """The model whose parts are timed."""
        return self._model.shape

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        """Seconds of attention and of the rest of one decoder layer, by the factor of its phase."""
        modelled = self._model.layer_seconds(device, bits, phase, micro_batch, length, dtype)
        if device.slowdown == AS_MODELLED:
            return modelled
        slowdown = device.slowdown
        factor = slowdown.prefill if phase == "prefill" else slowdown.decode
        return LayerSeconds(factor * modelled.attention_s, factor * modelled.rest_s)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Seconds of looking up `tokens` tokens on the first stage."""
        return device.slowdown.decode * self._model.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Seconds of final norm, LM head and sampling of `rows` tokens on the last stage."""
        return device.slowdown.decode * self._model.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        text = self._model.provenance(device, dtype, bits)
        slowdown = device.slowdown
        if slowdown == AS_MODELLED:
            return text
        return (
            f"{text}; times {slowdown.prefill:.3g} in prefill and {slowdown.decode:.3g} in decode, "
            "as a run of an earlier plan measured"
        )
