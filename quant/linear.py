"""Linear layers over packed weights, and the form that a layer is held in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from quant.backends.base import CanonicalPacked, PackedWeight, copy_of
from quant.backends.cpu import widened
from quant.backends.kernel_classes import BACKENDS, usable_backend
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import HOST_BACKENDS, rule_for
from quant.common.errors import DeviceError
from quant.devices import local_processor, prefers_float32
from quant.rounding.canonical import CanonicalWeight, dequantize, quantize_part
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import Rounding
from quant.scheme import COLUMNS, FULL_BITS, ROUNDINGS, Cut, LinearShape, Processor, part_shape


@dataclass(frozen=True)
class LayerForm:
    """The form of a layer; `backend` None: the preferred one; norms and biases are in `dtype`."""

    bits: int
    processor: Processor
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None
    rounding: str = ROUNDINGS[0]

    def with_bits(self, bits: int) -> Self:
        """This form, or one of other bits, for which another backend is preferred."""
        return self if bits == self.bits else replace(self, bits=bits, backend=None)

    def rule_of(self, shape: LinearShape) -> KernelRule:
        return rule_for(self.processor, self.bits, shape, dtype_name(self.dtype), self.backend)


@dataclass(frozen=True)
class HostForm(LayerForm):
    """The form of experts in the host's memory. `streams_from`: tokens of a pass from which they go
    to the device that has the tokens, one by one, and are multiplied there; None: never.
    """

    streams_from: int | None = None

    def with_bits(self, bits: int) -> Self:
        return replace(self, bits=bits, backend=HOST_BACKENDS.get(bits))

    @classmethod
    def beside(cls, form: LayerForm, bits: int, streams_from: int | None) -> Self:
        """The form of experts of `bits` whose layer has `form` on its device."""
        host = torch.device("cpu")
        return cls(
            bits=bits,
            processor=local_processor(host),
            dtype=torch.float32 if form.dtype == torch.float32 else torch.bfloat16,
            device=host,
            backend=HOST_BACKENDS.get(bits),
            rounding=form.rounding,
            streams_from=streams_from,
        )


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
        """`bias` is `[out]` or None; `input_order` `[in]`: the input of each column (None: in
        order).
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
        own = x.to(self.compute_dtype)
        if self.input_order is not None:
            own = own.index_select(-1, self.input_order)
        return self.packed.linear(own, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={self.bits}, backend={type(self.packed).__name__}"
        )


def quantize_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: LayerForm,
    name: str = "",
    inputs: InputStatistics | None = None,
    cut: Cut | None = None,
) -> nn.Module:
    """Make a linear of `weight` `[out, in]`; 16 bit gives an `nn.Linear`. `weight` and `bias` are
    never kept: they may be views of a file. Stochastic rounding draws from a seed of `name`;
    backends with codes of their own, such as nf4, round to the nearest. Of what `cut` takes it has
    the codes of the whole weight, but for backends of own codes with scales of whole rows (nf4 and
    rotated ones); `inputs` are the whole's. SpecError for an impossible form,
    CheckpointError for values that are not finite, DeviceError for bytes beyond the rule or a
    missing package.
    """
    dtype, device = form.dtype, form.device
    own_bias = None if bias is None else copy_of(bias, dtype, device)
    if form.bits == FULL_BITS:
        own_weight = weight if cut is None else weight[cut.index]
        return _plain_linear(own_weight, own_bias, dtype, device)
    packed, shape = packed_weight(weight, form, name, inputs, cut), _held_shape(weight, cut)
    return QuantizedLinear(packed, shape, own_bias, dtype, form.rule_of(shape))


def packed_weight(
    weight: torch.Tensor,
    form: LayerForm,
    name: str,
    inputs: InputStatistics | None = None,
    cut: Cut | None = None,
) -> PackedWeight:
    """Quantize as `quantize_linear`, to less than 16 bit."""
    dtype, device = form.dtype, form.device
    shape = _held_shape(weight, cut)
    rule = form.rule_of(shape)
    kernel = usable_backend(rule.name, form.bits, dtype, device)
    rounding = Rounding.of_tensor(form.rounding, name, inputs)
    packed: PackedWeight
    if cut is not None and issubclass(kernel, CanonicalPacked) and not kernel.rounds_again:
        canonical = quantize_part(weight, form.bits, cut, device, rounding)
        packed = kernel.from_canonical(canonical)
    else:
        if cut is not None and inputs is not None and cut.dimension == COLUMNS:
            own_inputs = inputs.of_inputs(slice(cut.begin, cut.end))
            rounding = replace(rounding, inputs=own_inputs)
        own_weight = weight if cut is None else weight[cut.index]
        packed = kernel.from_weight(own_weight, dtype, device, rounding)
    _check_bytes(packed, rule, shape, dtype)
    return packed


