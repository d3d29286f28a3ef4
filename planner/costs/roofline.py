"""The roofline model: the slower of arithmetic and memory traffic by the datasheet's rates.

It times devices without a profile, at stated efficiencies; all that follows from it is marked as
estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.cluster.device import Device, MeasuredLink
from planner.costs.hosting import COPY_S, host_cpu, host_dtype, hosted_bytes
from planner.costs.latency_model import HostedSeconds, LatencyModel, LayerSeconds
from planner.costs.machine import (
    ATTENTION_SHARE,
    CPU_LAYER_OVERHEAD_S,
    LAUNCH_S,
    ROUTER_LAUNCHES,
    Machine,
)
from planner.costs.stored_bytes import kv_token_bytes
from planner.model.families import has_own_layers
from planner.model.shape import ModelShape
from planner.scheduling import Phase
from quant.backends.table import HOST_BACKENDS, fallback_rule
from quant.scheme import FULL_BITS, LinearShape

PROVENANCE = "estimated: roofline of the datasheet"


# Counted (tests/actors/stage/test_launches.py). Between products own kernels are two sums with
# norms, positions with the write of keys and values, attention, the activation. Without them a
# LayerNorm is one kernel and an RMSNorm is spelled out; queries and keys are rotated by 10; keys
# and values are written and gathered (4), then there are attention, the activation and two residual
# sums. BLOOM's activation is spelled out.
_OWN_LAUNCHES = 5
_RMS_NORM_LAUNCHES = 8
_ROTATION_LAUNCHES = 10
_OTHER_LAUNCHES = 8
_SPELLED_ACTIVATION_LAUNCHES = 8
_CODE_LAUNCHES = 28  # of making codes of keys and values and restoring them
# Counted there too, in float32: a mixer (`actors.attention.delta.mixer`) starts 59 in a decode step
# beside its products and norms, and casts of half as wide numbers.
_MIXER_LAUNCHES = 66
_STEP_LAUNCHES = 8  # by `actors.attention.delta.rule`, with the MLP's product and both sums
_STREAMED_LAUNCHES = 30  # of an expert from the host: two copies, restoring and products of both
END_LAUNCHES = 20  # of an embedding, or of final norm, head and sampling: assumed
# Ours of decode steps multiplies in float32, half of its instructions (counted in the source; no
# GPU has run it yet).
_RANGE_SHARE = 0.45
# Elsewhere ranges of unlike lengths are copied first: read, written, and read again.
_COPIED = 3
# Element-wise passes over a token's hidden state (norms, residuals, rotation, head transposes) and
# over the MLP's width (activation, gate), each read and written.
_HIDDEN_PASSES = 12
_MLP_PASSES = 4
# Of experts: over the rows of all that are asked, gathered, weighed and summed.
_ROW_PASSES = 5
# Sampling sorts 64-bit numbers, which moves about this many bytes for each logit.
_SAMPLING_BYTES_PER_LOGIT = 200

# A code takes six passes: widen to float32, magnitude, maximum, divide, round, narrow. One core
# makes it in 0.5 to 1 ns.
_BYTES_PER_CODE_MADE = 39
# The loop that reads codes is bound by arithmetic. It takes 0.9 of the time of that for bf16, whose
# 2 bytes are those of the bandwidth above (benchmarks.speed.attention, one core: 0.63 to 0.99).
_CPU_CODE_BYTES = 1.8


@dataclass(frozen=True)
class RooflineLatency(LatencyModel):
    """A latency model without measurements, for `shape` with keys and values of `kv_bits`. Not
    `replays`: kernels of decode steps are started one by one, as in groups. Not `own_layers`: those
    of PyTorch's modules, as in other systems. `host_links`: measured copies to and from hosts.
    """

    shape: ModelShape
    kv_bits: int = FULL_BITS
    replays: bool = True
    own_layers: bool = True
    host_links: tuple[MeasuredLink, ...] = ()
    _rests: dict[tuple[Machine, int, int, Phase], float] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Seconds of all but attention, which are the same at any length of context."""

    def _of_kind(self, kind: int) -> LatencyModel:
        return replace(self, shape=self.shape.kinds[kind])

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        assert not self.shape.kinds, "a layer is of one kind; ask for the times of each"
        machine = Machine.of(device, dtype)
        window = self.shape.sliding_window
        if phase == "prefill":
            tokens = kv_tokens = micro_batch * length
            seen = min(length, window or length)
            pairs = micro_batch * (seen * length - seen * seen / 2)
        else:
            tokens = micro_batch
            pairs = kv_tokens = micro_batch * min(length + 1, window or length + 1)
        if self.shape.delta is not None:
            attention_s = machine.mixer_s(self.shape.delta, micro_batch, tokens, phase)
        else:
            attention_s = self._attention_s(machine, pairs, tokens, kv_tokens)
        key = machine, bits, tokens, phase
        if key not in self._rests:
            self._rests[key] = self._rest_s(*key)
        return LayerSeconds(attention_s, self._rests[key])

    def experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> float:
        if self.shape.experts is None:
            return 0.0
        machine = Machine.of(device, dtype)
        starts = max(0, machine.expert_launches(self.shape, bits, tokens) - ROUTER_LAUNCHES)
        starts_s = 0.0 if machine.accelerator.is_cpu else LAUNCH_S * starts
        return starts_s + machine.experts_s(self.shape, bits, tokens)

    def hosted_experts_s(self, device: Device, bits: int, tokens: int, dtype: str) -> HostedSeconds:
        experts, machine = self.shape.experts, Machine.of(device, dtype)
        if experts is None:
            return HostedSeconds(0.0, 0.0, 0.0)
        host = Machine.of(host_cpu(device), host_dtype(machine.dtype))
        waiting_s, link = COPY_S, device.host_link_bytes_per_s
        for measured in self.host_links:
            if device.accelerator.name in (measured.one, measured.other):
                waiting_s, link = measured.latency_s, measured.bytes_per_s
        hidden = tokens * self.shape.hidden_size
        copies_s = 2 * (waiting_s + hidden * machine.element_bytes / link)
        rows = _ROW_PASSES * experts.per_token * hidden * host.element_bytes
        computed_s = host.experts_s(self.shape, bits, tokens, HOST_BACKENDS.get)
        computed_s += CPU_LAYER_OVERHEAD_S + host.move_s(rows)
        asked = experts.asked(tokens)
        held = hosted_bytes(self.shape, bits, machine.dtype) / experts.count
        streamed_s = asked * (held / link + LAUNCH_S * _STREAMED_LAUNCHES)
        streamed_s += machine.experts_s(
            self.shape, bits, tokens, lambda own: fallback_rule(own).name
        )
        return HostedSeconds(copies_s, computed_s, streamed_s)

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        machine, shape = Machine.of(device, dtype), self.shape
        moved = 4 * tokens * shape.message_width * machine.element_bytes
        products = self._projection_s(machine, tokens)
        if shape.per_layer_width:
            added = LinearShape(shape.hidden_size, shape.layers * shape.per_layer_width)
            products += machine.linear_s(added, FULL_BITS, tokens)
        return machine.launches_s(END_LAUNCHES) + machine.move_s(moved) + products

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        machine = Machine.of(device, dtype)
        products = machine.linear_s(self.shape.head_linear, self.shape.head_bits, rows)
        products += self._projection_s(machine, rows)
        return machine.launches_s(END_LAUNCHES) + products + self.sampling_s(device, rows, dtype)

    def sampling_s(self, device: Device, rows: int, dtype: str) -> float:
        moved = rows * self.shape.vocab_size * _SAMPLING_BYTES_PER_LOGIT
        return Machine.of(device, dtype).move_s(moved)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return PROVENANCE

    def _attention_s(self, machine: Machine, pairs: float, tokens: int, kv_tokens: int) -> float:
        """Seconds of writing `tokens`, then of `pairs` or, if longer, of reading `kv_tokens`."""
        read_s, made_s = self._kv_s(machine, tokens, kv_tokens)
        each, latent = 4 * self.shape.query_width, self.shape.latent
        if latent is not None and kv_tokens == tokens:  # of prompts these are expanded
            each = 2 * self.shape.heads * latent.expanded_width
        flops = pairs * each
        products_s = machine.compute_s(flops) / ATTENTION_SHARE
        if kv_tokens != tokens and machine.reads_ranges(self.shape.head_dim):
            products_s = flops / machine.fp32_flops / _RANGE_SHARE
        return made_s + max(products_s, read_s)

    def _rest_s(self, machine: Machine, bits: int, tokens: int, phase: Phase) -> float:
        shape = self.shape.at(bits)
        linears = sum(
            machine.linear_s(linear, linear.stored_bits or bits, tokens)
            for linear in shape.layer_linears
        )
        linears += sum(machine.linear_s(linear, FULL_BITS, tokens) for linear in shape.full_linears)
        widths = _HIDDEN_PASSES * shape.hidden_size + _MLP_PASSES * _mlp_width(shape)
        if shape.experts is not None:
            linears += machine.experts_s(shape, bits, tokens)
            widths += _ROW_PASSES * shape.experts.per_token * shape.hidden_size
        element_wise = machine.move_s(tokens * widths * machine.element_bytes)
        own = self.own_layers and has_own_layers(shape.model_type)
        own = own and machine.reads_ranges(shape.head_dim)
        own = own and shape.delta is None and shape.experts is None
        steps = phase == "decode" and self.own_layers and machine.steps_states(shape)
        kernels = layer_launches(shape, self.kv_bits, own or steps)
        kernels += machine.expert_launches(shape, bits, tokens)
        launches_s = machine.launches_s(kernels, own and self.replays and phase == "decode")
        return launches_s + linears + element_wise

    def _kv_s(self, machine: Machine, tokens: int, kv_tokens: int) -> tuple[float, float]:
        """Seconds of reading keys and values, and of making codes; prompts restore codes, and so do
        decode steps of GPUs that copy what they attend to.
        """
        shape, made_width = self.shape, self.shape.kv_elements
        if shape.reads_earlier_keys:
            shape = replace(shape, reads_earlier_keys=False)
        plain = shape.kv_elements * machine.element_bytes
        held = kv_token_bytes(shape, self.kv_bits, machine.dtype)
        is_decode, is_cpu = kv_tokens != tokens, machine.accelerator.is_cpu
        copies = is_decode and not is_cpu and not machine.reads_ranges(shape.head_dim)
        if self.kv_bits == FULL_BITS:
            return machine.move_s(kv_tokens * plain * (_COPIED if copies else 1)), 0.0
        each = float(2 * plain + held * (_COPIED if copies else 1))
        if is_decode and not copies:
            each = _CPU_CODE_BYTES * shape.kv_elements if is_cpu else held
        made = tokens * made_width * _BYTES_PER_CODE_MADE
        return machine.move_s(kv_tokens * each), machine.move_s(machine.cached(made))

    def _projection_s(self, machine: Machine, tokens: int) -> float:
        wide, narrow = self.shape.hidden_size, self.shape.word_embedding_size
        return 0.0 if wide == narrow else machine.linear_s(LinearShape(narrow, wide), 16, tokens)


