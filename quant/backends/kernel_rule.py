"""What the planner and the stages ask of a kernel backend: weights it holds, bytes, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quant.scheme import LinearShape, Processor


@dataclass(frozen=True)
class KernelCost:
    """The time of a kernel beside that of the plain 16-bit product, for estimates. `rate`: share of
    the 16-bit arithmetic rate. `integer`: the product runs at the int8 rate instead. `passes`:
    bytes moved per weight to restore it to 16 bits, from `restores_from` rows on; `few_rate` and
    `few_passes`: the same for fewer rows. `scalar`: share of the datasheet's float32 rate that
    products of fewer rows reach where they do not run on the matrix units, else None. `overhead_s`:
    small kernels around each product.
    """

    rate: float = 1.0
    integer: bool = False
    passes: float = 0.0
    restores_from: int = 1
    few_rate: float = 1.0
    few_passes: float = 0.0
    scalar: float | None = None
    overhead_s: float = 0.0


@dataclass(frozen=True)
class KernelRule:
    """A backend at `bits`: which weight matrices it can hold, and the bytes that it allocates.
    `dtype` in `supports(processor, shape, dtype)` and `nbytes(shape, dtype)` is the compute type's
    name, a key of `DTYPE_BYTES`. Biases are not counted: they stay in the compute type. `kernel` is
    the class that packs and multiplies, as `module.Class` below `quant.backends`; None for a plain
    `nn.Linear`.
    """

    name: str
    bits: int
    supports: Callable[[Processor, LinearShape, str], bool]
    nbytes: Callable[[LinearShape, str], int]
    kernel: str | None
    cost: KernelCost = field(default=KernelCost())
    own_cost: Callable[[Processor, LinearShape, str], KernelCost] | None = None
    """The cost where it depends on the GPU and the shape."""
    is_outdone: Callable[[Processor, LinearShape, str, int], bool] | None = None
    """Whether a backend further down is much faster in decode steps of so many rows."""
    stand_in: str | None = None
    """The backend in its place where it fails its self-test; None: the last of the bitwidth."""

    @property
    def takes_experts(self) -> bool:
        """Whether one launch multiplies with the weights of all experts that tokens ask."""
        return self.kernel is not None and self.kernel.startswith("cuda.packed.")

    def cost_of(self, processor: Processor, shape: LinearShape, dtype: str) -> KernelCost:
        return self.cost if self.own_cost is None else self.own_cost(processor, shape, dtype)
