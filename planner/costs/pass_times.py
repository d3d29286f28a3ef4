"""Seconds of a pass on the stages of a pipeline: one table by phase, requests and length, and hops.
Means of many passes are asked for too: between whole numbers and lengths time is linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from math import ceil, floor
from typing import Literal

import numpy as np

from planner.cluster.device import Device
from planner.costs.communication import TOKEN_ID_BYTES, Transfers, hidden_bytes, transfer_terms
from planner.costs.latency_model import (
    LatencyModel,
    LayerSeconds,
    behind_head,
    between,
    lengths_around,
    near_length,
    together_s,
    unlike_prompts_s,
)
from planner.costs.model import CostModel
from planner.model.layer_parts import LayerChoice
from planner.optimiser.problem import FloatArray
from planner.schedule.orca import MixedPass
from planner.schedule.passes import Pass, computed_tokens
from planner.scheduling import Phase
from quant.common.errors import SpecError
from quant.scheme import DTYPE_BYTES

_Work = Literal["prefill", "decode", "attention"]


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one pass: `compute` [N] by stage, `transfer` [N] to the next one, from the last to
    the first. `decode` [N]: the part that the decode steps of a pass of both phases would take;
    empty for one phase.
    """

    compute: tuple[float, ...]
    transfer: tuple[float, ...]
    decode: tuple[float, ...] = ()


@dataclass(frozen=True)
class OccupiedStages:
    devices: tuple[Device, ...]
    first_layer: tuple[int, ...]


def occupied_stages(devices: Sequence[Device], first_layer: Sequence[int]) -> OccupiedStages:
    """Leave out the stages that hold no layer, which are not run."""
    kept = [j for j in range(len(devices)) if first_layer[j] < first_layer[j + 1]]
    bounds = (*(int(first_layer[j]) for j in kept), int(first_layer[-1]))
    return OccupiedStages(tuple(devices[j] for j in kept), bounds)


