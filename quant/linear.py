"""Linear layers over packed weights."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from quant.backends.base import CanonicalPacked, PackedWeight, copy_of
from quant.backends.cpu.onednn_w8a8 import OneDnnW8A8
from quant.backends.cpu.token_codes import warm_up
from quant.backends.registry import BACKENDS, usable_backend
from quant.backends.selection import layer_rule
from quant.backends.table import KernelRule
from quant.canonical import CanonicalWeight, dequantize, quantize
from quant.common.errors import DeviceError
from quant.rounding import NEAREST, Rounding
from quant.scheme import LinearShape, Processor


class QuantizedLinear(nn.Module):
    """A linear layer whose weight a kernel backend holds; the bias stays in the compute type."""

    def __init__(
        self,
        packed: PackedWeight,
        shape: LinearShape,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        rule: KernelRule,
        input_order: torch.Tensor | None = None,
    ) -> None:
        """Wrap `packed`, made for activations of `dtype`; `bias` is `[out]` or None.

        `input_order` `[in]`: which input belongs to each column of `packed`, None: the same one.
        """
        super().__init__()
        self.packed = packed
        self.in_features = shape.in_features
        self.out_features = shape.out_features
        self.bits = rule.bits
        self.compute_dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.input_order: torch.Tensor | None
        self.register_buffer("input_order", input_order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` to `[..., out]`, in the type of `x`."""
        own = x.to(self.compute_dtype)
        if self.input_order is not None:
            own = own.index_select(-1, self.input_order)
        out = self.packed.forward(own)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        """Shape, bitwidth and backend."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={self.bits}, backend={type(self.packed).__name__}"
        )


def warm_up_codes(model: nn.Module) -> None:
    """Compile now what layers of `model` that round their inputs need at the first token."""
    found = (m for m in model.modules() if isinstance(m, QuantizedLinear))
    for width in {m.in_features for m in found if isinstance(m.packed, OneDnnW8A8)}:
        warm_up(width)


def quantize_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    processor: Processor,
    dtype: torch.dtype,
    device: torch.device,
    backend: str | None = None,
    rounding: Rounding = NEAREST,
) -> nn.Module:
    """A linear layer of `weight` `[out, in]` at `bits` on `device`; 16 bit gives an `nn.Linear`.

    `weight` and `bias` are read, never kept, whatever their type: they may be views of a file.
    `backend` names a rule of `quant.scheme`, None takes the best of `processor`; a shape that it
    does not take falls to pure torch. Backends with codes of their own, such as nf4, round to the
    nearest whatever `rounding` says. SpecError for an impossible combination, CheckpointError for
    values that are not finite, DeviceError where the backend needs more bytes than its rule says
    or a package that is missing.
    """
    own_bias = None if bias is None else copy_of(bias, dtype, device)
    shape = LinearShape(in_features=weight.shape[1], out_features=weight.shape[0])
    rule = layer_rule(processor, bits, shape, dtype_name(dtype), backend)
    if bits == 16:
        return _plain_linear(weight, own_bias, dtype, device)
    kernel = usable_backend(rule.name, bits, dtype, device)
    packed: PackedWeight
    if issubclass(kernel, CanonicalPacked):
        packed = kernel.from_canonical(quantize(weight, bits, device, rounding))
    else:
        packed = kernel.from_weight(weight, dtype, device)
    _check_bytes(packed, rule, shape, dtype)
    return QuantizedLinear(packed, shape, own_bias, dtype, rule)


def linear_of_codes(
    canonical: CanonicalWeight,
    input_order: torch.Tensor | None,
    processor: Processor,
    dtype: torch.dtype,
    device: torch.device,
    backend: str | None = None,
) -> QuantizedLinear:
    """A linear layer of codes that are chosen already, without a bias.

    `canonical` may lie on the host; its columns belong to the inputs `input_order` (None: in
    order). A backend with codes of its own, such as nf4, cannot hold them at 3 and 4 bit: the next
    one that can takes its place, with a warning. Errors as in `quantize_linear`.
    """
    rows, columns = canonical.codes.shape
    shape = LinearShape(columns, rows, canonical.group if canonical.zero is not None else None)
    if backend is not None and canonical.zero is not None:
        backend = _backend_for_codes(backend)
    rule = layer_rule(processor, canonical.bits, shape, dtype_name(dtype), backend)
    kernel = usable_backend(rule.name, canonical.bits, dtype, device)
    packed: PackedWeight
    if issubclass(kernel, CanonicalPacked):
        packed = kernel.from_canonical(canonical.to(device))
    else:  # at 8 bit, on a grid as fine as ours
        packed = kernel.from_weight(dequantize(canonical), dtype, device)
    _check_bytes(packed, rule, shape, dtype)
    order = None if input_order is None else input_order.to(device)
    return QuantizedLinear(packed, shape, None, dtype, rule, order)


def _backend_for_codes(backend: str) -> str | None:
    """`backend`, or None with a warning where it has codes of its own."""
    if backend not in BACKENDS or issubclass(BACKENDS[backend], CanonicalPacked):
        return backend
    warnings.warn(
        f"kernel backend {backend} cannot hold weights that are quantized already; another one "
        "takes its place, at another speed than planned",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


def _check_bytes(
    packed: PackedWeight, rule: KernelRule, shape: LinearShape, dtype: torch.dtype
) -> None:
    planned_bytes = rule.nbytes(shape, dtype_name(dtype))
    if packed.nbytes > planned_bytes:
        raise DeviceError(
            f"backend {rule.name} holds a weight of {shape.out_features} x {shape.in_features} in "
            f"{packed.nbytes} bytes but plans count {planned_bytes}; plan with another backend"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a compute type as plans write it: `torch.float16` is `float16`."""
    return str(dtype).removeprefix("torch.")


def _plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(copy_of(weight, dtype, device), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
