"""Kernels that compile at their first use, used before a stage has requests."""

from __future__ import annotations

import torch
from torch import nn

from quant.backends.base import PackedWeight
from quant.backends.cpu import widened
from quant.experts import QuantizedExperts
from quant.linear import QuantizedLinear, WidenedLinear
from quant.scheme import LinearShape


def warm_up_kernels(model: nn.Module) -> None:
    found: dict[tuple[type[PackedWeight], LinearShape], tuple[PackedWeight, torch.dtype]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            shape = LinearShape(module.in_features, module.out_features)
            found[type(module.packed), shape] = module.packed, module.compute_dtype
        elif isinstance(module, WidenedLinear):
            widened.warm_up()
        elif isinstance(module, QuantizedExperts):
            for held in (module.gate_up, module.down):
                found[held.backend, held.shape] = held.weights[0], module.compute_dtype
    for (_, shape), (packed, dtype) in found.items():
        packed.warm_up(shape.in_features, dtype)
