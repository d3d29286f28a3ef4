"""Experts of a layer over packed weights: products grouped by expert."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.backends.base import PackedWeight, copy_of, tensor_bytes
from quant.backends.cpu import widened
from quant.backends.cuda.packed import CudaPacked, asked_products
from quant.backends.cuda.products import Codes, CudaProducts
from quant.backends.table import ASKED_PER_EXPERT
from quant.linear import (
    HostForm,
    LayerForm,
    multiply_reordered,
    packed_weight,
    reordered,
    reordered_bytes,
)
from quant.rounding.importance import InputStatistics
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import FULL_BITS, Cut, LinearShape

_ALIGNMENT = 16
"""Bytes that kernels load at once: parts of a larger tensor begin at multiples of it."""


_asked_products = functools.cache(asked_products)


@dataclass(frozen=True)
class PlainWeight(PackedWeight):
    """`weight` `[out, in]` of 16 bit, in the compute type."""

    weight: Tensor

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self:
        return cls(copy_of(weight, dtype, device))

    @classmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if widened.is_known(self.weight):
            return widened.multiply(x, self.weight)
        return functional.linear(x, self.weight)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        if widened.is_known(self.weight):
            widened.warm_up()

    def restored_for(self, x: Tensor) -> Tensor | None:
        return self.weight.to(x.device, non_blocking=True).to(x.dtype)


@dataclass(frozen=True)
class _ReorderedWeight(PlainWeight):
    """One in oneDNN's layout, as of `quant.linear.PrepackedLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply_reordered(x, self.weight)

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        pass

    def restored_for(self, x: Tensor) -> Tensor | None:
        return None

    def state(self) -> dict[str, Tensor]:
        return {}  # 16-bit layers are not stored

    @property
    def nbytes(self) -> int:
        return reordered_bytes(self.weight)


Product = Callable[[PackedWeight, Tensor], Tensor]
"""The product of some rows `[rows, in]` with a weight."""