def _held_shape(weight: torch.Tensor, cut: Cut | None) -> LinearShape:
    shape = LinearShape(in_features=weight.shape[1], out_features=weight.shape[0])
    return shape if cut is None else part_shape(shape, cut)


def linear_of_codes(
    canonical: CanonicalWeight, input_order: torch.Tensor | None, form: LayerForm
) -> QuantizedLinear:
    """Make a linear of chosen codes, which may lie on the host. A backend with codes of its own
    cannot hold them at 3 and 4 bit: the next one takes its place, with a warning.
    """
    assert canonical.bits == form.bits, "checked by the caller, who can name the tensor"
    rows, columns = canonical.codes.shape
    group = None if canonical.zero is None else canonical.group
    shape = LinearShape(columns, rows, group, stored_form=canonical.form)
    if form.backend is not None and canonical.zero is not None:
        form = replace(form, backend=_backend_for_codes(form.backend))
    rule = form.rule_of(shape)
    kernel = usable_backend(rule.name, form.bits, form.dtype, form.device)
    packed: PackedWeight
    if issubclass(kernel, CanonicalPacked):
        packed = kernel.from_canonical(canonical.to(form.device))
    else:  # at 8 bit, with a grid as fine
        packed = kernel.from_weight(dequantize(canonical), form.dtype, form.device)
    _check_bytes(packed, rule, shape, form.dtype)
    order = None if input_order is None else input_order.to(form.device)
    return QuantizedLinear(packed, shape, None, form.dtype, rule, order)


def _backend_for_codes(backend: str) -> str | None:
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
    return str(dtype).removeprefix("torch.")


def _plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(copy_of(weight, dtype, device), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class PrepackedLinear(nn.Module):
    """A 16-bit linear in oneDNN's block layout: a plain weight is brought into it at every product;
    done once, a decode step of a few rows takes two thirds of the time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.packed_weight = weight
        self.out_features, self.in_features = shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        return reordered_bytes(self.packed_weight)

    def forward(self, x: Tensor) -> Tensor:
        return multiply_reordered(x, self.packed_weight, self.bias)


class WidenedLinear(nn.Linear):
    """A bfloat16 linear for CPUs that `quant.backends.cpu.widened` is for."""

    def forward(self, x: Tensor) -> Tensor:
        return widened.multiply(x, self.weight, self.bias)


def prepack(linear: nn.Linear, processor: Processor, in_place: bool = False) -> nn.Module:
    """Prepack where that is faster and adds no byte, unless the weight must stay `in_place` for
    other modules; oneDNN refuses the layout on a CPU too old, as `processor` may be one that is
    only played here.
    """
    weight = linear.weight.detach()
    packed = None if in_place else reordered(weight, processor)
    if packed is None:
        if processor.is_cpu and widened.is_known(weight):
            linear.__class__ = WidenedLinear
        return linear
    bias = None if linear.bias is None else linear.bias.detach()
    return PrepackedLinear(packed, bias, (linear.out_features, linear.in_features))


def reordered(weight: Tensor, processor: Processor) -> Tensor | None:
    """Bring `weight` `[out, in]` into the layout of `PrepackedLinear`, where `prepack` would."""
    if not processor.is_cpu or weight.dtype != torch.bfloat16:
        return None
    known = "avx512_bf16" in processor.instruction_sets
    if not (known and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    # blocks that do not fill are padded
    return packed if reordered_bytes(packed) == weight.nbytes else None


def reordered_bytes(weight: Tensor) -> int:
    """Bytes of a weight that is `reordered`, which are not in torch's storage."""
    count: int = torch.ops.mkldnn._nbytes(weight)
    return count


def multiply_reordered(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tokens, (rows, columns) = x.numel() // max(1, x.shape[-1]), weight.shape
    if prefers_float32(x.dtype, x.device, tokens) and widened.lies_in_panels(rows, columns):
        out = widened.multiply_panels(x.reshape(-1, columns), weight, rows, bias)
        return out.view(*x.shape[:-1], rows)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def prepack_linears(module: nn.Module, processor: Processor) -> None:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, prepack(child, processor))
