"""A device's rates by its datasheet, at the efficiencies that kernels reach, and what products take
by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.costs.temporaries import CHUNK_TOKENS
from planner.model.layer_parts import DeltaMixer
from planner.model.shape import ModelShape
from planner.scheduling import Phase
from quant.backends.table import ASKED_PER_EXPERT, has_kernels, reads_ranges, rule_for
from quant.scheme import DTYPE_BYTES, LinearShape


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
CPU_LAYER_OVERHEAD_S = 5e-5
_CPU_PRODUCT_S = 1e-5  # of an expert, beside its bytes: 8 to 20 us for small ones on one core
# Counted (tests/actors/stage/test_launches.py), in float32: a chunk of a prompt starts 9 in a gated
# delta rule. Experts (`quant.experts`) start 2 each where they are asked, and with the router 22.
_CHUNK_LAUNCHES = 9
ROUTER_LAUNCHES, _EXPERT_LAUNCHES = 22, 2
_TOGETHER_LAUNCHES = 13  # where one launch multiplies with a weight of all experts, in all
# Attention kernels, and products within chunks, reach about half the rate of large matrix products.
ATTENTION_SHARE = 0.5
# Passes of a gated delta rule: over the channels of its convolution in the compute type, and in
# float32 over queries, keys and values of all heads and over the matrices of a chunk.
_CONV_PASSES, _RULE_PASSES = 8, 8
_CPU_RESTORE_SHARE = 0.3


def roofline_efficiency(accelerator: Accelerator) -> Efficiency:
    if accelerator.rocm_architecture is not None:
        return _ROCM_EFFICIENCY
    capability = accelerator.compute_capability
    if capability is None:
        return _CPU_EFFICIENCY
    return next(shares for least, shares in _GPU_EFFICIENCY if capability >= least)


@dataclass(frozen=True)
class Machine:
    """The rates a device reaches in a type; an emulated one in its accelerator's 16-bit type."""

    accelerator: Accelerator
    dtype: str
    flops: float
    fp32_flops: float
    int8_ops: float | None
    bytes_per_s: float

    @classmethod
    def of(cls, device: Device, dtype: str) -> Machine:
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
            return CPU_LAYER_OVERHEAD_S
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
        self,
        shape: ModelShape,
        bits: int,
        tokens: int,
        backend_of: Callable[[int], str | None] = lambda bits: None,
    ) -> float:
        """Seconds of the products of all experts that a pass asks, each of as many rows, with a
        backend by the bits of a weight.
        """
        if shape.experts is None:
            return 0.0
        asked = shape.experts.asked(tokens)
        rows = tokens * shape.experts.per_token / asked
        begun_s = _CPU_PRODUCT_S if self.accelerator.is_cpu else 0.0
        held = [(each.stored_bits or bits, each) for each in shape.at(bits).expert_linears]
        return asked * sum(
            begun_s + self.linear_s(linear, own, rows, backend_of(own)) for own, linear in held
        )

    def expert_launches(self, shape: ModelShape, bits: int, tokens: int) -> int:
        """Kernels that a layer's experts start: two for each that is asked, or for all together."""
        if shape.experts is None:
            return 0
        processor, experts = self.accelerator.processor, shape.experts
        takes_all = all(
            rule_for(
                processor, each.stored_bits or bits, each, self.dtype, decode_rows=tokens
            ).takes_experts
            for each in shape.at(bits).expert_linears
        )
        if takes_all and tokens * experts.per_token <= ASKED_PER_EXPERT * experts.count:
            return _TOGETHER_LAUNCHES
        return ROUTER_LAUNCHES + ceil(_EXPERT_LAUNCHES * experts.asked(tokens))

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
        products_s = flops / self.fp32_flops / ATTENTION_SHARE
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
