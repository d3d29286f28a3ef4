"""Keys and values of all heads as products of a latent, and attention without making them
(DeepSeek-V2, section 2.1.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadProducts(nn.Module):
    """The `weight` `[heads * (key + value), rank]` that makes keys and values of latents.

    Prompts are expanded, as there are as many keys as queries. Elsewhere queries are multiplied by
    the weights of the keys, and what is attended to by those of the values: then all heads share
    the latents. A rank has some of the heads.
    """

    def __init__(self, weight: nn.Parameter, key_width: int, value_width: int) -> None:
        super().__init__()
        self.weight = weight
        self.widths = key_width, value_width

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[requests, heads, tokens, ...]` of `latents` `[requests, 1, tokens, rank
        + rotary]`, whose ends all keys have.
        """
        plain, turned = latents.tensor_split([self.rank], -1)
        made = F.linear(plain[:, 0], self.weight).unflatten(-1, (-1, sum(self.widths)))
        keys, values = made.transpose(1, 2).split(self.widths, -1)
        return torch.cat([keys, turned.expand(-1, keys.shape[1], -1, -1)], -1), values

    def of_queries(self, queries: Tensor) -> Tensor:
        """`[tokens, heads, key + rotary]` to `[tokens, heads, rank + rotary]`."""
        plain, turned = queries.tensor_split([self.widths[0]], -1)
        keys, _ = self._of_heads()
        asked = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat([asked, turned], -1)

    def of_results(self, results: Tensor) -> Tensor:
        """`[tokens, heads, rank and more]` to `[tokens, heads, value]`."""
        _, values = self._of_heads()
        made = torch.bmm(results[..., : self.rank].transpose(0, 1), values.transpose(1, 2))
        return made.transpose(0, 1)

    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """Of each head `[key, rank]` and `[value, rank]`."""
        keys, values = self.weight.unflatten(0, (-1, sum(self.widths))).split(self.widths, 1)
        return keys, values
