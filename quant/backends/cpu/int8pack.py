"""8 bit on CPUs: torch's int8 kernel, where 8-bit products saturate or activations must not be
rounded, and oneDNN on CPUs with VNNI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quant.backends.base import CanonicalPacked, content_of, linear_by_blocks, tensor_bytes
from quant.backends.table import INT8PACK_COLUMNS
from quant.common.errors import SpecError
from quant.rounding.canonical import CanonicalWeight, decode
from quant.rounding.rotation import MIDDLE, RotatedCodes, round_activations, warm_up_rounding
from quant.rounding.ways import DEFAULT, Rounding
from quant.scheme import LinearShape

_MANY_TOKENS = 24
"""Number of tokens from which a product in bfloat16 is worth converting the codes (measured)."""


@dataclass(frozen=True)
class Int8Pack(CanonicalPacked):
    """`codes`: int8 `[out, in]`; `scale`: float32 `[out]`."""

    bits: ClassVar[int] = 8

    codes: Tensor
    scale: Tensor

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        columns = canonical.codes.shape[1]
        if columns % INT8PACK_COLUMNS:
            raise SpecError(
                f"backend int8pack takes multiples of {INT8PACK_COLUMNS} input features, not "
                f"{columns}; torch_8bit takes any"
            )
        return cls(canonical.codes, canonical.scale.view(-1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        rows = len(self.codes)
        if len(tokens) >= _MANY_TOKENS:
            return linear_by_blocks(x, rows, self.codes.__getitem__, self.scale)
        # The kernel takes scales in bfloat16, which would round them: multiply afterwards.
        sums = torch.ops.aten._weight_int8pack_mm(tokens, self.codes, tokens.new_ones(rows))
        out: Tensor = sums.mul_(self.scale)
        return out.view(*x.shape[:-1], rows)

    def rows(self, which: Tensor) -> Tensor:
        return decode(self.codes[which], self.scale[which].unsqueeze(1), None, self.bits)

    def restored_for(self, x: Tensor) -> Tensor:
        codes, scale = (each.to(x.device, non_blocking=True) for each in (self.codes, self.scale))
        return decode(codes, scale.unsqueeze(1), None, self.bits).to(x.dtype)


_TILE = 64
"""Rows and columns of a tile of oneDNN's layout."""

_ALIKE: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
"""The last weight of each shape that was restored from a file, as long as somebody holds it."""


@dataclass(frozen=True)
class OneDnnW8A8(CanonicalPacked):
    """Weights and activations of 8 bit, both rotated first (`quant.rounding.rotation`). Activations
    become uint8 around 128 with a scale per token: all tokens then share a zero, which is what
    oneDNN takes, and the scale of a token is multiplied in afterwards.

    `packed`: oneDNN's layout; `scale` float32 `[out]`; `zero` int32 `[1]`; `factor` float32 `[in]`,
    by which inputs are multiplied before they are rotated.
    """

    bits: ClassVar[int] = 8
    rounds_again: ClassVar[bool] = True

    packed: Tensor
    scale: Tensor
    zero: Tensor
    factor: Tensor

    @classmethod
    def from_weight(
        cls, weight: Tensor, dtype: torch.dtype, device: torch.device, rounding: Rounding = DEFAULT
    ) -> Self:
        return cls._pack(RotatedCodes.of_weight(weight, rounding))

    @classmethod
    def from_canonical(cls, canonical: CanonicalWeight) -> Self:
        return cls._pack(RotatedCodes.of_canonical(canonical))

    @classmethod
    def _pack(cls, rotated: RotatedCodes) -> Self:
        packed = torch.ops.onednn.qlinear_prepack(rotated.codes, None)
        return cls(packed, rotated.scale, torch.zeros(1, dtype=torch.int32), rotated.factor)

    @classmethod
    def represent(cls, weight: Tensor, rounding: Rounding = DEFAULT) -> Tensor:
        return RotatedCodes.of_weight(weight, rounding).restored()

    def state(self) -> dict[str, Tensor]:
        content = {"content": content_of(self.packed).clone(), "layout": _layout_of(self.packed)}
        return content | {"scale": self.scale, "factor": self.factor}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Tensor], shape: LinearShape, dtype: torch.dtype
    ) -> Self:
        """Restore a weight; RuntimeError for bytes that oneDNN lays out in another way here."""
        packed = _packed_of_any_content(shape.out_features, shape.in_features)
        content = content_of(packed)
        if not torch.equal(_layout_of(packed), state["layout"]) or len(content) != len(
            state["content"]
        ):
            raise RuntimeError("oneDNN packs this weight in another layout here")
        content.copy_(state["content"])
        zero = torch.zeros(1, dtype=torch.int32)
        return cls(packed, state["scale"], zero, state["factor"])

    @property
    def nbytes(self) -> int:
        packed_bytes: int = torch.ops.mkldnn._nbytes(self.packed)
        return packed_bytes + tensor_bytes(self.scale, self.zero, self.factor)

    def rows(self, which: Tensor) -> Tensor | None:
        if not _has_known_tiles():
            return None
        columns = len(self.factor)
        tiles = _tiles(self.packed, len(self.scale), columns)
        codes = tiles[which // _TILE, :, :, which % _TILE].reshape(len(which), columns)
        return RotatedCodes(codes, self.scale[which], self.factor).restored()

    def warm_up(self, in_features: int, dtype: torch.dtype) -> None:
        warm_up_rounding(in_features)

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = round_activations(x.reshape(-1, x.shape[-1]), self.factor)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, MIDDLE, self.packed, self.scale, self.zero, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return out.mul_(scale).to(x.dtype).view(*x.shape[:-1], self.scale.numel())


def _tiles(packed: Tensor, rows: int, columns: int) -> Tensor:
    """The codes of a packed weight where they lie, int8 `[out / 64, in / 64, 16, 64, 4]`: tiles of
    64 rows by 64 columns, of which four neighbouring columns lie together for each row.
    """
    codes = content_of(packed)[: rows * columns].view(torch.int8)
    return codes.view(rows // _TILE, columns // _TILE, _TILE // 4, _TILE, 4)


@cache
def _has_known_tiles() -> bool:
    """Whether oneDNN lays codes out here as `_tiles` reads them, which it promises to nobody."""
    codes = torch.arange(4 * _TILE * _TILE).mul_(37).remainder_(251).sub_(125).to(torch.int8)
    codes = codes.view(2 * _TILE, 2 * _TILE)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    found = _tiles(packed, *codes.shape).permute(0, 3, 1, 2, 4).reshape(codes.shape)
    return torch.equal(found, codes)


def _layout_of(packed: Tensor) -> Tensor:
    layout: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(packed)
    return layout


def _packed_of_any_content(rows: int, columns: int) -> Tensor:
    """Make a packed weight to be overwritten: packing takes 8 times as long (measured)."""
    alike = _ALIKE.get((rows, columns))
    if alike is None:
        codes = torch.zeros(rows, columns, dtype=torch.int8)
        packed: Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
    else:
        packed = alike.clone()
    _ALIKE[rows, columns] = packed
    return packed
