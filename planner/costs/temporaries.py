"""Bytes of temporaries of a layer's parts, also of those that only some layers have: experts, and
mixers with a constant state.
"""

from __future__ import annotations

from functools import cache

from planner.model.layer_parts import DeltaMixer, Experts, LatentAttention
from planner.model.shape import ModelShape
from quant.backends.table import rule_for
from quant.scheme import BITWIDTHS, DTYPE_BYTES, LinearShape, Processor

KV_SCALE_BYTES = 2
"""Bytes of the scale of a token's key or value in one head, beside its 8-bit codes."""

CHUNK_TOKENS = 64
"""Tokens of a prompt that a gated delta rule takes at once (transformers'
`torch_chunk_gated_delta_rule`)."""

_FLOAT32_BYTES = _SUM_BYTES = 4
_INDEX_BYTES = 8
# Tensors of a token that are alive where chunks are gone through, counted in that function: queries
# and keys, those decayed, keys by beta, the same decayed, and those that read the state; values,
# those by beta, new ones, results; three matrices over a chunk.
_KEY_COPIES, _VALUE_COPIES, _CHUNK_MATRICES = 6, 4, 3
# Of the inputs of the convolution (`actors.attention.delta.rule`): they and earlier ones, the sums,
# a product, the result; while chunks are gone through the activated result, and the part of it of a
# group of requests of one length.
_CONV_COPIES, _CONVOLVED_COPIES = 4, 2
# States of a request: the old one, that decayed, what is added, and a product with all of it.
_STATE_COPIES = 4


def mixer_bytes(
    mixer: DeltaMixer,
    hidden_size: int,
    batch: tuple[int, int],
    element_bytes: int,
    in_place: bool = False,
) -> int:
    """Bytes of a gated delta rule and its convolution over a `batch` of requests and tokens; a
    decode step has as many of both, and no chunks. `in_place`: a kernel of ours takes the step.
    """
    requests, tokens = batch
    is_decode = requests == tokens
    inputs = mixer.conv_channels + mixer.value_width + 2 * mixer.value_heads
    kept = 2 * hidden_size + inputs + mixer.conv_channels + mixer.value_width
    if is_decode and in_place:
        return tokens * (kept * element_bytes + _FLOAT32_BYTES * mixer.conv_channels)
    conv = tokens * _CONV_COPIES * mixer.conv_channels
    widths = _KEY_COPIES * mixer.key_dim + _VALUE_COPIES * mixer.value_dim
    padded = tokens if is_decode else tokens + requests * (CHUNK_TOKENS - 1)
    widths += 0 if is_decode else _CHUNK_MATRICES * CHUNK_TOKENS
    rule = padded * mixer.value_heads * widths + requests * _STATE_COPIES * mixer.state_elements
    rule += tokens * _CONVOLVED_COPIES * mixer.conv_channels
    return tokens * kept * element_bytes + _FLOAT32_BYTES * max(conv, rule)


def expert_row_bytes(experts: Experts, hidden_size: int, tokens: int, element_bytes: int) -> int:
    """Bytes of what `quant.experts` has at once of each row of an expert (the row, gate and up,
    their product, the result, that by token and weighed) with its place in both orders; of the
    router's logits and shares, and of the expert that all tokens ask.
    """
    each = 4 * hidden_size + 3 * experts.width
    rows = tokens * experts.per_token * (each * element_bytes + 3 * _INDEX_BYTES)
    routed = 2 * _FLOAT32_BYTES * tokens * experts.count
    shared = 3 * tokens * experts.shared_width * element_bytes
    return rows + routed + shared


def code_bytes(shape: ModelShape, tokens: int, key_tokens: int, element: int, repeats: bool) -> int:
    """Bytes that 8-bit keys and values need beyond 16-bit ones: a float32 copy, two results and
    codes while codes are made, else a copy of one tensor's codes, and what heads are repeated from.
    """
    made = tokens * (3 * _FLOAT32_BYTES + 1) * shape.kv_width
    repeated = repeats and shape.heads != shape.kv_heads
    repeated_from = 2 * attended_width(shape) * element if repeated else 0
    copied = attended_width(shape) + shape.kv_heads * KV_SCALE_BYTES
    return max(made, key_tokens * (repeated_from + copied + element * shape.kv_heads))


def expanded_numbers(shape: ModelShape, latent: LatentAttention) -> int:
    """Numbers of a token of a prompt whose latents are expanded: two copies of these and of queries
    and results, what is made of latents, and keys beside values that are as wide.
    """
    key = latent.plain_width + latent.rotary_width
    made = latent.plain_width + latent.value_width
    return 2 * latent.held_width + shape.heads * (4 * key + made + 2 * latent.value_width)


def bias_bytes(shape: ModelShape, prompt_length: int, element: int) -> int:
    """Bytes a prompt: ALiBi's bias and its masked copy, or a window's mask in two types."""
    if shape.alibi:
        return 2 * shape.heads * prompt_length**2 * element
    windowed = shape.sliding_window is not None and prompt_length > shape.sliding_window
    return prompt_length**2 * (element + 1) if windowed else 0


def scratch_tokens(room: int, window: int, tokens: int, mixed: int) -> int:
    """Most tokens in the scratch of a pass of so many new `tokens` over layers whose windows have
    rooms (`actors.attention.windows`): these, and the window before each part of a prompt that is
    too long for its room; only micro-batches that mix the phases, of up to `mixed` requests, have
    parts.
    """
    if tokens <= room - window:
        return 0
    return tokens + min(mixed, tokens // (room - window + 1)) * (window - 1)


@cache
def restored_bytes(shape: ModelShape, processor: Processor, dtype: str, rows: int) -> int:
    """Bytes of the largest weight that products of so many rows restore, at any bitwidth."""
    largest = 0
    for linear in all_linears(shape):
        for bits in BITWIDTHS:
            rule = rule_for(processor, bits, linear, dtype, decode_rows=rows)
            cost = rule.cost_of(processor, linear, dtype)
            if cost.passes and rows >= cost.restores_from:
                largest = max(largest, linear.parameters)
    return largest * DTYPE_BYTES[dtype]


def all_linears(shape: ModelShape) -> tuple[LinearShape, ...]:
    return (*shape.layer_linears, *shape.expert_linears)


def int8_bytes(shape: ModelShape) -> int:
    """Most bytes of codes and sums of a token in an int8 product."""
    linears = all_linears(shape)
    return max(_SUM_BYTES * linear.out_features + linear.in_features for linear in linears)


def attended_width(shape: ModelShape) -> int:
    """Elements of a token's keys, or values, that attention reads, also an earlier layer's."""
    return shape.kv_heads * shape.head_dim
