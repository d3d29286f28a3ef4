"""Bitwidths, group sizes, and what each kernel backend takes and occupies: rules without a tensor library.

The planner sizes stages with these rules and the backends call them too, so that a plan and the bytes
really allocated cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BITWIDTHS = (3, 4, 8, 16)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class LinearShape:
    """One weight matrix `[out_features, in_features]`."""

    in_features: int
    out_features: int

    @property
    def parameters(self) -> int:
        """Number of weights, bias not counted."""
        return self.in_features * self.out_features


@dataclass(frozen=True)
class Processor:
    """What a kernel backend must know of a device; `compute_capability` is None for a CPU."""

    compute_capability: tuple[int, int] | None = None
    instruction_sets: frozenset[str] = frozenset({"avx512_bf16", "avx512_vnni"})

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on the host processor."""
        return self.compute_capability is None


@dataclass(frozen=True)
class KernelRule:
    """When a backend can hold a weight matrix at `bits`, and how many bytes it then allocates.

    `supports(processor, shape, dtype)` and `nbytes(shape, dtype)`; `dtype` is the compute type's name
    (a key of `DTYPE_BYTES`). Biases are not part of it: they stay in the compute type.
    """

    name: str
    bits: int
    supports: Callable[[Processor, LinearShape, str], bool]
    nbytes: Callable[[LinearShape, str], int]
