"""Times of tensor-parallel groups, from those of single devices and of the sums between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.cluster.links import MeasuredSum
from planner.costs.collectives import Collectives
from planner.costs.latency_model import LatencyModel
from planner.costs.roofline import RooflineLatency
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import largest_rank_shape
from quant.scheme import DTYPE_BYTES, FULL_BITS

_SUMS_PER_LAYER = 2  # after attention's output, and after the MLP's
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class GroupLatency:
    """The times of `single` for devices, and for groups those of a rank's part with its sums.

    A rank's part takes the time of the whole on one device as the roofline's time changes with the
    division; what is measured of the whole so carries over. `sums` are measured ones.
    """

    single: LatencyModel
    kv_bits: int = FULL_BITS
    sums: tuple[MeasuredSum, ...] = ()

    @property
    def shape(self) -> ModelShape:
        """The model whose parts are timed."""
        return self.single.shape

    def layer_prefill_s(
        self, device: Device, bits: int, micro_batch: int, prompt_length: int, dtype: str
    ) -> float:
        """Seconds of one decoder layer over the prompts of a micro-batch."""
        if not device.ranks:
            return self.single.layer_prefill_s(device, bits, micro_batch, prompt_length, dtype)
        one = replace(device, ranks=())
        workload = (one, bits, micro_batch, prompt_length, dtype)
        whole, part = self._estimates(device)
        factor = part.layer_prefill_s(*workload) / whole.layer_prefill_s(*workload)
        sums_s = self._sums_s(device, micro_batch * prompt_length, dtype)
        return self.single.layer_prefill_s(*workload) * factor + sums_s

    def layer_decode_s(
        self, device: Device, bits: int, micro_batch: int, context_length: int, dtype: str
    ) -> float:
        if not device.ranks:
            return self.single.layer_decode_s(device, bits, micro_batch, context_length, dtype)
        one = replace(device, ranks=())
        workload = (one, bits, micro_batch, context_length, dtype)
        whole, part = self._estimates(device)
        factor = part.layer_decode_s(*workload) / whole.layer_decode_s(*workload)
        sums_s = self._sums_s(device, micro_batch, dtype)
        return self.single.layer_decode_s(*workload) * factor + sums_s

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
