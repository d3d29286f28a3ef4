"""Times of layers with 8-bit keys and values, from times that were measured with 16-bit ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.costs.latency_model import LatencyModel, LayerSeconds, TimedInParts
from planner.costs.roofline import RooflineLatency
from planner.model.finding import ModelShape
from planner.phases import Phase
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class EightBitCacheLatency(TimedInParts):
    """Times of `measured`, their attention scaled as the roofline's changes with `kv_bits`.

    Profiles are of layers whose keys and values are in the compute type.
    """

    measured: LatencyModel
    kv_bits: int

    @property
    def shape(self) -> ModelShape:
        """The model that the times are of."""
        return self.measured.shape

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        """Seconds of attention and of the rest of one decoder layer."""
        workload = (device, bits, phase, micro_batch, length, dtype)
        full, coded = (each.layer_seconds(*workload).attention_s for each in self._estimates())
        measured = self.measured.layer_seconds(*workload)
        return LayerSeconds(measured.attention_s * (coded / full), measured.rest_s)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return self.measured.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return self.measured.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """The provenance of `measured`, with the note that the change is estimated."""
        text = self.measured.provenance(device, dtype, bits)
        return f"{text}; change by {self.kv_bits}-bit keys and values estimated"

    def _estimates(self) -> tuple[RooflineLatency, RooflineLatency]:
        return RooflineLatency(self.shape, FULL_BITS), RooflineLatency(self.shape, self.kv_bits)
