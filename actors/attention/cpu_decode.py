"""Decode attention on a CPU: one pass over each request's keys and values in the cache, compiled by
numba where that is installed.

PyTorch's flash kernel works on blocks of queries, and a decode step has one query; the kernel and a
batched product also need requests of one length, or masks and copies. Here every request has its
own length, keys and values are read once where they lie, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.attention.kv_cache import SCALE_DTYPE, HeldArrays, Stored
from actors.attention.masks import Scoring
from actors.messages import MicroBatch
from quant.numba_loops import compiled_loop, has_numba, torch_threads, widening

_LEAST_EXPONENT = -87.0
"""Smaller powers of e are not normal float32 numbers; as shares of attention they are nothing."""


@dataclass(frozen=True)
class DecodeQuery:
    """One new token a request of `batch`, which attends to the request's tokens up to itself.

    `query`: `[requests, heads, head_dim]`.
    """

    query: Tensor
    batch: MicroBatch
    scoring: Scoring


class _TokenRanges(NamedTuple):
    """The first token slot of each request, and its half-open range of tokens that count,
    `[requests]` each.
    """

    begins: Any
    starts: Any
    ends: Any


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
        attend_in_place(DecodeQuery(torch.zeros(1, 2, 1), batch, Scoring(1.0)), stored, stored)


def attend_in_place(query: DecodeQuery, keys: Stored, values: Stored) -> Tensor:
    """Attention of each request over its range of `keys` and `values`; returns `[requests, heads,
    head_dim]` in the query's type.

    Codes are not restored: a key's scale multiplies its score, a value's scale its share.
    """
    scoring, lengths = query.scoring, query.batch.lengths
    starts = np.zeros_like(lengths) if scoring.window is None else lengths - scoring.window
    heads = query.query.shape[1]
    slopes = torch.zeros(heads) if scoring.alibi_slopes is None else scoring.alibi_slopes.float()
    out = np.empty(query.query.shape, np.float32)
    compiled = _kernel(keys.numbers.dtype, torch.get_num_threads() > 1)
    with torch_threads():
        compiled(
            (query.query.float() * scoring.scale).contiguous().numpy(),
            keys.arrays,
            values.arrays,
            _TokenRanges(np.ascontiguousarray(query.batch.begins), np.maximum(starts, 0), lengths),
            slopes.contiguous().numpy(),  # for another layout the loop would be compiled again
            out,
        )
    return torch.from_numpy(out).to(query.query.dtype)


@cache
def _kernel(dtype: torch.dtype, parallel: bool) -> Callable[..., None]:
    """The compiled loop for a cache of `dtype`; the first call takes 1.3 s, 3.6 if `parallel`."""
    import numba

    widen, power, scale_of = widening(dtype), _power_of_e(), _scale_of(dtype)

    def decode(
        query: Any,
        held_keys: HeldArrays,
        held_values: HeldArrays,
        ranges: _TokenRanges,
        slopes: Any,
        out: Any,
    ) -> None:
        keys, key_scales = held_keys
        values, value_scales = held_values
        begins, starts, ends = ranges
        requests, heads, head_dim = query.shape
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        for task in numba.prange(requests * kv_heads):
            # Requests within heads: threads then share long requests evenly.
            kv_head, request = task // requests, task % requests
            first, last = starts[request], ends[request]
            begin = begins[request]
            own_queries = query[request, kv_head * group : (kv_head + 1) * group]
            scores = np.empty((group, last - first), np.float32)
            sums = np.zeros((group, head_dim), np.float32)
            for token in range(first, last):
                key = keys[kv_head, begin + token]
                scale = scale_of(key_scales[kv_head], begin + token)
                for member in range(group):
                    asked = own_queries[member]
                    product = np.float32(0)
                    for i in range(head_dim):
                        product += asked[i] * widen(key[i])
                    bias = slopes[kv_head * group + member] * np.float32(token)
                    scores[member, token - first] = product * scale + bias
            for member in range(group):
                row = scores[member]
                largest = row.max()
                for i in range(last - first):
                    row[i] = power(row[i] - largest)
            for token in range(first, last):
                value = values[kv_head, begin + token]
                scale = scale_of(value_scales[kv_head], begin + token)
                for member in range(group):
                    share, weighted = scores[member, token - first] * scale, sums[member]
                    for i in range(head_dim):
                        weighted[i] += share * widen(value[i])
            for member in range(group):
                total, result = scores[member].sum(), out[request, kv_head * group + member]
                for i in range(head_dim):
                    result[i] = sums[member, i] / total

    compiled: Callable[..., None] = compiled_loop(decode, parallel)
    return compiled


def _scale_of(dtype: torch.dtype) -> Any:
    """A compiled function that gives a token's scale out of the scales of its head."""
    import numba

    if dtype != torch.int8:
        return numba.njit(lambda scales, token: np.float32(1), inline="always")
    widen = widening(SCALE_DTYPE)
    return numba.njit(lambda scales, token: widen(scales[token]), inline="always")


def _power_of_e() -> Any:
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
