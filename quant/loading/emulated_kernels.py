"""Emulating the kernels of another device: a linear is computed plainly with the weight that they
would round to (`PackedWeight.represent`), so that its rounding is the planned one. Kernels that
multiply codes round activations to 8 bit too: so do these products, which are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from quant.backends.base import PackedWeight
from quant.backends.kernel_classes import BACKENDS
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import rule_for
from quant.checkpoint.reader import Checkpoint
from quant.experts import PackExpert, PlainWeight, expert_shapes
from quant.linear import LayerForm
from quant.loading.cached_layer import put_submodule
from quant.loading.expert_tensors import FUSED, load_experts
from quant.loading.layer_load import LayerLoad, expert_inputs
from quant.loading.loader import load_layer, load_tensors
from quant.rounding.importance import InputStatistics
from quant.rounding.rotation import RotatedCodes
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import FULL_BITS, ROUNDINGS, WEIGHTED, Cut, LinearShape, Processor


@dataclass(frozen=True)
class LayerScheme:
    """The form of a layer, here or as planned. With `planned_for` it is that of another processor,
    which computes in `planned_dtype`: kernels that do not run here are represented. `expert_bits`:
    those of its experts, None for those of the layer.
    """

    bits: int = FULL_BITS
    backend: str | None = None
    dtype: torch.dtype | None = None
    planned_for: Processor | None = None
    planned_dtype: str = "float32"
    rounding: str = ROUNDINGS[0]
    kv_bits: int = FULL_BITS
    expert_bits: int | None = None

    @property
    def of_experts(self) -> LayerScheme:
        """The form of its experts; kernels of bits of their own are the preferred ones."""
        if self.expert_bits is None:
            return self
        return replace(self, bits=self.expert_bits, backend=None, expert_bits=None)

    @property
    def rounds(self) -> bool:
        """Whether weights of the layer, or of its experts, are rounded."""
        return min(self.bits, self.of_experts.bits) != FULL_BITS


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


def form_of(scheme: LayerScheme, compute: Compute) -> LayerForm:
    compute = compute.in_type(scheme.dtype)
    return LayerForm(
        scheme.bits,
        compute.processor,
        compute.dtype,
        compute.device,
        scheme.backend,
        scheme.rounding,
    )


def load_layer_as_planned(
    load: LayerLoad, checkpoint: Checkpoint, scheme: LayerScheme
) -> frozenset[str]:
    """Fill a layer on the meta device in the form of `scheme`; return the backends represented:
    none where stored codes are kept, which are the same weights on every device.
    """
    if scheme.rounding != WEIGHTED:
        load = replace(load, importance=None)
    experts = scheme.of_experts
    own_form = replace(load.form, bits=experts.bits, backend=experts.backend)
    if experts is not scheme:
        load = replace(load, experts_form=own_form)
    represented: set[str] = set()
    layer_bits = load.stored_bits(checkpoint)
    is_foreign = scheme.planned_for is not None
    if is_foreign and scheme.bits < FULL_BITS and scheme.bits != layer_bits:
        for name, linear in load.linears:
            full_name = f"{load.name_prefix}.{name}"
            if checkpoint.has_codes(full_name) and checkpoint.stored_bits(full_name) == scheme.bits:
                continue
            shape = LinearShape(linear.in_features, linear.out_features)
            rule = _foreign_rule(shape, scheme, load.form)
            if rule is None:
                continue
            stored = _stored(linear, checkpoint, full_name, load.form)
            inputs = None if load.importance is None else load.importance.inputs.get(name)
            rounding = Rounding.of_tensor(scheme.rounding, full_name, inputs)
            product = represented_product(rule.name, stored, load.form.dtype, rounding)
            put_submodule(load.module, name, RepresentedLinear(product, linear.bias))
            represented.add(rule.name)
    if is_foreign and experts.bits < FULL_BITS and experts.bits != layer_bits:
        for name, tensors in load.experts(checkpoint):
            _, *shapes = expert_shapes(tensors.module)
            found = {shape: _foreign_rule(shape, experts, own_form) for shape in shapes}
            rules = {shape: rule for shape, rule in found.items() if rule is not None}
            is_stored = any(tensors.stored_bits(fused) == experts.bits for fused in FUSED)
            if len(rules) < len(found) or is_stored:
                continue
            pack = _representing(rules, scheme.rounding)
            filled = load_experts(tensors, own_form, expert_inputs(load, name), pack)
            put_submodule(load.module, name, filled)
            represented |= {rule.name for rule in rules.values()}
    load_layer(load, checkpoint)
    return frozenset(represented)


@dataclass(frozen=True)
class _RepresentedExpert(PlainWeight):
    """Computes a backend's `product`, whose own copy of the weight is the only one."""

    product: Product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def state(self) -> dict[str, torch.Tensor]:
        return {}


def _representing(rules: Mapping[LinearShape, KernelRule], rounding: str) -> PackExpert:
    def pack(
        weight: torch.Tensor,
        form: LayerForm,
        name: str,
        inputs: InputStatistics | None,
        _: Cut | None,
    ) -> PackedWeight:
        rule = rules[LinearShape(weight.shape[1], weight.shape[0])]
        way = Rounding.of_tensor(rounding, name, inputs)
        product = represented_product(rule.name, weight.float(), form.dtype, way)
        return _RepresentedExpert(weight.new_empty(0), product)

    return pack


def _foreign_rule(shape: LinearShape, scheme: LayerScheme, form: LayerForm) -> KernelRule | None:
    assert scheme.planned_for is not None, "the scheme is of this machine"
    bits = scheme.bits
    planned = rule_for(scheme.planned_for, bits, shape, scheme.planned_dtype, scheme.backend)
    return None if form.rule_of(shape) is planned else planned


def _stored(
    linear: nn.Linear, checkpoint: Checkpoint, full_name: str, form: LayerForm
) -> torch.Tensor:
    stored = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    load_tensors(stored, checkpoint, full_name, torch.float32, form.device)
    return stored.weight.detach()
