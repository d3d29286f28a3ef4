"""Latent attention of transformers' modules (DeepSeek-V2, section 2.1) on a flattened micro-batch.

A layer's cache holds one vector of a token in place of the keys and values of all heads: its
latent, normed, and behind it the numbers that positions have rotated, so that all heads share one
key, whose first numbers are the value (`actors.attention.head_products`).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from actors.attention.addresses import Scoring
from actors.attention.head_products import HeadProducts
from actors.attention.ragged import NewTokens, RaggedContext, attend


def replace_latent(module: Any, grows: bool = False) -> None:
    """Give an attention with latents a ragged forward, whose queries may grow with positions."""
    widths = module.qk_nope_head_dim, module.v_head_dim
    module.kv_b_proj = HeadProducts(module.kv_b_proj.weight, *widths)
    module.grows, module.forward = grows, MethodType(_attended, module)


def _attended(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    ragged: RaggedContext,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention on the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    hidden, rank = hidden_states[0], self.kv_lora_rank
    latent, turning = self.kv_a_proj_with_mqa(hidden).split([rank, self.qk_rope_head_dim], -1)
    queries = _queries(self, hidden, position_ids)
    queries, turning = _turned(self, queries, turning[:, None], position_embeddings)
    key = torch.cat([self.kv_a_layernorm(latent)[:, None], turning], -1)
    new = NewTokens(queries, key, key, products=self.kv_b_proj)
    attended = attend(ragged, self.layer_idx, new, Scoring(self.scaling))
    return self.o_proj(attended.flatten(1))[None], None


def _queries(self: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    """The queries of each head, `[tokens, heads, width]`, at `positions` `[1, tokens]`."""
    if self.q_lora_rank is None:
        made = self.q_proj(hidden)
    else:
        made = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
    queries: Tensor = made.unflatten(-1, (self.num_heads, -1))
    if not self.grows:
        return queries
    rope = self.config.rope_parameters
    beta, trained = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    growth = get_llama_4_attn_scale(positions, beta, trained)  # [1, 1, tokens, 1]
    return queries * growth[0, 0, :, None].to(queries.dtype)


def _turned(self: Any, queries: Tensor, key: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
    """`queries` `[tokens, heads, width]`, their ends, and the `key` `[tokens, 1, rotary]` rotated
    by `positions` as the model does it.
    """
    plain, turning = queries.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    pair = turning.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if isinstance(positions, Tensor):  # complex numbers, of DeepSeek-V2
        turned, key = apply_rotary_emb(*pair, positions)
    elif self.config.rope_interleave:
        turned, key = apply_rotary_pos_emb_interleave(*pair, *positions)
    else:
        turned, key = apply_rotary_pos_emb(*pair, *positions)
    return torch.cat([plain, turned[0].transpose(0, 1)], -1), key[0].transpose(0, 1)
