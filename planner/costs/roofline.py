"""The roofline model: the slower of arithmetic and memory traffic by the datasheet's rates.

It times devices without a profile, at stated efficiencies; all that follows from it is marked as
estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.costs.hosting import COPY_S, host_cpu, host_dtype, hosted_bytes
from planner.costs.latency_model import LatencyModel, LayerSeconds
from planner.costs.memory import kv_token_bytes
from planner.costs.temporaries import CHUNK_TOKENS
from planner.model.families import has_own_layers
from planner.model.layer_parts import DeltaMixer
from planner.model.shape import ModelShape
from planner.scheduling import Phase
from quant.backends.table import (
    ASKED_PER_EXPERT,
    HOST_BACKENDS,
    fallback_rule,
    has_kernels,
    reads_ranges,
    rule_for,
)
from quant.scheme import DTYPE_BYTES, FULL_BITS, LinearShape

PROVENANCE = "estimated: roofline of the datasheet"


@dataclass(frozen=True)
class Efficiency:
    arithmetic: float
    bandwidth: float


# Newest generation first; the first entry counts whose compute capability a GPU has.
# 8.0: LLaMA-30B layers on an A100 (Helix, ASPLOS'25): 215 to 240 of 312 TFLOPS, 1.2 of 1.55 TB/s.
# 7.5: OPT-30B (LLM-PQ's published profiles, 2023) and LLaMA-30B (Helix) layers on a T4, which
#      lowers its clock under load: 19 to 27 of 65 TFLOPS, 0.21 to 0.23 of 0.32 TB/s.
# 7.0: OPT-30B on a V100: 67 to 79 of 125 TFLOPS, 0.5 of 0.9 TB/s.
# 6.0: OPT-30B on a P100, which has no tensor cores: 4.5 of 18.7 TFLOPS; 0.05 of 0.55 TB/s in its
#      one published decode row, a product of 8 rows, which its kernels serve badly: 0.14 here.
# 6.1: as the P100, whose 4.5 TFLOPS are 0.48 of its float32 rate.
_GPU_EFFICIENCY = (
    ((8, 0), Efficiency(arithmetic=0.70, bandwidth=0.78)),
    ((7, 5), Efficiency(arithmetic=0.36, bandwidth=0.72)),
    ((7, 0), Efficiency(arithmetic=0.58, bandwidth=0.66)),
    ((6, 1), Efficiency(arithmetic=0.48, bandwidth=0.25)),
    ((0, 0), Efficiency(arithmetic=0.24, bandwidth=0.25)),
)
# AMD's own largest matrix products on an MI300X reach about half of the data sheet's rate (ROCm
# blog, "Measuring Max-Achievable FLOPs", 2025). The bandwidth is as above: none has run llmpq yet.
_ROCM_EFFICIENCY = Efficiency(arithmetic=0.45, bandwidth=0.75)
# Prefill of a 170M LLaMA in bf16 on 2 threads with AVX512-BF16: 357 GFLOPS, of 640 nominal.
_CPU_EFFICIENCY = Efficiency(arithmetic=0.55, bandwidth=0.8)

# Eager PyTorch takes some 5 us to start a kernel on a GPU; a CPU dispatches them in line. Decode
# steps of NVIDIA GPUs are replayed, where a kernel takes 0.5 us beside its own 2.9 (NVIDIA's
# "Getting Started with CUDA Graphs", 2019, V100), of which some 2 are no bytes' but its begin's
# and end's.
LAUNCH_S = 5e-6
REPLAYED_S = 2.5e-6
_CPU_LAYER_OVERHEAD_S = 5e-5
_CPU_PRODUCT_S = 1e-5  # of an expert, beside its bytes: 8 to 20 us for small ones on one core
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
# Counted there too, in float32: a mixer (`actors.stage.delta_mixer`) starts 59 in a decode step
# beside its products and norms, and casts of half as wide numbers; a chunk of a prompt 9. Experts
# (`quant.experts`) start 2 each where they are asked, and with the router 22.
_MIXER_LAUNCHES, _CHUNK_LAUNCHES = 66, 9
_STEP_LAUNCHES = 8  # by `actors.attention.cuda_delta`, with the MLP's product and both sums
_ROUTER_LAUNCHES, _EXPERT_LAUNCHES = 22, 2
_TOGETHER_LAUNCHES = 13  # where one launch multiplies with a weight of all experts, in all
_STREAMED_LAUNCHES = 30  # of an expert from the host: two copies, restoring and products of both
END_LAUNCHES = 20  # of an embedding, or of final norm, head and sampling: assumed
# Attention kernels reach about half the rate of large matrix products; ours of decode steps
# multiplies in float32, half of its instructions (counted in the source; no GPU has run it yet).
_ATTENTION_SHARE = 0.5
_RANGE_SHARE = 0.45
# Elsewhere ranges of unlike lengths are copied first: read, written, and read again.
_COPIED = 3
# Element-wise passes over a token's hidden state (norms, residuals, rotation, head transposes) and
# over the MLP's width (activation, gate), each read and written.
_HIDDEN_PASSES = 12
_MLP_PASSES = 4
# Of a gated delta rule: over the channels of its convolution in the compute type, and in float32
# over queries, keys and values of all heads and over the matrices of a chunk. Of experts: over the
# rows of all that are asked, gathered, weighed and summed.
_CONV_PASSES, _RULE_PASSES, _ROW_PASSES = 8, 8, 5
# Sampling sorts 64-bit numbers, which moves about this many bytes for each logit.
_SAMPLING_BYTES_PER_LOGIT = 200


_CPU_RESTORE_SHARE = 0.3
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
    of PyTorch's modules, as in other systems.
    """

    shape: ModelShape
    kv_bits: int = FULL_BITS
    replays: bool = True
    own_layers: bool = True
    _rests: dict[tuple[_Machine, int, int, Phase], float] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Seconds of all but attention, which are the same at any length of context."""

    def _of_kind(self, kind: int) -> LatencyModel:
        return replace(self, shape=self.shape.kinds[kind])

    def layer_seconds(
        self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
    ) -> LayerSeconds:
        assert not self.shape.kinds, "a layer is of one kind; ask for the times of each"
        machine = _Machine.of(device, dtype)
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
        machine = _Machine.of(device, dtype)
        starts = max(0, machine.expert_launches(self.shape, bits, tokens) - _ROUTER_LAUNCHES)
        starts_s = 0.0 if machine.accelerator.is_cpu else LAUNCH_S * starts
        return starts_s + machine.experts_s(self.shape, bits, tokens)

    def hosted_experts_s(
        self, device: Device, bits: int, tokens: int, dtype: str
    ) -> tuple[float, float]:
        experts, machine = self.shape.experts, _Machine.of(device, dtype)
        if experts is None:
            return 0.0, 0.0
        host = _Machine.of(host_cpu(device), host_dtype(machine.dtype))
        link, hidden = device.host_link_bytes_per_s, tokens * self.shape.hidden_size
        copies_s = 2 * (COPY_S + hidden * machine.element_bytes / link)
        rows = _ROW_PASSES * experts.per_token * hidden * host.element_bytes
        computed_s = host.experts_s(self.shape, bits, tokens, HOST_BACKENDS.get(bits))
        computed_s += _CPU_LAYER_OVERHEAD_S + host.move_s(rows)
        asked = experts.asked(tokens)
        held = hosted_bytes(self.shape, bits, machine.dtype) / experts.count
        streamed_s = asked * (held / link + LAUNCH_S * _STREAMED_LAUNCHES)
        streamed_s += machine.experts_s(self.shape, bits, tokens, fallback_rule(bits).name)
        return copies_s + computed_s, streamed_s

    def embedding_s(self, device: Device, tokens: int, dtype: str) -> float:
        machine, shape = _Machine.of(device, dtype), self.shape
        moved = 4 * tokens * shape.message_width * machine.element_bytes
        products = self._projection_s(machine, tokens)
        if shape.per_layer_width:
            added = LinearShape(shape.hidden_size, shape.layers * shape.per_layer_width)
            products += machine.linear_s(added, FULL_BITS, tokens)
        return machine.launches_s(END_LAUNCHES) + machine.move_s(moved) + products

    def final_s(self, device: Device, rows: int, dtype: str) -> float:
        machine = _Machine.of(device, dtype)
        head = LinearShape(self.shape.word_embedding_size, self.shape.vocab_size)
        products = machine.linear_s(head, 16, rows) + self._projection_s(machine, rows)
        return machine.launches_s(END_LAUNCHES) + products + self.sampling_s(device, rows, dtype)

    def sampling_s(self, device: Device, rows: int, dtype: str) -> float:
        moved = rows * self.shape.vocab_size * _SAMPLING_BYTES_PER_LOGIT
        return _Machine.of(device, dtype).move_s(moved)

    def provenance(self, device: Device, dtype: str, bits: Sequence[int]) -> str:
        return PROVENANCE

    def _attention_s(self, machine: _Machine, pairs: float, tokens: int, kv_tokens: int) -> float:
        """Seconds of writing `tokens`, then of `pairs` or, if longer, of reading `kv_tokens`."""
        read_s, made_s = self._kv_s(machine, tokens, kv_tokens)
        flops = 4 * pairs * self.shape.query_width
        products_s = machine.compute_s(flops) / _ATTENTION_SHARE
        if kv_tokens != tokens and machine.reads_ranges(self.shape.head_dim):
            products_s = flops / machine.fp32_flops / _RANGE_SHARE
        return made_s + max(products_s, read_s)

    def _rest_s(self, machine: _Machine, bits: int, tokens: int, phase: Phase) -> float:
        shape = self.shape
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

    def _kv_s(self, machine: _Machine, tokens: int, kv_tokens: int) -> tuple[float, float]:
        """Seconds of reading keys and values, and of making codes; prompts restore codes, and so do
        decode steps of GPUs that copy what they attend to.
        """
        shape, made_width = self.shape, self.shape.kv_width
        if shape.reads_earlier_keys:
            shape = replace(shape, reads_earlier_keys=False)
        plain = shape.kv_width * machine.element_bytes
        held = kv_token_bytes(shape, self.kv_bits, machine.dtype)
        is_decode, is_cpu = kv_tokens != tokens, machine.accelerator.is_cpu
        copies = is_decode and not is_cpu and not machine.reads_ranges(shape.head_dim)
        if self.kv_bits == FULL_BITS:
            return machine.move_s(2 * kv_tokens * plain * (_COPIED if copies else 1)), 0.0
        each = float(2 * plain + held * (_COPIED if copies else 1))
        if is_decode and not copies:
            each = _CPU_CODE_BYTES * shape.kv_width if is_cpu else held
        made = 2 * tokens * made_width * _BYTES_PER_CODE_MADE
        return machine.move_s(2 * kv_tokens * each), machine.move_s(machine.cached(made))

    def _projection_s(self, machine: _Machine, tokens: int) -> float:
        wide, narrow = self.shape.hidden_size, self.shape.word_embedding_size
        return 0.0 if wide == narrow else machine.linear_s(LinearShape(narrow, wide), 16, tokens)


def layer_launches(shape: ModelShape, kv_bits: int = FULL_BITS, own_kernels: bool = False) -> int:
    """Kernels that a decode step of unlike requests starts in a layer, of linears one each, without
    those of experts; with `own_kernels` (`actors.stage.own_layers`) those between them are few.
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


