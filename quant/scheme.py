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
    """The shape of a weight matrix `[out_features, in_features]`.

    `stored_group`: weights that share a scale and a zero where the checkpoint is quantized already,
    None where it is not. `cut_group`: the same where columns are a rank's of a wider matrix, whose
    groups they keep. `stored_bits`: those of the checkpoint where they are not its layer's.
    """

    in_features: int
    out_features: int
    stored_group: int | None = None
    cut_group: int | None = None
    stored_bits: int | None = None

    @property
    def group(self) -> int:
        """Weights that share a scale and a zero at 3 and 4 bit."""
        return self.cut_group or self.stored_group or group_size(self.in_features)

    @property
    def parameters(self) -> int:
        """Number of weights, bias not counted."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Processor:
    """The properties of a device that decide on kernels.

    `compute_capability` is that of an NVIDIA GPU, `rocm_architecture` (`gfx942`) that of an AMD
    GPU; a CPU has neither.
    """

    compute_capability: tuple[int, int] | None = None
    instruction_sets: frozenset[str] = frozenset({"avx512_bf16", "avx512_vnni"})
    rocm_architecture: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on the host processor."""
        return self.compute_capability is None and self.rocm_architecture is None


def group_size(in_features: int) -> int:
    """Weights that share a scale and a zero at 3 and 4 bit: 128, 64, 32 or else the whole row."""
    return next((size for size in GROUP_SIZES if in_features % size == 0), in_features)
