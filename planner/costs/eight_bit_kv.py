"""Times of layers with 8-bit keys and values, from times that were measured with 16-bit ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.costs.latency_model import LatencyModel
from planner.costs.roofline import RooflineLatency
from planner.model.finding import ModelShape
from quant.scheme import FULL_BITS


@dataclass(frozen=True)
class EightBitCacheLatency:
    """Times of `measured`, scaled as the roofline's times change with `kv_bits`.

    Profiles are of layers whose keys and values are in the compute type.
    """

    measured: LatencyModel
    kv_bits: int

    @property
    def shape(self) -> ModelShape:
        """The model that the times are of."""
        return self.measured.shape

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        full, coded = self._estimates()
        workload = (device, bits, micro_batch, prompt_length, dtype)
        factor = coded.layer_prefill_s(*workload) / full.layer_prefill_s(*workload)
        return self.measured.layer_prefill_s(*workload) * factor

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        full, coded = self._estimates()
        workload = (device, bits, micro_batch, context_length, dtype)
        factor = coded.layer_decode_s(*workload) / full.layer_decode_s(*workload)
        return self.measured.layer_decode_s(*workload) * factor

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
