"""Keys or values of a layer as they are held: plain numbers, or 8-bit codes that are made exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.attention.addresses import Addresses
from actors.messages import Move, TokenRange
from quant.numba_loops import as_array

_USUAL = 4.0
"""Up to so many times their head's median, and down to its inverse, channels are divided by their
square root alone: where the queries are not known this is the middle between one step for all and
equal numbers of steps. SmolLM2 loses less by it, and more by the latter."""

_LEAST_SIZE = 2.0**-8
"""Smaller channels, of the median, were hardly seen; they count as of this size."""

_LEAST_FACTOR = 2.0**-14
"""The least normal number of float16, the narrowest type of a query."""


def key_factors(largest: Tensor, rotary_width: int, turns_neighbours: bool = False) -> Tensor:
    """What to divide each channel of the keys by, so that channels are alike before they become
    8-bit codes: float32 `[kv_heads, head_dim]`, powers of two up to 1, so that no query becomes
    larger.

    The codes of a token's key in a head share one scale, so that a channel that is much larger than
    the others, as biases on keys make them, leaves these few steps. A key divided by a factor per
    channel scores as before where the query is multiplied by it. Powers of two are exact in
    floating point: what changes is how far numbers are rounded, and no score where none is.

    `largest` `[kv_heads, head_dim]`: the largest magnitude seen of each channel after the rotation.
    Of the first `rotary_width` channels those at half that distance rotate into each other, or
    those side by side (`turns_neighbours`), so that either becomes as large as both at some
    position: they have one factor.
    """
    turned, still = largest.float().tensor_split([rotary_width], -1)
    if turns_neighbours:
        pairs = turned.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1)
    else:
        pairs = turned.unflatten(-1, (2, -1)).amax(-2).repeat(1, 2)
    alike = torch.cat([pairs, still], -1)
    median = alike.median(-1, keepdim=True).values
    usual = torch.where(median > 0, median, alike.amax(-1, keepdim=True))
    sizes = (alike / usual).nan_to_num(nan=1.0).clamp(min=_LEAST_SIZE)  # NaN: all are zero
    factors = sizes / sizes.clamp(1 / _USUAL, _USUAL).sqrt()
    powers = factors.log2().round().exp2()
    return (powers / powers.amax(-1, keepdim=True)).clamp(min=_LEAST_FACTOR)


SCALE_DTYPE = torch.bfloat16
"""Type of the scales of int8 codes: the range of float32. Codes are made with the stored scale."""

_LARGEST_CODE = 127  # also where the scale was rounded down by 2^-9: 127.25 is rounded to it
_LEAST_SCALE = 2.0**-100  # its inverse is finite; smaller numbers are nothing beside any other


def quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`numbers` `[..., head_dim]` as int8 codes and one scale `[...]` for each row of them.

    No number is off by more than half its row's scale. The scale of a row with a number that is not
    finite is not finite either, so that the whole row is restored as not finite.
    """
    wide = numbers.float()
    largest = wide.abs().amax(-1)
    scales = (largest / _LARGEST_CODE).clamp(min=_LEAST_SCALE).to(SCALE_DTYPE)
    return (wide / scales.float()[..., None]).round_().to(torch.int8), scales


_COARSE = 128
"""Steps of a latent that the coarse code of a rotated number counts: a power of two, so that
products with it are exact, and few enough that the fine code counts what is left."""


def quantized_latents(numbers: Tensor, rotated: int) -> tuple[Tensor, Tensor]:
    """As `quantized`, of latents with `rotated` numbers behind them `[..., width]`: int8 codes
    `[..., width + rotated]`.

    Latents are normed and alike, what is rotated may be many times as large: with one step for both
    the values would be lost. So a rotated number has a coarse code and, behind those, a fine one.
    """
    wide = numbers.float()
    largest = wide.abs()
    most = torch.maximum(
        largest[..., :-rotated].amax(-1), largest[..., -rotated:].amax(-1) / _COARSE
    )
    scales = (most / _LARGEST_CODE).clamp(min=_LEAST_SCALE).to(SCALE_DTYPE)
    steps = wide / scales.float()[..., None]
    coarse = (steps[..., -rotated:] / _COARSE).round_()
    fine = steps[..., -rotated:] - _COARSE * coarse
    return torch.cat([steps[..., :-rotated], coarse, fine], -1).round_().to(torch.int8), scales


def asked_of_latents(query: Tensor, rotated: int) -> Tensor:
    """`query` `[..., width]` for products with codes of `quantized_latents`: in float32, as float16
    may not hold its multiples.
    """
    turned = query[..., -rotated:].float()
    return torch.cat([query[..., :-rotated].float(), _COARSE * turned, turned], -1)


