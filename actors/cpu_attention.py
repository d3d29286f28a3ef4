"""Decode attention on a CPU: one pass over each request's keys and values in the cache, compiled by
numba where that is installed.

PyTorch's flash kernel works on blocks of queries, of which a decode step has one; it and a batched
product also need requests of one length, or masks and copies. Here every request has its own
length, keys and values are read once where they lie, and sums are float32.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.kv_cache import SlotRows
from actors.messages import MicroBatch

_LEAST_EXPONENT = -87.0
"""Smaller powers of e are not normal float32 numbers; as shares of attention they are nothing."""

FAST_SUMS = {"reassoc", "contract", "nsz"}
"""Sums in any order; NaN and infinity keep their meaning, for the sampler to see them."""

_one_at_a_time = threading.Lock()
"""Numba's own thread pool may not be entered by two threads."""


@dataclass(frozen=True)
class DecodeQuery:
    """One new token a request: `query` `[requests, heads, head_dim]` over the tokens that `where`
    has of it.

    `window`: only so many latest ones; `alibi_slopes` `[heads]`: a bias that grows with the
    position.
    """

    query: Tensor
    where: SlotRows
    scale: float
    window: int | None = None
    alibi_slopes: Tensor | None = None


def can_attend(stored: Tensor) -> bool:
    """Whether `attend_in_place` takes a cache like `stored` here."""
    return (
        stored.device.type == "cpu"
        and stored.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and _has_numba()
    )


def warm_up(dtype: torch.dtype) -> None:
    """Compile the loop for a cache of `dtype` now, not at the first token."""
    stored = torch.zeros(1, 1, 1, 1, dtype=dtype)
    if can_attend(stored):
        one = np.ones(1, dtype=np.int64)
        batch = MicroBatch(np.zeros_like(one), np.zeros_like(one), one)
        where = SlotRows.of(batch, stored.device)
        attend_in_place(DecodeQuery(stored[0], where, 1.0), stored, stored)


@cache
def _has_numba() -> bool:
    found = find_spec("numba") is not None
    if not found:
        logging.getLogger(__name__).warning(
            "decoding on this CPU is several times slower without numba: pip install 'llmpq[cpu]'"
        )
    return found


def attend_in_place(query: DecodeQuery, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of each request over its slot of `keys` and `values`.

    Both `[slots, kv_heads, max_tokens, head_dim]`; returns `[requests, heads, head_dim]` in the
    query's type.
    """
    lengths = query.where.lengths.numpy()
    starts = np.zeros_like(lengths) if query.window is None else lengths - query.window
    heads = query.query.shape[1]
    slopes = torch.zeros(heads) if query.alibi_slopes is None else query.alibi_slopes.float()
    out = np.empty(query.query.shape, np.float32)
    threads = torch.get_num_threads()
    compiled = _kernel(keys.dtype, threads > 1)
    with _one_at_a_time:
        _set_threads(threads)
        compiled(
            (query.query.float() * query.scale).contiguous().numpy(),
            _numbers(keys),
            _numbers(values),
            query.where.slots.numpy(),
            np.maximum(starts, 0),
            lengths,
            slopes.numpy(),
            out,
        )
    return torch.from_numpy(out).to(query.query.dtype)


def _numbers(stored: Tensor) -> Any:
    """The tensor as a numpy array, 16-bit types as their bits."""
    return (stored.view(torch.uint16) if stored.element_size() == 2 else stored).numpy()


def _set_threads(count: int) -> None:
    import numba

    settings: Any = numba.config
    numba.set_num_threads(min(count, settings.NUMBA_NUM_THREADS))


@cache
def _kernel(dtype: torch.dtype, parallel: bool) -> Callable[..., None]:
    """The compiled loop for a cache of `dtype`; the first call takes 1.3 s, 3.6 if `parallel`."""
    import numba

    settings: Any = numba.config
    settings.THREADING_LAYER = "workqueue"  # idle threads sleep
    widen, power = _widen(dtype), _power_of_e()

    @numba.njit(parallel=parallel, fastmath=FAST_SUMS, nogil=True)
    def decode(
        query: Any,
        keys: Any,
        values: Any,
        slots: Any,
        starts: Any,
        ends: Any,
        slopes: Any,
        out: Any,
    ) -> None:
        requests, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        for task in numba.prange(requests * kv_heads):
            # Requests within heads: threads then share long requests evenly.
            kv_head, request = task // requests, task % requests
            first, last = starts[request], ends[request]
            own_keys, own_values = keys[slots[request], kv_head], values[slots[request], kv_head]
            own_queries = query[request, kv_head * group : (kv_head + 1) * group]
            scores = np.empty((group, last - first), np.float32)
            sums = np.zeros((group, head_dim), np.float32)
            for token in range(first, last):
                key = own_keys[token]
                for member in range(group):
                    asked = own_queries[member]
                    product = np.float32(0)
                    for i in range(head_dim):
                        product += asked[i] * widen(key[i])
                    bias = slopes[kv_head * group + member] * np.float32(token)
                    scores[member, token - first] = product + bias
            for member in range(group):
                row = scores[member]
                largest = row.max()
                for i in range(last - first):
                    row[i] = power(row[i] - largest)
            for token in range(first, last):
                value = own_values[token]
                for member in range(group):
                    share, weighted = scores[member, token - first], sums[member]
                    for i in range(head_dim):
                        weighted[i] += share * widen(value[i])
            for member in range(group):
                total, result = scores[member].sum(), out[request, kv_head * group + member]
                for i in range(head_dim):
                    result[i] = sums[member, i] / total

    compiled: Callable[..., None] = decode
    return compiled


def _widen(dtype: torch.dtype) -> Any:
    """What makes a float32 of a stored element, within compiled code."""
    import numba
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    if dtype == torch.float32:
        return numba.njit(lambda number: number, inline="always")

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if dtype == torch.float16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        word = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())  # bfloat16: the upper half of a float32

    return intrinsic(lambda context, bits: (types.float32(types.uint16), code))


def _power_of_e() -> Any:
    """e^x for x <= 0 to a relative 2e-7, in operations that vector units have."""
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
