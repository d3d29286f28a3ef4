"""Times of tensor-parallel groups, from those of single devices and of the sums between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster.device import Device, MeasuredSum
from planner.costs.collectives import Collectives
from planner.costs.latency_model import LatencyModel, LayerSeconds, TimedInParts
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from planner.phases import Phase
from quant.scheme import DTYPE_BYTES, FULL_BITS

_SUMS_PER_LAYER = 2  # after attention's output, and after the MLP's
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class GroupLatency(TimedInParts):
    """The times of `single` for devices, and for groups those of a rank's part with its sums.

    Attention of a rank's heads, and its part of the rest, take the time of the whole on one device
    as the roofline's time changes with the division; what is measured of the whole so carries over.
    `sums`, which are measured ones, belong to the rest.
    """

    single: LatencyModel
    kv_bits: int = FULL_BITS
    sums: tuple[MeasuredSum, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The model whose parts are timed."""
        return self.single.shape

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        """Seconds of attention over a rank's heads, and of the rest of its part with the sums."""
        one = replace(device, ranks=()) if device.ranks else device
        workload = (one, bits, phase, micro_batch, length, dtype)
        single = self.single.layer_seconds(*workload)
        if not device.ranks:
            return single
        whole, part = (each.layer_seconds(*workload) for each in self._estimates(device))
        tokens = micro_batch * length if phase == "prefill" else micro_batch
        rest_s = single.rest_s * (part.rest_s / whole.rest_s)
        return LayerSeconds(
            single.attention_s * (part.attention_s / whole.attention_s),
            rest_s + self._sums_s(device, tokens, dtype),
        )

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        """Seconds of looking up `tokens` tokens, each of which one rank knows, and their sum."""
        one = replace(device, ranks=())
        seconds = self.single.embedding_s(one, tokens, dtype)
        if not device.ranks:
            return seconds
        summed = tokens * self.shape.word_embedding_size * DTYPE_BYTES[dtype]
        return seconds + Collectives.of(device, self.sums).sum_s(summed)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Seconds of final norm, LM head and sampling of `rows` tokens on the last stage.

        Every rank has a part of the vocabulary; the first one gathers the logits and samples.
        """
        one = replace(device, ranks=())
        seconds = self.single.final_s(one, rows, dtype)
        if not device.ranks:
            return seconds
        whole, part = self._estimates(device)
        sampling_s = whole.sampling_s(one, rows, dtype)
        products = part.final_s(one, rows, dtype) - part.sampling_s(one, rows, dtype)
        factor = (products + sampling_s) / whole.final_s(one, rows, dtype)
        gathered = rows * self.shape.vocab_size * _LOGIT_BYTES
        return seconds * factor + Collectives.of(device, self.sums).gather_s(gathered)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        """Where the times come from; of a group where its sums come from too."""
        text = self.single.provenance(replace(device, ranks=()), dtype, bits)
        if not device.ranks:
            return text
        measured = Collectives.of(device, self.sums).measured
        sums = f"measured ({measured.source})" if measured else "estimated by its links"
        return f"{text}; divided by {device.degree} ranks, whose sums are {sums}"

    def _sums_s(self, device: Device, tokens: int, dtype: str) -> float:
        summed = tokens * self.shape.hidden_size * DTYPE_BYTES[dtype]
        return _SUMS_PER_LAYER * Collectives.of(device, self.sums).sum_s(summed)

    def _estimates(self, device: Device) -> tuple[RooflineLatency, RooflineLatency]:
        """The roofline of the whole model, and of a rank's part."""
        part = largest_rank_shape(self.shape, device.degree)
        return RooflineLatency(self.shape, self.kv_bits), RooflineLatency(part, self.kv_bits)