def restored_latents(codes: Tensor, scales: Tensor, rotated: int, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., width]` in `dtype` of which `quantized_latents` made codes and `scales`
    `[..., 1]`.
    """
    width = codes.shape[-1] - rotated
    plain, coarse, fine = codes.split([width - rotated, rotated, rotated], -1)
    restored = codes.new_empty((*codes.shape[:-1], width), dtype=dtype)
    torch.mul(plain, scales.to(dtype), out=restored[..., :-rotated])
    restored[..., -rotated:] = (_COARSE * coarse.float() + fine) * scales.float()
    return restored


_NO_SCALE = np.zeros((), np.uint16)

HeldArrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Numbers and scales of one layer's keys or values as numpy arrays, 16-bit types as their bits.
Where there are no scales, theirs is a view of a single zero, which is never read."""


@dataclass(frozen=True)
class Stored:
    """Keys or values of one layer: `numbers` `[kv_heads, tokens, head_dim]`.

    At 8 bits they are int8 codes, to be multiplied by `scales` `[kv_heads, tokens]`. With `factors`
    `[kv_heads, head_dim]` (`key_factors`) they are those of keys divided by these; the `rotated`
    last numbers of a latent have two codes each (`quantized_latents`).
    """

    numbers: Tensor
    scales: Tensor | None = None
    factors: Tensor | None = None
    rotated: int = 0

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        factors: Tensor | None = None,
        rotated: int = 0,
    ) -> Stored:
        """Zeros, with scales if `dtype` is int8. Memory is not just reserved: a masked position
        that holds NaN would still poison the attention's weighted sum.
        """
        scales = None
        if dtype == torch.int8:
            scales = torch.zeros(shape[:-1], dtype=SCALE_DTYPE, device=device)
            shape = *shape[:-1], shape[-1] + rotated
        return cls(torch.zeros(shape, dtype=dtype, device=device), scales, factors, rotated)

    def like(self, tokens: int) -> Stored:
        heads, _, head_dim = self.numbers.shape
        numbers = self.numbers.new_zeros(heads, tokens, head_dim)
        scales = None if self.scales is None else self.scales.new_zeros(heads, tokens)
        return replace(self, numbers=numbers, scales=scales)

    def in_one(self, layers: int, tokens: int) -> Stored:
        """Zeros for so many layers like this one, `[layers, kv_heads, tokens, head_dim]`."""
        shape = layers, self.numbers.shape[0], tokens, self.numbers.shape[2]
        return self.empty(shape, self.numbers.dtype, self.numbers.device)

    def as_part(self, whole: Stored, place: int) -> Stored:
        """One of the layers that lie in `whole`, with the factors of this one."""
        scales = None if whole.scales is None else whole.scales[place]
        return replace(self, numbers=whole.numbers[place], scales=scales)

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @cached_property
    def arrays(self) -> HeldArrays:
        """The memory of the cache for compiled code on a CPU."""
        numbers = as_array(self.numbers)
        if self.scales is None:
            return numbers, np.broadcast_to(_NO_SCALE, numbers.shape[:-1])
        return numbers, as_array(self.scales)

    def clear(self, room: TokenRange) -> None:
        """Set token slots to zero; codes are finite, so that a scale of zero is enough."""
        (self.numbers if self.scales is None else self.scales)[:, room.begin : room.end] = 0

    def move(self, move: Move) -> None:
        """Copy tokens to other token slots, as if all were read before the first is written."""
        for held in (self.numbers, self.scales):
            if held is not None:
                tokens = held[:, move.begin : move.begin + move.tokens]
                overlap = abs(move.to - move.begin) < move.tokens
                held[:, move.to : move.to + move.tokens] = tokens.clone() if overlap else tokens

    def rearrange(self, taken: Tensor, put: Tensor) -> None:
        """Copy tokens from the token slots `taken` to those `put`, all read before any is written:
        int64 `[tokens]`.
        """
        for held in (self.numbers, self.scales):
            if held is not None:
                held.index_copy_(1, put, held.index_select(1, taken))

    def of_tokens(self, begin: int, tokens: int) -> Iterator[Tensor]:
        """Views of what is held of neighbouring tokens, `[kv_heads, tokens, ...]`."""
        yield self.numbers[:, begin : begin + tokens]
        if self.scales is not None:
            yield self.scales[:, begin : begin + tokens]

    def write(self, where: Addresses, new: Tensor) -> None:
        """Store `new` `[sum(counts), kv_heads, head_dim]`, as codes where there are scales."""
        if self.scales is None:
            where.write(self.numbers, new)
            return
        if self.rotated:
            codes, scales = quantized_latents(new, self.rotated)
        else:
            codes, scales = quantized(new if self.factors is None else new.float() / self.factors)
        where.write(self.numbers, codes)
        where.write(self.scales, scales)

    def asked(self, query: Tensor) -> Tensor:
        """`query` `[tokens, heads, head_dim]` so that its products with what is read are those with
        the keys.
        """
        if self.factors is None:
            return query
        grouped: Tensor = query.unflatten(1, (len(self.factors), -1)) * self.factors[:, None]
        return grouped.flatten(1, 2)

    def asked_in_codes(self, query: Tensor) -> Tensor:
        """As `asked`, of what that made, in float32 and for products with the stored numbers."""
        has_two = self.rotated > 0 and self.scales is not None
        return asked_of_latents(query, self.rotated) if has_two else query.float()

    def read(self, pick: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """The part that `pick` takes of a tensor `[kv_heads, tokens, ...]`.

        Codes are restored in `dtype`, divided by the factors as they are stored; plain numbers are
        a view if `pick` returns one.
        """
        numbers = pick(self.numbers)
        if self.scales is None:
            return numbers
        scales = pick(self.scales)[..., None]
        if self.rotated:
            return restored_latents(numbers, scales, self.rotated, dtype)
        return numbers * scales.to(dtype)
