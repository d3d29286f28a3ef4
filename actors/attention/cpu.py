"""Attention on a CPU: blocks of queries for fresh prompts, and for decode steps one pass over each
request's keys and values in the cache, compiled by numba where that is installed.

In prompts PyTorch's flash kernel takes 1.5 to 2 times as long at head sizes of 64 and 128 on
processors without tiles for matrices (AMX), and half as long on those with them; it is faster too
where bfloat16 is emulated (AVX2 alone). Scores and their shares are float32 in both.

The flash kernel works on blocks of queries, and a decode step has one query; the kernel and a
batched product also need requests of one length, or masks and copies. Here every request has its
own length, keys and values are read once where they lie, and sums are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.attention.addresses import Scoring
from actors.attention.stored import SCALE_DTYPE, HeldArrays, Stored
from actors.messages import MicroBatch
from quant.devices import WIDE_ROWS, emulates, prefers_float32
from quant.numba_loops import compiled_loop, has_numba, prefetching, torch_threads, widening

QUERIES_AT_ONCE = 64
"""The fastest of 64, 128 and 256 for prompts of 128 to 1,024 tokens: scores stay in the caches."""

_LEAST_TOKENS = 48
"""Shorter prompts are as fast in one call of the flash kernel."""


def prefers_blocks(query: Tensor) -> bool:
    """Whether `attend_fresh` should take prompts like `query` `[requests, heads, tokens, head_dim]`
    here.
    """
    on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if not on_cpu or query.shape[2] < _LEAST_TOKENS:
        return False
    return not (has_matrix_tiles() or emulates(query.dtype, query.device))


@cache
def has_matrix_tiles() -> bool:
    """Whether this CPU multiplies matrices in tiles (AMX)."""
    return torch.cpu._is_amx_tile_supported()


def attend_fresh(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one prompt.

    `query` `[heads, tokens, head_dim]`, `key` and `value` `[kv_heads, tokens, ...]`, 16-bit types;
    returns `[heads, tokens, ...]` in the query's type, as wide as values.
    """
    heads, tokens, head_dim = query.shape
    kv_heads, _, width = value.shape
    group = heads // kv_heads
    asked = (query.float() * scale).view(kv_heads, group, tokens, head_dim)
    keys = key.float().transpose(1, 2).contiguous()
    is_wide = prefers_float32(value.dtype, value.device, WIDE_ROWS)
    values = value.float() if is_wide else value.contiguous()
    out = torch.empty(kv_heads, group, tokens, width, dtype=query.dtype)
    for first in range(0, tokens, QUERIES_AT_ONCE):
        end = min(first + QUERIES_AT_ONCE, tokens)
        rows = asked[:, :, first:end].reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(rows, keys[:, :, :end]).view(kv_heads, group, end - first, end)
        scores[..., first:] += _later(end - first)
        shares = scores.softmax(-1).to(values.dtype).view(kv_heads, -1, end)
        out[:, :, first:end] = torch.bmm(shares, values[:, :end]).view(kv_heads, group, -1, width)
    return out.view(heads, tokens, width)


@lru_cache(maxsize=QUERIES_AT_ONCE)
def _later(queries: int) -> Tensor:
    """Minus infinity where a key comes after the query, `[queries, queries]`."""
    return torch.full((queries, queries), -math.inf).triu_(1)


_LEAST_EXPONENT = -87.0
"""Smaller powers of e are not normal float32 numbers; as shares of attention they are nothing."""

_NO_SINK = -1e30
"""A sink of which no share is left in float32; infinities may not take part in fast sums."""

_LINE_BYTES = 64
"""What a processor fetches at once."""

_TOKENS_AHEAD = 16
"""Keys that are fetched before they are read; 8 and 32 are as fast."""


def can_attend(stored: Tensor) -> bool:
    """Whether `attend_in_place` takes a cache like `stored` here."""
    return (
        stored.device.type == "cpu"
        and stored.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8)
        and has_numba()
    )


def warm_up(dtype: torch.dtype) -> None:
    """Compile the loop for a cache of `dtype` before the first token; int8: for codes."""
    shape = (2, 2, 1)  # numba takes absent scales of one number for an array of another layout
    stored = Stored.empty(shape, dtype, torch.device("cpu"))
    if can_attend(stored.numbers):
        one = np.ones(1, dtype=np.int64)
        zero = np.zeros_like(one)
        batch = MicroBatch(zero, zero, one, zero)
        attend_in_place(torch.zeros(1, 2, 1), batch, Scoring(1.0), stored, stored)


