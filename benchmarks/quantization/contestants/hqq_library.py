"""HQQ (Badri and Shaji, 2023): zeros by its half-quadratic optimiser, groups of 64, no text.

    pip install hqq

`axis` 1 groups along a row, which its fast kernels need; 0 along a column.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from hqq.core.quantize import Quantizer
from torch import Tensor

from benchmarks.quantization.contestants.exchange import Rounded, main, nbytes, weight_by_weight


def rounded(weight: Tensor, bits: int, axis: int) -> Rounded:
    """As `HQQLinear` stores it in float16, its codes packed."""
    codes, meta = Quantizer.quantize(
        weight.half(),
        nbits=bits,
        group_size=64,
        optimize=True,
        axis=axis,
        compute_dtype=torch.float16,
        device="cpu",
    )
    for name in ("scale", "zero"):  # the quantizer leaves them in float32, HQQLinear does not
        meta[name] = meta[name].half()
    stored = nbytes(codes, meta["scale"], meta["zero"])
    return Rounded(Quantizer.dequantize(codes, meta), stored)


SETTINGS = {
    f"HQQ {bits} bit, axis {axis}": weight_by_weight(partial(rounded, bits=bits, axis=axis))
    for bits in (4, 3)
    for axis in (1, 0)
}

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