def layer_launches(shape: ModelShape, kv_bits: int = FULL_BITS, own_kernels: bool = False) -> int:
    """Kernels that a decode step of unlike requests starts in a layer, of linears one each, without
    those of experts; with `own_kernels` (`actors.stage.layers.own_layers`) those between them are
    few.
    """
    if shape.delta is not None:
        mixer = _STEP_LAUNCHES if own_kernels else _MIXER_LAUNCHES
        return len(shape.layer_linears) + shape.layer_norms * _RMS_NORM_LAUNCHES + mixer
    if own_kernels:
        return len(shape.layer_linears) + _OWN_LAUNCHES
    norms = shape.layer_norms + 2 * (shape.qk_norm or shape.qk_norm_width > 0)
    has_rms_norms = shape.norm_parameters == shape.hidden_size
    rotates = not shape.position_rows and not shape.alibi
    return (
        len(shape.layer_linears)
        + norms * (_RMS_NORM_LAUNCHES if has_rms_norms else 1)
        + rotates * _ROTATION_LAUNCHES
        + shape.gated_mlp
        + _OTHER_LAUNCHES
        + (_SPELLED_ACTIVATION_LAUNCHES if shape.activation_buffers else 0)
        + (_CODE_LAUNCHES if kv_bits != FULL_BITS else 0)
    )


def _mlp_width(shape: ModelShape) -> int:
    """Elements of a token within the MLP, or within all experts that it asks."""
    if shape.experts is None:
        return shape.intermediate_size
    return shape.experts.per_token * shape.experts.width + shape.experts.shared_width


def _restoring(bits: int) -> str:
    return fallback_rule(bits).name
