"""How a token scores the keys before it, by scale, sliding window and ALiBi, and masks of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """Scores are `scale` times the product of query and key.

    `window` limits how many latest positions a token sees, itself included; `alibi_slopes`
    `[heads]` add a bias that grows with the key's position.
    """

    scale: float
    window: int | None = None
    alibi_slopes: Tensor | None = None

    def within(self, length: int) -> Scoring:
        """Equal scores for requests of at most `length` tokens, without a window they fit in."""
        if self.window is None or self.window < length:
            return self
        return replace(self, window=None)

    @property
    def is_plain(self) -> bool:
        """Whether a mask expresses nothing beyond causality."""
        return self.window is None and self.alibi_slopes is None

    def mask(self, query_positions: Tensor, key_count: int, dtype: torch.dtype) -> Tensor:
        """What is added to scores, in `dtype`: the ALiBi bias or 0, minus infinity where a key is
        hidden.

        `query_positions`: `[requests, queries]`; returns `[requests, 1 or heads, queries,
        key_count]`.
        """
        keys = torch.arange(key_count, device=query_positions.device)
        positions = query_positions[:, None, :, None]
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys <= positions - self.window
        bias = torch.zeros(1, 1, 1, 1, dtype=dtype, device=keys.device)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes.to(keys.device)
            bias = (slopes[:, None] * keys).to(dtype)[None, :, None, :]
        masked: Tensor = bias.masked_fill(hidden, -math.inf)
        return masked