def roofline_efficiency(accelerator: Accelerator) -> Efficiency:
    if accelerator.rocm_architecture is not None:
        return _ROCM_EFFICIENCY
    capability = accelerator.compute_capability
    if capability is None:
        return _CPU_EFFICIENCY
    return next(shares for least, shares in _GPU_EFFICIENCY if capability >= least)


@dataclass(frozen=True)
class _Machine:
    """The rates a device reaches in a type; an emulated one in its accelerator's 16-bit type."""

    accelerator: Accelerator
    dtype: str
    flops: float
    fp32_flops: float
    int8_ops: float | None
    bytes_per_s: float

    @classmethod
    def of(cls, device: Device, dtype: str) -> _Machine:
        accelerator, reached = device.accelerator, roofline_efficiency(device.accelerator)
        cores = device.threads or 1
        wide = dtype == "float32"
        hosted = device.emulated and not device.stand_in
        # Where float16 is slower than float32 (P40), torch multiplies its matrices in float32.
        rate = accelerator.fp32_flops
        rate = rate if wide else max(rate, accelerator.fp16_flops)
        integer = accelerator.int8_ops
        return cls(
            accelerator=accelerator,
            dtype=accelerator.default_dtype if hosted and not wide else dtype,
            flops=rate * cores * reached.arithmetic,
            fp32_flops=accelerator.fp32_flops * cores,
            int8_ops=None if integer is None else integer * cores * reached.arithmetic,
            bytes_per_s=accelerator.memory_bytes_per_s * cores * reached.bandwidth,
        )

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def launches_s(self, kernels: int, replayed: bool = False) -> float:
        if self.accelerator.is_cpu:
            return _CPU_LAYER_OVERHEAD_S
        return kernels * (REPLAYED_S if replayed else LAUNCH_S)

    def reads_ranges(self, head_dim: int) -> bool:
        return reads_ranges(self.accelerator.processor, self.dtype, head_dim)

    def steps_states(self, shape: ModelShape) -> bool:
        """Whether a kernel of ours goes on with the constant states of a layer where they lie."""
        has_kernel = shape.delta is not None and shape.delta.has_step_kernel
        return has_kernel and has_kernels(self.accelerator.processor, self.dtype)

    def compute_s(self, flops: float) -> float:
        return flops / self.flops

    def move_s(self, moved_bytes: float) -> float:
        return moved_bytes / self.bytes_per_s

    def cached(self, moved_bytes: float) -> float:
        """The part of bytes moved by successive element-wise passes that goes to main memory."""
        return moved_bytes * (_CPU_RESTORE_SHARE if self.accelerator.is_cpu else 1.0)

    def experts_s(
        self, shape: ModelShape, bits: int, tokens: int, backend: str | None = None
    ) -> float:
        """Seconds of the products of all experts that a pass asks, each of as many rows."""
        if shape.experts is None:
            return 0.0
        asked = shape.experts.asked(tokens)
        rows = tokens * shape.experts.per_token / asked
        begun_s = _CPU_PRODUCT_S if self.accelerator.is_cpu else 0.0
        return asked * sum(
            begun_s + self.linear_s(linear, bits, rows, backend) for linear in shape.expert_linears
        )

    def expert_launches(self, shape: ModelShape, bits: int, tokens: int) -> int:
        """Kernels that a layer's experts start: two for each that is asked, or for all together."""
        if shape.experts is None:
            return 0
        processor, experts = self.accelerator.processor, shape.experts
        takes_all = all(
            rule_for(processor, bits, each, self.dtype, decode_rows=tokens).takes_experts
            for each in shape.expert_linears
        )
        if takes_all and tokens * experts.per_token <= ASKED_PER_EXPERT * experts.count:
            return _TOGETHER_LAUNCHES
        return _ROUTER_LAUNCHES + ceil(_EXPERT_LAUNCHES * experts.asked(tokens))

    def mixer_s(self, mixer: DeltaMixer, requests: int, tokens: int, phase: Phase) -> float:
        """Seconds of a gated delta rule and its convolution: products in float32 of a token with
        the state, of a prompt's tokens within their chunk too (transformers'
        `torch_chunk_gated_delta_rule`); the state is read and written once.
        """
        keys, values, chunk, chunks = mixer.key_dim, mixer.value_dim, 0, 0
        each = 8 * keys * values
        if phase == "prefill":
            chunk, chunks = CHUNK_TOKENS, ceil(tokens / requests / CHUNK_TOKENS)
            each = 6 * keys * values + chunk * (5 * keys + 3 * values)
        flops = tokens * mixer.value_heads * each
        state = 2 * requests * (4 * mixer.state_elements + mixer.conv_elements * self.element_bytes)
        conv = _CONV_PASSES * tokens * mixer.conv_channels * self.element_bytes
        rule = 4 * _RULE_PASSES * tokens * mixer.value_heads * (keys + values + chunk)
        moved_s = self.move_s(state + self.cached(conv + rule))
        products_s = flops / self.fp32_flops / _ATTENTION_SHARE
        return max(products_s, moved_s) + chunks * _CHUNK_LAUNCHES * LAUNCH_S

    def linear_s(
        self, linear: LinearShape, bits: int, rows: float, backend: str | None = None
    ) -> float:
        """Seconds of the product of `rows` tokens with a packed weight, and of restoring it."""
        processor = self.accelerator.processor
        rule = rule_for(processor, bits, linear, self.dtype, backend, ceil(rows))
        cost = rule.cost_of(processor, linear, self.dtype)
        rate = self.int8_ops if cost.integer and self.int8_ops is not None else self.flops
        is_few = rows < cost.restores_from
        rate *= cost.few_rate if is_few else cost.rate
        if cost.scalar is not None and is_few:
            rate = self.fp32_flops * cost.scalar
        compute = 2 * rows * linear.parameters / rate
        activations = rows * (linear.in_features + linear.out_features) * self.element_bytes
        moved = self.move_s(rule.nbytes(linear, self.dtype) + activations)
        passes = cost.few_passes if is_few else cost.passes
        restored = self.move_s(self.cached(passes * linear.parameters))
        return max(compute, moved) + restored + cost.overhead_s