class ExpertWeights:
    """One weight `[out, in]` of each expert, as a backend packs them. Their tensors are parts of
    larger ones where they can be, so that an allocator rounds up once.
    """

    def __init__(self, shape: LinearShape, count: int) -> None:
        self.shape, self.count = shape, count
        self.weights: list[PackedWeight] = []
        self._joined: dict[str, Tensor] = {}

    @classmethod
    def of_state(
        cls,
        backend: type[PackedWeight],
        state: Mapping[str, Tensor],
        shape: LinearShape,
        count: int,
        dtype: torch.dtype,
    ) -> Self:
        """Restore what `state` gave."""
        found = cls(shape, count)
        found._joined = dict(state)
        first = found._part(backend, 0, dtype)
        if _shares(first, found._of(0)):
            rest = (found._part(backend, index, dtype) for index in range(1, count))
            found.weights = [first, *rest]
            return found
        for index in range(count):
            own = {name: part.clone() for name, part in found._of(index).items()}
            found.weights.append(backend.from_state(own, shape, dtype))
        found._joined = {}
        return found

    def add(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        """Add the next expert's weight, which may be held as a copy."""
        index = len(self.weights)
        if not index:
            self._joined = self._room_for(packed, dtype)
        if not self._joined:
            self.weights.append(packed)
            return
        for name, part in packed.state().items():
            if part.dim():
                self._joined[name][index] = part
        self.weights.append(self._part(type(packed), index, dtype))

    def put(self, index: int, weight: Tensor) -> None:
        """Take `weight` `[out, in]` in place of an expert's plain one."""
        held = self.weights[index]
        if type(held) is PlainWeight:
            held.weight.copy_(weight)
        else:  # in blocks
            dtype = torch.bfloat16
            self.weights[index] = PlainWeight(copy_of(weight, dtype, torch.device("cpu")))

    def multiply(self, rows: Tensor, counts: Sequence[int], product: Product) -> Tensor:
        """Multiply `rows` `[asked, in]`, of which `counts` follow each other for each expert, to
        `[asked, out]`, one `product` an expert.
        """
        asked = [index for index, count in enumerate(counts) if count]
        parts = rows.split([counts[index] for index in asked])
        pairs = zip(asked, parts, strict=True)
        products = [product(self.weights[index], part) for index, part in pairs]
        return torch.cat(products) if products else rows.new_empty(0, self.shape.out_features)

    def multiply_asked(
        self, products: CudaProducts, x: Tensor, asked: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Multiply `x` `[tokens, in]` with the weights of the experts `asked` `[tokens, k]`, and
        add their `bias` `[experts, out]`: `[tokens * k, out]`. Nothing is waited for.
        """
        packed, scales = (self._joined[name].flatten(0, 1) for name in ("packed", "scales"))
        first = self.weights[0]
        assert isinstance(first, CudaPacked), "which such products are of"
        codes = Codes(packed, scales, first.in_features, first.bits)
        return products.multiply_asked(codes, self.shape.out_features, x, asked, bias)

    def asked_products(self, dtype: torch.dtype) -> CudaProducts | None:
        """What `multiply_asked` takes; None where each expert is to be multiplied by itself."""
        if "packed" not in self._joined:
            return None
        packed = self.weights[0]
        in_blocks = isinstance(packed, CudaPacked) and packed.in_super_blocks
        return _asked_products(self.backend, in_blocks, dtype, self._joined["packed"].device)

    def pin(self) -> None:
        """Lock the memory that weights share, so that a GPU copies it by itself; as it lies there,
        since blocks that torch pins are rounded up to powers of two.
        """
        runtime: Any = torch.cuda.cudart()
        for part in self._joined.values():
            if part.dim():
                runtime.cudaHostRegister(part.data_ptr(), part.nbytes, 0)
                weakref.finalize(part, runtime.cudaHostUnregister, part.data_ptr())

    @property
    def backend(self) -> type[PackedWeight]:
        return type(self.weights[0])

    @property
    def nbytes(self) -> int:
        if self._joined:
            return tensor_bytes(*(each for each in self._joined.values() if each.dim()))
        return sum(weight.nbytes for weight in self.weights)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Give tensors `[experts, ...]` of all weights' states, one at a time."""
        if self._joined:
            yield from self._joined.items()
            return
        for name, first in self.weights[0].state().items():
            if not first.dim():
                yield name, first
                continue
            joined = first.new_empty(self.count, *first.shape)
            for index, weight in enumerate(self.weights):  # of which a state may be a copy
                joined[index] = weight.state()[name]
            yield name, joined

    def _of(self, index: int) -> dict[str, Tensor]:
        return {n: joined[index] if joined.dim() else joined for n, joined in self._joined.items()}

    def _part(self, backend: type[PackedWeight], index: int, dtype: torch.dtype) -> PackedWeight:
        return backend.from_state(self._of(index), self.shape, dtype)

    def _room_for(self, packed: PackedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """Memory for all weights like `packed`, none where a weight is not made of such parts."""
        state = packed.state()
        parts = [each for each in state.values() if each.dim()]
        aligned = all(each.is_contiguous() and each.nbytes % _ALIGNMENT == 0 for each in parts)
        if not (parts and aligned):
            return {}
        again = type(packed).from_state(state, self.shape, dtype)
        if not (_shares(packed, state) and _shares(again, state)):
            return {}
        return {
            name: part.new_empty(self.count, *part.shape) if part.dim() else part
            for name, part in state.items()
        }


def _shares(packed: PackedWeight, state: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of `packed` are those of `state`."""
    again = packed.state()
    return all(
        part.data_ptr() == again[name].data_ptr() for name, part in state.items() if part.dim()
    )


PackExpert = Callable[[Tensor, LayerForm, str, InputStatistics | None, Cut | None], PackedWeight]
"""As `packed_expert`."""


class QuantizedExperts(nn.Module):
    """Takes the place of transformers' fused experts. `apply_gate` makes `[rows, width]` of gate
    and up, `[rows, 2 * width]`. `seen`, where it is set, is given the name of a weight, its inputs
    `[asked, in]` and how many of them are each expert's. `padded_to`: rows that products have at
    least.
    """

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        apply_gate: Callable[[Tensor], Tensor],
        form: LayerForm,
    ) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.apply_gate = apply_gate
        self.bits, self.compute_dtype = form.bits, form.dtype
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        self.seen: Callable[[str, Tensor, Sequence[int]], None] | None = None
        self.padded_to = 0

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Of `hidden` `[tokens, hidden_size]` give the results of the experts in `top_k_index`
        `[tokens, k]`, summed with `top_k_weights` `[tokens, k]`, in the order of a token's experts.
        """
        own = hidden.to(self.compute_dtype)
        products = self._asked_products(top_k_index.numel())
        if products is None:
            found = self.computed(own, top_k_index, top_k_weights, self.product)
        else:
            found = self._computed_as_asked(own, top_k_index, top_k_weights, products)
        return found.to(hidden.dtype)

    def _asked_products(self, asked: int) -> tuple[CudaProducts, CudaProducts] | None:
        """Kernels for both weights that take every product by itself, where there are so few that
        experts are hardly asked twice; None elsewhere.
        """
        if asked > ASKED_PER_EXPERT * self.gate_up.count or self.seen or self.padded_to:
            return None
        first, second = (
            each.asked_products(self.compute_dtype) for each in (self.gate_up, self.down)
        )
        return None if first is None or second is None else (first, second)

    def _computed_as_asked(
        self,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        products: tuple[CudaProducts, CudaProducts],
    ) -> Tensor:
        """Compute as `computed`, by one launch for each weight."""
        grown = self.gate_up.multiply_asked(
            products[0], hidden, top_k_index, self.gate_up_proj_bias
        )
        asked = top_k_index.reshape(-1, 1)
        gated = self.apply_gate(grown)
        out = self.down.multiply_asked(products[1], gated, asked, self.down_proj_bias)
        return (out.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)).sum(1)

    def product(self, weight: PackedWeight, rows: Tensor) -> Tensor:
        missing = self.padded_to - len(rows)
        if missing <= 0:
            return weight.forward(rows)
        padded = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
        return weight.forward(padded)[: len(rows)]

    def computed(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, product: Product
    ) -> Tensor:
        """Compute as `forward`, in the type of `hidden` and where that lies."""
        tokens, per_token = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        counts = self._counts(experts)
        rows = hidden.index_select(0, order // per_token)
        if self.seen is not None:
            self.seen("gate_up_proj", rows, counts)
        grown = self.gate_up.multiply(rows, counts, product)
        if self.gate_up_proj_bias is not None:
            grown += self.gate_up_proj_bias.to(rows)[experts]
        gated = self.apply_gate(grown)
        if self.seen is not None:
            self.seen("down_proj", gated, counts)
        out = self.down.multiply(gated, counts, product)
        if self.down_proj_bias is not None:
            out += self.down_proj_bias.to(rows)[experts]
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(tokens, per_token, -1)
        return (by_token * top_k_weights.unsqueeze(-1)).sum(1)

    def _counts(self, experts: Tensor) -> list[int]:
        """Rows of each expert in ascending `experts`; a GPU is waited for once."""
        numbers = torch.arange(self.gate_up.count, device=experts.device)
        ends: list[int] = torch.searchsorted(experts, numbers, right=True).tolist()
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def rows_without_waiting(self, per_token: int) -> int:
        """Most tokens, of `per_token` experts each, of which the host is not told which."""
        most = ASKED_PER_EXPERT * self.gate_up.count // per_token
        return 0 if self._asked_products(most * per_token) is None else most

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, without biases."""
        return self.gate_up.nbytes + self.down.nbytes


def is_experts(module: nn.Module) -> bool:
    """Whether `module` has a layer's experts as transformers fuses them."""
    own = dict(module.named_parameters(recurse=False))
    return all(name in own and own[name].dim() == 3 for name in ("gate_up_proj", "down_proj"))


def expert_shapes(module: nn.Module) -> tuple[int, LinearShape, LinearShape]:
    """The number of experts of a fused module, and the weights of one: gate and up, and down."""
    shapes = []
    for name in ("gate_up_proj", "down_proj"):
        count, rows, columns = module.get_parameter(name).shape
        if getattr(module, "is_transposed", False):
            rows, columns = columns, rows
        shapes.append(LinearShape(columns, rows))
    return count, shapes[0], shapes[1]


def packed_expert(
    weight: Tensor,
    form: LayerForm,
    name: str,
    inputs: InputStatistics | None,
    cut: Cut | None = None,
) -> PackedWeight:
    """Pack an expert's `weight` `[out, in]`, which may be a view of a file, or what `cut` takes of
    it; errors as of `quant.linear.quantize_linear`.
    """
    if form.bits < FULL_BITS:
        return packed_weight(weight, form, name, inputs, cut)
    plain = copy_of(weight if cut is None else weight[cut.index], form.dtype, form.device)
    # blocks of oneDNN's could not be restored elsewhere
    blocks = None if isinstance(form, HostForm) else reordered(plain, form.processor)
    return PlainWeight(plain) if blocks is None else _ReorderedWeight(blocks)


def pad_products(model: nn.Module, rows: int) -> None:
    """Have the experts of `model` multiply at least so many rows at once, as its linears do."""
    for module in model.modules():
        if isinstance(module, QuantizedExperts):
            module.padded_to = rows
