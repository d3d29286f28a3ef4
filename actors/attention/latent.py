"""Latent attention of transformers' modules (DeepSeek-V2, section 2.1) on a flattened micro-batch.

A layer's cache holds one vector of a token in place of the keys and values of all heads: its
latent, normed, and behind it the numbers that positions have rotated. Keys and values are products
of the latent; here queries are multiplied by the weights of the keys instead, and what is attended
to by those of the values. So all heads share one key, whose first numbers are the value.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from actors.attention.addresses import Scoring
from actors.attention.ragged import NewTokens, RaggedContext, attend


class HeadProducts(nn.Module):
    """The `weight` `[heads * (key + value), rank]` that makes keys and values of latents, as
    products of each head's queries and results. It is no linear: nothing has products of tokens.
    """

    def __init__(self, weight: nn.Parameter, key_width: int, value_width: int) -> None:
        super().__init__()
        self.weight = weight
        self.widths = key_width, value_width

    def of_queries(self, queries: Tensor) -> Tensor:
        """`[tokens, heads, key]` to `[tokens, heads, rank]`."""
        keys, _ = self._of_heads()
        return torch.bmm(queries.transpose(0, 1), keys).transpose(0, 1)

    def of_results(self, results: Tensor) -> Tensor:
        """`[tokens, heads, rank]` to `[tokens, heads * value]`."""
        _, values = self._of_heads()
        made = torch.bmm(results.transpose(0, 1), values.transpose(1, 2))
        return made.transpose(0, 1).flatten(1)

    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """Of each head `[key, rank]` and `[value, rank]`; a rank has some of the heads."""
        keys, values = self.weight.unflatten(0, (-1, sum(self.widths))).split(self.widths, 1)
        return keys, values


def replace_latent(module: Any) -> None:
    """Give an attention with latents a ragged forward."""
    widths = module.qk_nope_head_dim, module.v_head_dim
    module.kv_b_proj = HeadProducts(module.kv_b_proj.weight, *widths)
    module.forward = MethodType(_attended, module)


def _attended(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    ragged: RaggedContext,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention on the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    hidden, products, rank = hidden_states[0], self.kv_b_proj, self.kv_lora_rank
    latent, turning = self.kv_a_proj_with_mqa(hidden).split([rank, self.qk_rope_head_dim], -1)
    queries, turning = _turned(self, _queries(self, hidden), turning[:, None], position_embeddings)
    key = torch.cat([self.kv_a_layernorm(latent)[:, None], turning], -1)
    new = NewTokens(queries, key, key)
    attended = attend(ragged, self.layer_idx, new, Scoring(self.scaling))
    return self.o_proj(products.of_results(attended[..., :rank]))[None], None


def _queries(self: Any, hidden: Tensor) -> Tensor:
    """The queries of each head, `[tokens, heads, width]`."""
    if self.q_lora_rank is None:
        made = self.q_proj(hidden)
    else:
        made = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
    queries: Tensor = made.unflatten(-1, (self.num_heads, -1))
    return queries


def _turned(self: Any, queries: Tensor, key: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
    """Queries of latents, `[tokens, heads, rank + rotary]`, and the `key` `[tokens, 1, rotary]`,
    the ends of both rotated by `positions` as the model does it.
    """
    plain, turning = queries.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    pair = turning.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if isinstance(positions, Tensor):  # complex numbers, of DeepSeek-V2
        turned, key = apply_rotary_emb(*pair, positions)
    elif self.config.rope_interleave:
        turned, key = apply_rotary_pos_emb_interleave(*pair, *positions)
    else:
        turned, key = apply_rotary_pos_emb(*pair, *positions)
    asked = self.kv_b_proj.of_queries(plain)
    return torch.cat([asked, turned[0].transpose(0, 1)], -1), key[0].transpose(0, 1)
