"""Times that follow from others by what the roofline, or a run, says of a difference: of
tensor-parallel groups, of layers with 8-bit keys and values, of devices found slower than modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cluster.device import AS_MODELLED, Device, MeasuredSum
from planner.costs.communication import Collectives
from planner.costs.latency_model import DerivedLatency, LatencyModel, LayerSeconds
from planner.costs.roofline import RooflineLatency
from planner.model.families import FAMILIES
from planner.model.tensor_parallel import largest_rank_shape, layer_sums
from planner.scheduling import Phase
from quant.scheme import DTYPE_BYTES, FULL_BITS

_LOGIT_BYTES = 4


class GroupLatency(DerivedLatency):
    """The times of `single`; of groups, scaled as the roofline changes with the division, plus a
    rank's sums. Their decode steps are not replayed, and other systems have no `own_layers`.
    """

    def __init__(
        self,
        single: LatencyModel,
        kv_bits: int = FULL_BITS,
        sums: Sequence[MeasuredSum] = (),
        own_layers: bool = True,
    ) -> None:
        super().__init__(single, kv_bits, sums, own_layers)
        self._own_layers = own_layers
        self._kv_bits = kv_bits
        self._sums = sums

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        one = replace(device, ranks=()) if device.ranks else device
        workload = (one, bits, phase, micro_batch, length, dtype)
        single = self.model.layer_seconds(*workload)
        if not device.ranks:
            return single
        whole, part = (each.layer_seconds(*workload) for each in self._estimates(device))
        tokens = micro_batch * length if phase == "prefill" else micro_batch
        sums, each = Collectives.of(device, self._sums), tokens * DTYPE_BYTES[dtype]
        widths = layer_sums(self.shape, FAMILIES[self.shape.model_type].architecture)
        rest_s = single.rest_s * (part.rest_s / whole.rest_s)
        if self.shape.experts is not None:
            asked = one, bits, tokens, dtype
            held = [model.experts_s(*asked) for model in self._estimates(device)]
            others = (part.rest_s - held[1]) / (whole.rest_s - held[0])
            experts_s = min(self.model.experts_s(*asked), single.rest_s)
            rest_s = (single.rest_s - experts_s) * others + experts_s * (held[1] / held[0])
        return LayerSeconds(
            single.attention_s * (part.attention_s / whole.attention_s),
            rest_s + sum(sums.sum_s(each * width) for width in widths),
        )

    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        asked = replace(device, ranks=()), bits, tokens, dtype
        seconds = self.model.experts_s(*asked)
        if not device.ranks or self.shape.experts is None:
            return seconds
        whole_s, part_s = (each.experts_s(*asked) for each in self._estimates(device))
        return seconds * (part_s / whole_s)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        seconds = self.model.embedding_s(replace(device, ranks=()), tokens, dtype)
        if not device.ranks:
            return seconds
        shape, sums = self.shape, Collectives.of(device, self._sums)
        widths = shape.word_embedding_size, shape.message_width - shape.hidden_size
        each = tokens * DTYPE_BYTES[dtype]
        return seconds + sum(sums.sum_s(each * width) for width in widths if width)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        """Every rank has a part of the vocabulary; the first one gathers the logits and samples."""
        one = replace(device, ranks=())
        seconds = self.model.final_s(one, rows, dtype)
        if not device.ranks:
            return seconds
        whole, part = self._estimates(device)
        sampling_s = whole.sampling_s(one, rows, dtype)
        products = part.final_s(one, rows, dtype) - part.sampling_s(one, rows, dtype)
        factor = (products + sampling_s) / whole.final_s(one, rows, dtype)
        gathered = rows * self.shape.vocab_size * _LOGIT_BYTES
        return seconds * factor + Collectives.of(device, self._sums).gather_s(gathered)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        text = self.model.provenance(replace(device, ranks=()), dtype, bits)
        if not device.ranks:
            return text
        measured = Collectives.of(device, self._sums).measured
        sums = f"measured ({measured.source})" if measured else "estimated by its links"
        return f"{text}; divided by {device.degree} ranks, whose sums are {sums}"

    def _estimates(self, device: Device) -> tuple[RooflineLatency, RooflineLatency]:
        part = largest_rank_shape(self.shape, device.degree)
        whole = RooflineLatency(self.shape, self._kv_bits, own_layers=self._own_layers)
        return whole, replace(whole, shape=part, replays=False)


class EightBitCacheLatency(DerivedLatency):
    """Times of `measured` in the compute type, attention scaled as the roofline's by `kv_bits`."""

    def __init__(self, measured: LatencyModel, kv_bits: int) -> None:
        super().__init__(measured, kv_bits)
        self._kv_bits = kv_bits

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        workload = (device, bits, phase, micro_batch, length, dtype)
        full, coded = (
            RooflineLatency(self.shape, kv_bits).layer_seconds(*workload).attention_s
            for kv_bits in (FULL_BITS, self._kv_bits)
        )
        measured = self.model.layer_seconds(*workload)
        return LayerSeconds(measured.attention_s * (coded / full), measured.rest_s)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        text = self.model.provenance(device, dtype, bits)
        return f"{text}; change by {self._kv_bits}-bit keys and values estimated"


class SlowedLatency(DerivedLatency):
    """Times of `model` by each device's `slowdown`; embedding and head have that of decode."""

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        modelled = self.model.layer_seconds(device, bits, phase, micro_batch, length, dtype)
        if device.slowdown == AS_MODELLED:
            return modelled
        slowdown = device.slowdown
        factor = slowdown.prefill if phase == "prefill" else slowdown.decode
        return LayerSeconds(factor * modelled.attention_s, factor * modelled.rest_s)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        return device.slowdown.decode * self.model.embedding_s(device, tokens, dtype)

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        return device.slowdown.decode * self.model.final_s(device, rows, dtype)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        text = self.model.provenance(device, dtype, bits)
        slowdown = device.slowdown
        if slowdown == AS_MODELLED:
            return text
        return (
            f"{text}; times {slowdown.prefill:.3g} in prefill and {slowdown.decode:.3g} in decode, "
            "as a run of an earlier plan measured"
        )