def attend_in_place(
    query: Tensor, batch: MicroBatch, scoring: Scoring, keys: Stored, values: Stored
) -> Tensor:
    """Attention of one new token for each request of `batch` over the request's range of `keys` and
    `values`, up to itself; `query` and result are `[requests, heads, head_dim]` of one type.

    Codes are not restored: a key's scale multiplies its score, a value's scale its share.
    """
    lengths = batch.lengths
    starts = np.zeros_like(lengths) if scoring.window is None else lengths - scoring.window
    heads = query.shape[1]
    slopes = torch.zeros(heads) if scoring.alibi_slopes is None else scoring.alibi_slopes.float()
    sinks = torch.full((heads,), _NO_SINK) if scoring.sinks is None else scoring.sinks.float()
    asked = keys.asked_in_codes(query) * scoring.scale
    out = np.empty(query.shape, np.float32)  # the last ones of no use, where codes are of latents
    compiled = _kernel(keys.numbers.dtype, torch.get_num_threads() > 1)
    with torch_threads():
        compiled(
            asked.contiguous().numpy(),
            keys.arrays,
            values.arrays,
            (np.ascontiguousarray(batch.begins), np.maximum(starts, 0), lengths),
            # for another layout the loop would be compiled again
            (slopes.contiguous().numpy(), sinks.contiguous().numpy(), np.float32(scoring.cap or 0)),
            out,
        )
    return torch.from_numpy(out).to(query.dtype)


@cache
def _kernel(dtype: torch.dtype, parallel: bool) -> Callable[..., None]:
    """The compiled loop for a cache of `dtype`; the first call takes 2.4 s, 3.8 if `parallel`."""
    import numba

    score, share, weigh = _scoring(dtype), _sharing(dtype), _weighing(dtype)

    def decode(
        query: Any,
        held_keys: HeldArrays,
        held_values: HeldArrays,
        ranges: tuple[Any, Any, Any],
        shaping: tuple[Any, Any, Any],
        out: Any,
    ) -> None:
        keys, key_scales = held_keys
        values, value_scales = held_values
        slopes, sinks, cap = shaping
        begins, starts, ends = ranges  # first token slots, and the tokens that count
        requests, heads, _ = query.shape
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        for task in numba.prange(requests * kv_heads):
            # Requests within heads: threads then share long requests evenly.
            kv_head, request = task // requests, task % requests
            first = starts[request]
            begin, end = begins[request] + first, begins[request] + ends[request]
            own_values = values[kv_head, begin:end]
            scores = np.empty((group, end - begin), np.float32)
            head = kv_head * group
            score(query[request, head : head + group], keys[kv_head, begin:end], own_values, scores)
            for member in range(group):
                scales = (key_scales[kv_head, begin:end], value_scales[kv_head, begin:end])
                own = slopes[head + member], sinks[head + member], cap
                share(scores[member], scales, first, own)
            weigh(scores, own_values, out[request, head : head + group])

    compiled: Callable[..., None] = compiled_loop(decode, parallel)
    return compiled


def _scoring(dtype: torch.dtype) -> Any:
    """A compiled function that puts products of queries `[group, head_dim]` and keys `[tokens,
    head_dim]` into `scores` `[group, tokens]`.

    Keys further on are fetched meanwhile, and the values of the same tokens, which come next: 1.3
    times as fast where they lie in memory, as a core has more of them under way. Four tokens at
    once share the query's elements.
    """
    widen, prefetch, line = widening(dtype), prefetching(), _LINE_BYTES // dtype.itemsize

    def score(query: Any, keys: Any, values: Any, scores: Any) -> None:
        group, head_dim = query.shape
        count = len(keys)
        whole = count - count % 4
        for token in range(0, whole, 4):
            for later in range(token, token + 4):
                for i in range(0, head_dim, line):
                    prefetch(keys, later + _TOKENS_AHEAD, i)
                    prefetch(values, later, i)
            for member in range(group):
                asked = query[member]
                a = b = c = d = np.float32(0)
                for i in range(head_dim):
                    a += asked[i] * widen(keys[token, i])
                    b += asked[i] * widen(keys[token + 1, i])
                    c += asked[i] * widen(keys[token + 2, i])
                    d += asked[i] * widen(keys[token + 3, i])
                row = scores[member]
                row[token], row[token + 1], row[token + 2], row[token + 3] = a, b, c, d
        for token in range(whole, count):
            for member in range(group):
                asked, product = query[member], np.float32(0)
                for i in range(head_dim):
                    product += asked[i] * widen(keys[token, i])
                scores[member, token] = product

    return compiled_loop(score, parallel=False)


