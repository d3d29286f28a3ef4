"""Bitwidths, group sizes, shapes of weights and what a device offers to kernels, without torch."""

from __future__ import annotations

from dataclasses import dataclass

FULL_BITS = 16
"""The bitwidth of weights that are not quantized: they have the compute type, whatever its width.
"""

NEAR_FULL_BITS = 8
"""Layers of at least so many bits are near 16 bit: +0.07 of 26.2 and +0.016 of 44.1 in perplexity,
within the error of the texts (docs/quantization.md). Plans keep to them where nothing is said.
"""

BITWIDTHS = (3, 4, NEAR_FULL_BITS, FULL_BITS)
KV_BITWIDTHS = (8, FULL_BITS)
WEIGHTED = "weighted"
GPTQ = "gptq"
ROUNDINGS = (WEIGHTED, "nearest", "stochastic")
"""Ways of rounding a weight that is quantized while it is loaded, the default first; see
`quant.rounding.ways`."""

PLAN_ROUNDINGS = (*ROUNDINGS, GPTQ)
"""Those, and GPTQ: a plan of it is run with a checkpoint that is calibrated before."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

GROUP_SIZES = (128, 64, 32)
"""Group sizes, tried in this order; torch's int4pack matmul takes all of them."""


@dataclass(frozen=True)
class LinearShape:
    """A matrix `[out_features, in_features]`; what is stored holds for quantized checkpoints,
    `cut_group` for columns of a rank, which keep the groups of the wider matrix.
    """

    in_features: int
    out_features: int
    stored_group: int | None = None
    cut_group: int | None = None
    stored_bits: int | None = None

    @property
    def group(self) -> int:
        return self.cut_group or self.stored_group or group_size(self.in_features)

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Processor:
    """What decides on kernels: a CPU has neither capability nor architecture (`gfx942`)."""

    compute_capability: tuple[int, int] | None = None
    instruction_sets: frozenset[str] = frozenset({"avx512_bf16", "avx512_vnni"})
    rocm_architecture: str | None = None

    @property
    def is_cpu(self) -> bool:
        return self.compute_capability is None and self.rocm_architecture is None


def group_size(in_features: int) -> int:
    return next((size for size in GROUP_SIZES if in_features % size == 0), in_features)
