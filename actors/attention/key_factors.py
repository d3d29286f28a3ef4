"""Factors that make the channels of keys alike before they become 8-bit codes.

The codes of a token's key in a head share one scale, so that a channel that is much larger than the
others, as biases on keys make them, leaves these few steps. A key divided by a factor per channel
scores as before where the query is multiplied by it. Powers of two are exact in floating point:
what changes is how far numbers are rounded, and no score where none is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_USUAL = 4.0
"""Up to so many times their head's median, and down to its inverse, channels are divided by their
square root alone: where the queries are not known this is the middle between one step for all and
equal numbers of steps. SmolLM2 loses less by it, and more by the latter."""

_LEAST_SIZE = 2.0**-8
"""Smaller channels, of the median, were hardly seen; they count as of this size."""

_LEAST_FACTOR = 2.0**-14
"""The least normal number of float16, the narrowest type of a query."""


def key_factors(largest: Tensor, rotary_width: int) -> Tensor:
    """What to divide each channel of the keys by, float32 `[kv_heads, head_dim]`: powers of two up
    to 1, so that no query becomes larger.

    `largest` `[kv_heads, head_dim]`: the largest magnitude seen of each channel after the rotation.
    Of the first `rotary_width` channels those at half that distance rotate into each other, so that
    either becomes as large as both at some position: they have one factor.
    """
    turned, still = largest.float().tensor_split([rotary_width], -1)
    pairs = turned.unflatten(-1, (2, -1)).amax(-2)
    alike = torch.cat([pairs, pairs, still], -1)
    median = alike.median(-1, keepdim=True).values
    usual = torch.where(median > 0, median, alike.amax(-1, keepdim=True))
    sizes = (alike / usual).nan_to_num(nan=1.0).clamp(min=_LEAST_SIZE)  # NaN: all are zero
    factors = sizes / sizes.clamp(1 / _USUAL, _USUAL).sqrt()
    powers = factors.log2().round().exp2()
    return (powers / powers.amax(-1, keepdim=True)).clamp(min=_LEAST_FACTOR)
