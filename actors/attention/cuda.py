"""Attention on GPUs by a kernel of our own: new tokens over the ranges of their requests.

PyTorch's kernels take requests of one length, or masks and copies of all keys, and on GPUs below
8.0 repeat the heads of keys that queries share. This one reads every key and value once where it
lies, codes as codes, and so serves decode steps and parts of prompts of any lengths alike.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.attention.addresses import Addresses, Scoring
from actors.attention.kv_cache import counts_on_ranges
from actors.attention.stored import Stored, quantized
from actors.messages import MicroBatch
from quant.backends.cuda.driver import CudaError, Kernels, kernels_for
from quant.backends.table import MOST_SPLITS, RANGE_OCTET, SPLIT_TOKENS

SOURCE = Path(__file__).with_name("cuda_attention.cu")
KERNELS = ("attend_1", "attend_2", "attend_4", "attend_8")

_BLOCKS = 4
"""Blocks a multiprocessor that splitting goes for; by registers it holds about as many at once."""

_TOLERANCE = 0.01
"""Largest relative error of the self-test; rounding to bfloat16 costs 0.002."""


class Shape(ctypes.Structure):
    """The struct `Shape` of the source."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("heads", "kv_heads", "slots", "splits", "window")),
        *((name, ctypes.c_uint) for name in ("token_stride", "head_stride")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


@dataclass(frozen=True)
class RangeAttention:
    """The compiled kernels for one head size and type; `blocks` keep the GPU busy."""

    kernels: Kernels
    blocks: int

    @cached_property
    def arrived(self) -> Tensor:
        """A zero for each tile and head whose range is split, `[blocks]`: where there are as many
        of them, none is. Kernels leave zeros; those that use it run one after another.
        """
        return torch.zeros(self.blocks, dtype=torch.int32, device=self.kernels.device)

    def attend(
        self,
        query: Tensor,
        where: Addresses,
        scoring: Scoring,
        held: tuple[Stored, Stored],
    ) -> Tensor:
        """Attention of the new tokens of `where`, `[sum(counts), heads, head_dim]` as `query`, over
        the keys and values of a layer, which are all stored.
        """
        if query.stride(2) != 1 or any(
            at % RANGE_OCTET for at in (*query.stride()[:2], query.storage_offset())
        ):
            query = query.clone(memory_format=torch.contiguous_format)
        tokens, heads, head_dim = query.shape
        keys, values = held
        kv_heads, slots, _ = keys.numbers.shape
        requests, tiles = where.tiles(heads // kv_heads)
        splits = self.splits(len(tiles) * kv_heads, where.longest)
        shape = Shape(
            heads, kv_heads, slots, splits, scoring.window or 0, *query.stride()[:2],
            scoring.scale, scoring.cap or 0.0,
        )  # fmt: skip
        out = query.new_empty(tokens, heads, head_dim)
        left = [tokens, heads, splits, head_dim + 2]
        partial = None if splits == 1 else query.new_empty(left, dtype=torch.float32)
        slopes = _as_floats(scoring.alibi_slopes, query.device)
        sinks = _as_floats(scoring.sinks, query.device)
        memory = (keys.numbers, keys.scales, values.numbers, values.scales)
        self.kernels.launch(
            f"attend_{where.tile_rows(heads // kv_heads)}", len(tiles) * kv_heads * splits,
            query, *memory, requests, tiles, slopes, sinks, out, partial,
            None if splits == 1 else self.arrived, shape,
        )  # fmt: skip
        return out

    def splits(self, blocks: int, longest: int) -> int:
        most = min(MOST_SPLITS, longest // SPLIT_TOKENS)
        return max(1, min(most, -(-self.blocks // blocks)))


def _as_floats(numbers: Tensor | None, device: torch.device) -> Tensor | None:
    return None if numbers is None else numbers.to(device, torch.float32).contiguous()


@functools.cache
def range_attention(
    head_dim: int, dtype: torch.dtype, coded: bool, device: torch.device
) -> RangeAttention | None:
    """The kernels for queries of `dtype` and a cache of it or, if `coded`, of 8-bit codes; they are
    compiled when they are first asked for, in about a second. None where PyTorch's attend: on a
    CPU, in float32, for other head sizes, or where ours failed their self-test, which warns.
    """
    if not counts_on_ranges(head_dim, dtype, device):
        return None
    try:
        kernels = kernels_for(SOURCE, KERNELS, dtype, device, HEAD_DIM=head_dim, CODED=int(coded))
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        found = RangeAttention(kernels, _BLOCKS * processors)
        complaint = self_test(found, head_dim, dtype, coded, device)
    except CudaError as error:
        complaint = str(error)
    if complaint is None:
        return found
    warnings.warn(
        f"llmpq's attention kernel is not usable for {dtype} and heads of {head_dim} on {device}: "
        f"{complaint}; PyTorch's take its place and are slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def self_test(
    attention: RangeAttention,
    head_dim: int,
    dtype: torch.dtype,
    coded: bool,
    device: torch.device,
) -> str | None:
    """Compare a few ranges with float32 on the host; say what is wrong, None if nothing is."""
    generator = torch.Generator().manual_seed(0)
    begins, starts = np.array([700, 3, 1400]), np.array([649, 0, 70])
    batch = MicroBatch(np.arange(3), starts, np.array([1, 5, 1]), begins)
    held = [torch.randn(2, 1500, head_dim, generator=generator) for _ in range(2)]
    stored = as_stored(held[0], dtype, coded, device), as_stored(held[1], dtype, coded, device)
    query = torch.randn(7, 8, head_dim, generator=generator).to(device, dtype)
    where = Addresses.of(batch, device)
    found = attention.attend(query, where, Scoring(head_dim**-0.5), stored).float().cpu()
    keys, values = (each.read(lambda part: part, torch.float32).float().cpu() for each in stored)
    wanted = reference(query.float().cpu(), batch, Scoring(head_dim**-0.5), keys, values)
    error = float((found - wanted).norm() / wanted.norm())
    return None if error <= _TOLERANCE else f"its result is off by {error:.1%}"


def as_stored(numbers: Tensor, dtype: torch.dtype, coded: bool, device: torch.device) -> Stored:
    if coded:
        codes, scales = quantized(numbers)
        return Stored(codes.to(device), scales.to(device))
    return Stored(numbers.to(device, dtype))


def reference(
    query: Tensor, batch: MicroBatch, scoring: Scoring, keys: Tensor, values: Tensor
) -> Tensor:
    """The same attention request by request, in the type of its arguments."""
    kv_heads = len(keys)
    parts = []
    for own, begin, start, count in zip(
        query.split(batch.counts.tolist()),
        *(each.tolist() for each in (batch.begins, batch.starts, batch.counts)),
        strict=True,
    ):
        end = start + count
        mask = scoring.mask(torch.arange(start, end)[None], end, query.dtype)
        grouped = own.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        scores = grouped @ keys[:, None, begin : begin + end].transpose(-1, -2) * scoring.scale
        heads = scores.flatten(0, 1) + mask[0]
        shares = heads.softmax(-1).view_as(scores)
        parts.append((shares @ values[:, None, begin : begin + end]).flatten(0, 1).transpose(0, 1))
    return torch.cat(parts)