class PassTable:
    """Seconds of passes, found once; `bitwidth` [L] indexes the costs' `placing.choices`. Of the
    workload's heads, prompts are restored and the rest of them is computed; the first pass computes
    the heads too. Passes of both phases say themselves what is there of each prompt.
    """

    def __init__(self, costs: CostModel, stages: OccupiedStages, bitwidth: Sequence[int]) -> None:
        bounds, chosen = stages.first_layer, [costs.placing.choices[each] for each in bitwidth]
        self.costs, self.devices = costs, stages.devices
        layers = list(zip(costs.shape.kind_of_layer, chosen, strict=True))
        self.counts = [Counter(layers[a:b]) for a, b in pairwise(bounds)]
        """Layers of each stage by kind and choice."""
        self._heads = costs.heads
        self._passes: dict[tuple[Phase, int, int, int], PassSeconds] = {}
        self._layers: dict[tuple[Phase, int, int], tuple[FloatArray, FloatArray]] = {}
        self._whole: dict[tuple[Phase, int, int], FloatArray] = {}

    @classmethod
    def of(
        cls,
        costs: CostModel,
        devices: Sequence[Device],
        first_layer: Sequence[int],
        bitwidth: Sequence[int],
    ) -> PassTable:
        """The table for `devices` with layers from `first_layer` [N+1]; SpecError unless whole."""
        layers, ends = costs.shape.layers, len(devices) + 1
        if len(first_layer) != ends or len(bitwidth) != layers or first_layer[-1] != layers:
            raise SpecError(
                f"{layers} layers on {len(devices)} devices need {ends} boundaries up to {layers} "
                f"and {layers} bitwidths, not {list(first_layer)} and {len(bitwidth)}"
            )
        return cls(costs, occupied_stages(devices, first_layer), bitwidth)

    @property
    def stages(self) -> int:
        return len(self.devices)

    @cached_property
    def _links(self) -> list[tuple[float, float, float]]:
        return link_terms(self.costs, self.devices)

    @cached_property
    def _copy_s(self) -> FloatArray:
        """Seconds in which each stage restores a head for one prompt [N]."""
        copy_s, stages = self.costs.head_copy_s, zip(self.devices, self.counts, strict=True)
        counted = [(device, counts.items()) for device, counts in stages]
        return np.array([sum(n * copy_s(d, kind) for (kind, _), n in own) for d, own in counted])

    def seconds(self, each: Pass) -> PassSeconds:
        found = self._seconds(each)
        if each.phase == "decode" or each.index or not self._heads.kept_tokens:
            return found
        tokens = self._heads.kept_tokens
        compute_s = found.compute + self._compute("prefill", 1, tokens)
        hop_s = np.add(found.transfer, self._hop_s(tokens, 1))
        return replace(found, compute=tuple(compute_s.tolist()), transfer=tuple(hop_s.tolist()))

    def _seconds(self, each: Pass) -> PassSeconds:
        if isinstance(each, MixedPass):
            return self._mixed(each)
        if each.prompts:
            return PassSeconds(self._compute_of(each), self._transfer(each))
        key = (each.phase, each.requests, each.tokens, each.context_length)
        if key not in self._passes:
            self._passes[key] = PassSeconds(self._compute_of(each), self._transfer(each))
        return self._passes[key]

    def _mixed(self, each: MixedPass) -> PassSeconds:
        decode_s, prefill_s = np.zeros(len(self.devices)), np.zeros(len(self.devices))
        least_s = decode_s
        if each.decodes:
            decode_s = self._known_s("decode", each.decodes, near_length(each.decode_context))
        if each.parts:
            prefill_s = self._prefill_s([start + count for start, count in each.parts])
            if any(start for start, _ in each.parts):
                constant_s = self._prefill_s([1] * len(each.parts))
                earlier_s = self._prefill_s([max(1, start) for start, _ in each.parts])
                prefill_s = prefill_s + constant_s - earlier_s
            if each.decodes:
                least_s = self._known_s("decode", 1, 1)
        if shared := self._heads.shared_tokens:
            prefill_s = prefill_s + sum(start == shared for start, _ in each.parts) * self._copy_s
        compute_s = together_s(prefill_s, decode_s, least_s)
        transfer = self._hop_s(each.all_tokens, each.requests)
        return PassSeconds(tuple(compute_s.tolist()), transfer, tuple(decode_s.tolist()))

    def _prefill_s(self, lengths: Sequence[int]) -> FloatArray:
        return self._compute("prefill", len(lengths), 1, lengths)

    def compute_s(self, phase: Phase, requests: int, length: int) -> tuple[float, ...]:
        """Compute seconds of every stage [N]; `length` is that of the prompt or the context."""
        return tuple(self._compute(phase, requests, length).tolist())

    def _compute_of(self, each: Pass) -> tuple[float, ...]:
        length = each.tokens if each.phase == "prefill" else each.context_length
        shared = self._heads.shared_tokens
        seconds = self._compute(each.phase, each.requests, length, each.prompts, shared)
        return tuple(seconds.tolist())

    def _compute(
        self,
        phase: Phase,
        requests: int,
        length: int,
        prompts: Sequence[int] = (),
        shared: int = 0,
    ) -> FloatArray:
        """Seconds of a pass [N]; the first `shared` tokens of its prompts are restored."""
        latency, first = self.costs.latency, self.devices[0]
        head_stage = self.costs.head_stage(len(self.devices))
        head = self.devices[head_stage]
        if prompts:
            tokens = sum(max(1, each - shared) for each in prompts)
            stage_s = unlike_prompts_s(prompts, partial(self._layers_s, phase), shared)
        else:
            shared = shared if phase == "prefill" else 0
            tokens = requests * (max(1, length - shared) if phase == "prefill" else 1)
            attention_s, rest_s = self._layers_s(phase, requests, length, shared)
            stage_s = attention_s + rest_s
        if shared:
            stage_s = stage_s + requests * self._copy_s
        stage_s[0] += latency.embedding_s(first, tokens, self.costs.dtype(first))
        stage_s[head_stage] += latency.final_s(head, requests, self.costs.dtype(head))
        return stage_s

    def _layers_s(
        self, phase: Phase, requests: int, length: int, shared: int = 0
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of attention and the rest of each stage's layers, both [N], for equal lengths."""
        if shared:
            return behind_head(length, shared, partial(self._layers_s, phase, requests))
        key = phase, requests, length
        if key not in self._layers:
            known: dict[Hashable, LayerSeconds] = {}
            for device, counts in zip(self.devices, self.counts, strict=True):
                for layer in counts:
                    kind, choice = layer
                    if (device.time_kind, layer) not in known:
                        latency, pass_ = self.costs.latency.of_kind(kind), (phase, requests, length)
                        known[device.time_kind, layer] = chosen_seconds(
                            latency, device, choice, pass_, self.costs.dtype(device)
                        )
            stages = [
                [(count, known[device.time_kind, layer]) for layer, count in counts.items()]
                for device, counts in zip(self.devices, self.counts, strict=True)
            ]
            self._layers[key] = (
                np.array([sum(n * each.attention_s for n, each in own) for own in stages]),
                np.array([sum(n * each.rest_s for n, each in own) for own in stages]),
            )
        return self._layers[key]

    def _transfer(self, each: Pass) -> tuple[float, ...]:
        costs, prompt = self.costs, computed_tokens(each, self._heads) / each.requests
        both = each.requests, each.requests
        hops = Transfers(costs.cluster, costs.shape, both, prompt, costs.head_on_first)
        dtypes = [costs.dtype(device) for device in self.devices]
        prefill, decode = hops.of_order(self.devices, dtypes)
        return tuple((prefill if each.phase == "prefill" else decode).tolist())

    def prefill_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        """Compute seconds of the prompts of a micro-batch [N], of any mean numbers from 1."""
        return self._between("prefill", requests, prompt_tokens)

    def attention_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return self._between("attention", requests, prompt_tokens)

    def decode_s(self, requests: float, context_tokens: float) -> FloatArray:
        return self._between("decode", requests, context_tokens)

    def prefill_hop_s(self, requests: float, prompt_tokens: float) -> FloatArray:
        return np.array(self._hop_s(requests * self._heads.computed(prompt_tokens), requests))

    def decode_hop_s(self, requests: float) -> FloatArray:
        return np.array(self._hop_s(requests, requests))

    def _hop_s(self, tokens: float, requests: float) -> tuple[float, ...]:
        """Seconds of all hops [N]: linear in tokens, the last one in requests."""
        return tuple(
            latency_s + tokens * per_token_s + requests * per_request_s
            for latency_s, per_token_s, per_request_s in self._links
        )

    def _between(self, work: _Work, requests: float, length: float) -> FloatArray:
        requests, length = max(requests, 1.0), max(length, 1.0)
        low, high = lengths_around(length)

        def of_whole(size: int) -> FloatArray:
            return between(length, low, high, lambda tokens: self._known_s(work, size, tokens))

        return between(requests, floor(requests), ceil(requests), of_whole)

    def _known_s(self, work: _Work, requests: int, length: int) -> FloatArray:
        shared = self._heads.shared_tokens
        if work == "attention":
            return self._layers_s("prefill", requests, length, shared)[0]
        key = work, requests, length
        if key not in self._whole:
            self._whole[key] = self._compute(*key, shared=shared)
        return self._whole[key]


def chosen_seconds(
    latency: LatencyModel,
    device: Device,
    choice: LayerChoice,
    each: tuple[Phase, int, int],
    dtype: str,
) -> LayerSeconds:
    """Seconds of a layer of one kind in a pass of a phase, so many requests and their length."""
    if latency.shape.experts is None or choice == LayerChoice.whole(choice.bits):
        return latency.layer_seconds(device, choice.bits, *each, dtype)
    own = latency.parts.hosted if choice.on_host else latency.parts.experts
    rest = latency.parts.rest.layer_seconds(device, choice.bits, *each, dtype)
    experts = own.layer_seconds(device, choice.expert_bits, *each, dtype)
    return LayerSeconds(rest.attention_s, rest.rest_s + experts.rest_s)


def link_terms(costs: CostModel, devices: Sequence[Device]) -> list[tuple[float, float, float]]:
    """Latency, seconds a token and seconds a request of `planner.costs.communication` [N]."""
    cluster, shape = costs.cluster, costs.shape
    terms = []
    for j, sender in enumerate(devices):
        receiver = devices[(j + 1) % len(devices)]
        latency_s, per_byte_s = transfer_terms(cluster, sender, receiver)
        dtype = costs.dtype(sender)
        if j < len(devices) - 1:
            terms.append((latency_s, hidden_bytes(shape, 1, dtype) * per_byte_s, 0.0))
            continue
        returned = TOKEN_ID_BYTES
        if costs.head_on_first:
            returned = shape.word_embedding_size * DTYPE_BYTES[dtype]
        terms.append((latency_s, 0.0, returned * per_byte_s))
    return terms