def _sharing(dtype: torch.dtype) -> Any:
    """A compiled function that makes of `scores` `[tokens]`, from token `first` on, what each
    value is to be multiplied by: its share, times its scale. Of a head: its slope and its sink.
    """
    power, scale_of = power_of_e(), _scale_of(dtype)

    def share(scores: Any, scales: Any, first: int, shaping: tuple[Any, Any, Any]) -> None:
        key_scales, value_scales = scales
        slope, sink, cap = shaping
        for token in range(len(scores)):
            scores[token] = scores[token] * scale_of(key_scales, token)
        if cap > 0:  # 0: none
            for token in range(len(scores)):
                scores[token] = cap * math.tanh(scores[token] / cap)
        for token in range(len(scores)):
            scores[token] += slope * np.float32(first + token)
        largest = scores[0]
        for token in range(1, len(scores)):  # scores.max() takes the compiler half a second
            if scores[token] > largest or math.isnan(scores[token]):
                largest = scores[token]
        if sink > largest:  # not so where it is no number
            largest = sink
        for token in range(len(scores)):
            scores[token] = power(scores[token] - largest)
        total = power(sink - largest)
        for token in range(len(scores)):
            total += scores[token]
        for token in range(len(scores)):
            scores[token] = scores[token] / total * scale_of(value_scales, token)

    return compiled_loop(share, parallel=False)


def _weighing(dtype: torch.dtype) -> Any:
    """A compiled function that puts the sums of values `[tokens, head_dim]`, weighted by `shares`
    `[group, tokens]`, into `out` `[group, head_dim]`; four tokens at once, as for scores.
    """
    widen = widening(dtype)

    def weigh(shares: Any, values: Any, out: Any) -> None:
        group, head_dim = out.shape
        count = len(values)
        whole = count - count % 4
        out[:] = 0
        for token in range(0, whole, 4):
            for member in range(group):
                row, result = shares[member], out[member]
                a, b, c, d = row[token], row[token + 1], row[token + 2], row[token + 3]
                for i in range(head_dim):
                    together = a * widen(values[token, i]) + b * widen(values[token + 1, i])
                    together += c * widen(values[token + 2, i]) + d * widen(values[token + 3, i])
                    result[i] += together
        for token in range(whole, count):
            for member in range(group):
                part, result = shares[member, token], out[member]
                for i in range(head_dim):
                    result[i] += part * widen(values[token, i])

    return compiled_loop(weigh, parallel=False)


def _scale_of(dtype: torch.dtype) -> Any:
    """A compiled function that gives a token's scale out of the scales of its head."""
    import numba

    if dtype != torch.int8:
        return numba.njit(lambda scales, token: np.float32(1), inline="always")
    widen = widening(SCALE_DTYPE)
    return numba.njit(lambda scales, token: widen(scales[token]), inline="always")


@cache
def power_of_e() -> Any:
    """A compiled e^x for x <= 0, exact to a relative 2e-7, in operations that vector units have."""
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        biased = builder.add(arguments[0], ir.Constant(ir.IntType(32), 127))
        bits = builder.shl(biased, ir.Constant(ir.IntType(32), 23))
        return builder.bitcast(bits, ir.FloatType())

    power_of_two: Any = intrinsic(lambda context, exponent: (types.float32(types.int32), code))
    lowest, log2_e = np.float32(_LEAST_EXPONENT), np.float32(1.4426950408889634)
    ln2_high, ln2_low = np.float32(0.693359375), np.float32(-2.12194440e-4)  # Cody and Waite
    half = np.float32(0.5)
    taylor = tuple(np.float32(1 / n) for n in (5040, 720, 120, 24, 6, 2, 1, 1))

    @numba.njit(inline="always", fastmath=False)
    def power(x: Any) -> Any:
        x = max(x, lowest)
        exponent = np.int32(x * log2_e - half)  # to the nearest, as x <= 0
        rest = x - np.float32(exponent) * ln2_high - np.float32(exponent) * ln2_low
        series = taylor[0]
        series = series * rest + taylor[1]
        series = series * rest + taylor[2]
        series = series * rest + taylor[3]
        series = series * rest + taylor[4]
        series = series * rest + taylor[5]
        series = series * rest + taylor[6]
        series = series * rest + taylor[7]
        return series * power_of_two(exponent)

    return power
