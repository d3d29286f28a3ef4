"""Linear layers over packed weights."""

from __future__ import annotations

import torch
from torch import nn

from quant.backends.base import PackedWeight, copy_of
from quant.backends.registry import usable_backend
from quant.errors import DeviceError
from quant.scheme import KernelRule, LinearShape, Processor, layer_rule


class QuantizedLinear(nn.Module):
    """A linear layer whose weight a kernel backend holds; the bias stays in the compute type."""

    def __init__(
        self,
        packed: PackedWeight,
        shape: LinearShape,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        rule: KernelRule,
    ) -> None:
        """Wrap `packed`, made for activations of `dtype`; `bias` is `[out]` or None."""
        super().__init__()
        self.packed = packed
        self.in_features = shape.in_features
        self.out_features = shape.out_features
        self.bits = rule.bits
        self.compute_dtype = dtype
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[..., in]` to `[..., out]`, in the type of `x`."""
        out = self.packed.forward(x.to(self.compute_dtype))
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        """Shape, bitwidth and backend."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={self.bits}, backend={type(self.packed).__name__}"
        )


def quantize_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    processor: Processor,
    dtype: torch.dtype,
    device: torch.device,
    backend: str | None = None,
) -> nn.Module:
    """A linear layer of `weight` `[out, in]` at `bits` on `device`; 16 bit gives an `nn.Linear`.

    `weight` and `bias` are read, never kept, whatever their type: they may be views of a file.
    `backend` names a rule of `quant.scheme`, None takes the best of `processor`; a shape that it
    does not take falls to pure torch. SpecError for an impossible combination, CheckpointError for
    values that are not finite, DeviceError where the backend needs more bytes than its rule says
    or a package that is missing.
    """
    own_bias = None if bias is None else copy_of(bias, dtype, device)
    shape = LinearShape(in_features=weight.shape[1], out_features=weight.shape[0])
    rule = layer_rule(processor, bits, shape, dtype_name(dtype), backend)
    if bits == 16:
        return _plain_linear(weight, own_bias, dtype, device)
    packed = usable_backend(rule.name, bits, dtype, device).from_weight(weight, dtype, device)
    planned_bytes = rule.nbytes(shape, dtype_name(dtype))
    if packed.nbytes > planned_bytes:
        raise DeviceError(
            f"backend {rule.name} holds a weight of {shape.out_features} x {shape.in_features} in "
            f"{packed.nbytes} bytes but plans count {planned_bytes}; plan with another backend"
        )
    return QuantizedLinear(packed, shape, own_bias, dtype, rule)


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
