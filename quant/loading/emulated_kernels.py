"""Emulating the kernels of another device: a linear is computed plainly with the weight that they
would round to (`PackedWeight.represent`), so that its rounding is the planned one. Kernels that
multiply codes round activations to 8 bit too: so do these products, which are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from quant.backends.kernel_classes import BACKENDS
from quant.backends.rotation import RotatedCodes
from quant.backends.table import KernelRule, rule_for
from quant.checkpoint.reader import Checkpoint
from quant.linear import LayerForm, dtype_name
from quant.loading.cached_layer import put_submodule
from quant.loading.loader import LayerLoad, load_layer, load_tensors
from quant.rounding.importance import LayerImportance
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import FULL_BITS, ROUNDINGS, WEIGHTED, LinearShape, Processor


@dataclass(frozen=True)
class LayerScheme:
    """The form of a layer, here or as planned. With `planned_for` it is that of another processor,
    which computes in `planned_dtype`: kernels that do not run here are represented.
    """

    bits: int = FULL_BITS
    backend: str | None = None
    dtype: torch.dtype | None = None
    planned_for: Processor | None = None
    planned_dtype: str = "float32"
    rounding: str = ROUNDINGS[0]
    kv_bits: int = FULL_BITS


@dataclass(frozen=True)
class Compute:
    device: torch.device
    dtype: torch.dtype
    processor: Processor

    def in_type(self, dtype: torch.dtype | None) -> Compute:
        return self if dtype is None else replace(self, dtype=dtype)


Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies `[..., in]` to `[..., out]`, in the type that it is given."""


class RepresentedLinear(nn.Module):
    """Computes a backend's `product`. It is no `nn.Linear`, so that no loader fills it again."""

    def __init__(self, product: Product, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.product = product
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x)
        return out if self.bias is None else out + self.bias


def represented_product(
    backend: str, weight: torch.Tensor, dtype: torch.dtype, rounding: Rounding = DEFAULT
) -> Product:
    """What `backend` computes with `weight` `[out, in]`, for any device and inputs of `dtype`."""
    if backend in ("onednn_w8a8", "cuda_w8a8"):
        return RotatedCodes.of_weight(weight, rounding).forward
    represented = BACKENDS[backend].represent(weight, rounding).to(dtype)
    return lambda x: functional.linear(x, represented)


def load_layer_as_planned(
    module: nn.Module,
    checkpoint: Checkpoint,
    name_prefix: str,
    scheme: LayerScheme,
    compute: Compute,
    importance: LayerImportance | None = None,
) -> frozenset[str]:
    """Fill a layer on the meta device; return the backends represented: none of a checkpoint that
    is quantized already, as it has the same weights on every device.
    """
    compute = compute.in_type(scheme.dtype)
    if scheme.rounding != WEIGHTED:
        importance = None
    represented = set()
    if scheme.planned_for is not None and scheme.bits < FULL_BITS and checkpoint.gptq is None:
        for name, linear in list(module.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            rule = _foreign_rule(linear, scheme, compute)
            if rule is None:
                continue
            full_name = f"{name_prefix}.{name}"
            stored = _stored(linear, checkpoint, full_name, compute)
            inputs = None if importance is None else importance.inputs.get(name)
            rounding = Rounding.of_tensor(scheme.rounding, full_name, inputs)
            product = represented_product(rule.name, stored, compute.dtype, rounding)
            put_submodule(module, name, RepresentedLinear(product, linear.bias))
            represented.add(rule.name)
    form = LayerForm(
        scheme.bits,
        compute.processor,
        compute.dtype,
        compute.device,
        scheme.backend,
        scheme.rounding,
    )
    load_layer(LayerLoad(module, name_prefix, form, importance), checkpoint)
    return frozenset(represented)


def _foreign_rule(linear: nn.Linear, scheme: LayerScheme, compute: Compute) -> KernelRule | None:
    assert scheme.planned_for is not None, "the scheme is of this machine"
    shape = LinearShape(linear.in_features, linear.out_features)
    bits, dtype = scheme.bits, dtype_name(compute.dtype)
    planned = rule_for(scheme.planned_for, bits, shape, scheme.planned_dtype, scheme.backend)
    here = rule_for(compute.processor, bits, shape, dtype, scheme.backend)
    return None if here is planned else planned


def _stored(
    linear: nn.Linear, checkpoint: Checkpoint, full_name: str, compute: Compute
) -> torch.Tensor:
    stored = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    load_tensors(stored, checkpoint, full_name, torch.float32, compute.device)
    return stored.weight.detach()
