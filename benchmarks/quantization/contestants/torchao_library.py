"""torchao: weight-only integers in groups of 64 by its own choices of scale, no text.

    pip install torchao

Its tensors hold one code a byte on CPUs; counted are the bits of a code, and what it holds beside.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor, nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
from torchao.quantization.quant_primitives import MappingType

from benchmarks.quantization.contestants.exchange import Rounded, main, nbytes, weight_by_weight

TYPES = {3: torch.int3, 4: torch.int4}


def rounded(weight: Tensor, bits: int, mapping: MappingType, chosen_by: str) -> Rounded:
    """As `quantize_` leaves a float16 linear: scales float16, zeros of the codes' type."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, dtype=torch.float16)
    linear.weight = nn.Parameter(weight.half())
    config = IntxWeightOnlyConfig(
        TYPES[bits], PerGroup(64), mapping, intx_choose_qparams_algorithm=chosen_by
    )
    quantize_(linear, config)
    stored = linear.weight
    zeros = stored.zero_point.numel() * bits // 8 if mapping is MappingType.ASYMMETRIC else 0
    held = weight.numel() * bits // 8 + nbytes(stored.scale) + zeros
    return Rounded(stored.dequantize().detach(), held)


CHOICES = {
    "affine": (MappingType.ASYMMETRIC, "affine"),
    "symmetric": (MappingType.SYMMETRIC, "affine"),
    "HQQ": (MappingType.SYMMETRIC, "hqq_scale_only"),
}
SETTINGS = {
    f"torchao {bits} bit, {name}": weight_by_weight(
        partial(rounded, bits=bits, mapping=mapping, chosen_by=chosen_by)
    )
    for bits in (4, 3)
    for name, (mapping, chosen_by) in CHOICES.items()
}

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
