"""Scale and zero of 32 columns in a byte each, under a power of two for each row.

    scale = s * f                    s = 1 .. 255, f = 2^(e - 127) with a byte e of the row
    zero = (z - 128) / n * scale     z = 0 .. 255, cut off to bfloat16; n = 16 at 3 and 4 bit

At 5 and 6 bit n is 8 and 4: twice and four times as many codes reach further from zero. Both are
bfloat16 numbers exactly, so that every kernel multiplies with the same weight, whether it restores
them or reads them as such. Without a zero of their own, groups of 32 would need as many bytes as
those of 64 with two bfloat16 numbers, and lose a third more (`docs/quantization.md`).

The row's power of two comes from the ranges of its weights, before anything is fitted, so that
groups can be rounded one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_STEPS = 16
"""Most parts of a scale that zeros are multiples of: off by half of one, a group loses 0.4 % more.
"""

MIDDLE_ZERO = 128
MOST = 255
RANGE_SLACK = 4
"""Parts by which codes reach further than the weights, as the zero is rounded after the scale."""

_AT_ONCE = 1 << 14
"""Groups that are encoded at once, which takes some numbers of 32 bits for each."""

_MANTISSA_BITS = 23
_EXPONENT_OF_1 = 127
_EXPONENT_OF_128 = 7
_LEAST_EXPONENT = 1
_UPPER_HALF = -0x10000


def zero_steps(bits: int) -> int:
    """Parts of a scale that zeros are multiples of: the middle code is as far as zeros reach."""
    return min(ZERO_STEPS, MIDDLE_ZERO >> (bits - 1))


def _reach(bits: int) -> float:
    """Scales of the widest range that codes cover, wherever its zero is rounded to."""
    return (1 << bits) - 1 - RANGE_SLACK / zero_steps(bits)


def range_factor(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """The powers of two, float32 `[rows, 1]`, for groups that reach from `low` to `high` `[rows,
    groups]`: the least ones of which the widest group's scale is at most 255.
    """
    ranges = high.clamp(min=0) - low.clamp(max=0)
    widest = torch.nan_to_num(ranges, 0.0, 0.0, 0.0).amax(1, keepdim=True)
    widest = widest / _reach(bits)
    exponent = (widest.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_OF_128
    factor = _power(exponent.clamp(min=_LEAST_EXPONENT))
    factor = torch.where(widest > MOST * factor, 2 * factor, factor)
    return factor.masked_fill_(widest == 0, 1.0)


def nearest_narrow(low: Tensor, high: Tensor, bits: int, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero of the least range that covers `low` to `high` and 0."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / _reach(bits)
    scale = (scale / factor).ceil().clamp(1, MOST) * factor
    middle = ((low + high + scale) / 2).where(high > low, 0.0)
    return scale, _zero(middle, scale, zero_steps(bits))


def narrowed(scale: Tensor, low: Tensor, bits: int, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero that can be stored, next to `scale` and to `low`, the value of code 0."""
    scale = (scale / factor).round().clamp(1, MOST) * factor
    return scale, _zero(low + (1 << (bits - 1)) * scale, scale, zero_steps(bits))


def _zero(value: Tensor, scale: Tensor, steps: int) -> Tensor:
    place = (value / scale * steps).round() + MIDDLE_ZERO
    return _zero_of(place.clamp(0, MOST), scale, steps)


def _zero_of(place: Tensor, scale: Tensor, steps: int) -> Tensor:
    exact = (place - MIDDLE_ZERO) / steps * scale
    return (exact.view(torch.int32) & _UPPER_HALF).view(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    return (exponent.int() << _MANTISSA_BITS).view(torch.float32)


def encode(scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Bytes of scales and zeros that can be stored, `[rows, groups]`: uint8 `[rows, 1 + groups,
    2]`, first the row's exponent and a 0, then s and z of each group.
    """
    rows, groups = scale.shape
    out = torch.zeros(rows, 1 + groups, 2, dtype=torch.uint8, device=scale.device)
    for first in range(0, rows, max(1, _AT_ONCE // groups)):
        own = slice(first, first + max(1, _AT_ONCE // groups))
        scales, zeros = scale[own].float(), zero[own].float()
        largest = scales.amax(1, keepdim=True)
        exponent = (largest.view(torch.int32) >> _MANTISSA_BITS) - _EXPONENT_OF_128
        exponent.clamp_(min=_LEAST_EXPONENT)
        out[own, :1, 0] = exponent
        out[own, 1:, 0] = scales / _power(exponent)
        place = zeros / scales * zero_steps(bits)
        place = place.abs().ceil() * place.sign()  # cut off, it became smaller
        out[own, 1:, 1] = place + MIDDLE_ZERO
    return out


def decode_scales(stored: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros, float32 `[rows, groups]`, of what `encode` gave."""
    both = stored[:, 1:].float()
    scale = both[..., 0] * _power(stored[:, :1, 0])
    zero = (both[..., 1] - MIDDLE_ZERO).mul_(1 / zero_steps(bits)).mul_(scale)
    zero.view(torch.int32).bitwise_and_(_UPPER_HALF)
    return scale, zero
