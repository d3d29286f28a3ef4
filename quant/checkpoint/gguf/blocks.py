"""Blocks of codes of 4 to 6 bit, which stages keep, and linears that are stored so; no torch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.folder import GgufIndex, GgufTensor
from quant.checkpoint.gguf.header import BFLOAT16, UNPACKED, gguf_library
from quant.checkpoint.gguf.names import layer_of
from quant.checkpoint.stored_config import GGUF, WHOLE_ROW, StoredConfig, StoredLinear
from quant.scheme import FULL_BITS, ScaleForm

Array = np.ndarray[Any, Any]
Blocks = tuple[Array, Array, Array | None]
"""Of rows: the codes uint8 `[rows, in]`; of each group of 32 columns the scale and what code 0
stands for, float `[rows, groups]`, None where the MIDDLE code stands for 0.
"""

SuperBlocks = tuple[Array, Array]
"""Of rows: the codes, and scales as `quant.super_blocks` holds them, uint8 `[rows, pairs, 2]`."""

GROUP = 32
BESIDE_BITS = 8


def _q4_0(rows: Array) -> Blocks:
    blocks = rows.reshape(len(rows), -1, 18)
    return _nibbles(blocks[..., 2:]), _halves(blocks, 0), None


def _q4_1(rows: Array) -> Blocks:
    blocks = rows.reshape(len(rows), -1, 20)
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(rows: Array) -> Blocks:
    blocks = rows.reshape(len(rows), -1, 22)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes, _halves(blocks, 0), None


def _q5_1(rows: Array) -> Blocks:
    blocks = rows.reshape(len(rows), -1, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(rows: Array) -> SuperBlocks:
    blocks = rows.reshape(len(rows), -1, 144)
    codes = _nibbles(blocks[..., 16:].reshape(len(rows), -1, GROUP))
    return codes, _eight_groups(blocks)


def _q5_k(rows: Array) -> SuperBlocks:
    """Bit g of a byte belongs to the column of that number in group g."""
    blocks = rows.reshape(len(rows), -1, 176)
    codes = _nibbles(blocks[..., 48:].reshape(len(rows), -1, GROUP))
    upper = blocks[..., np.newaxis, 16:48] >> np.arange(8, dtype=np.uint8)[:, np.newaxis] & 1
    return codes | (upper << 4).reshape(len(rows), -1), _eight_groups(blocks)


def _q6_k(rows: Array) -> SuperBlocks:
    """A byte has the upper bits of the columns of that number in four neighbouring groups of 32."""
    blocks = rows.reshape(len(rows), -1, 210)
    codes = _nibbles(blocks[..., :128].reshape(len(rows), -1, 2 * GROUP))
    joined = blocks[..., 128:192].reshape(len(rows), -1, 1, GROUP)
    upper = joined >> np.arange(0, 8, 2, dtype=np.uint8)[:, np.newaxis] & 3
    pairs = (blocks[..., part].reshape(len(rows), -1, 2) for part in (_Q6_HALF, _Q6_FACTORS))
    return codes | (upper << 4).reshape(len(rows), -1), np.concatenate([*pairs], 1)


_Q6_FACTORS, _Q6_HALF = slice(192, 208), slice(208, 210)


def _eight_groups(blocks: Array) -> Array:
    """Eight groups share two halves, which 6-bit factors multiply."""
    packed = np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12)
    factors = np.stack(gguf_library("Q4_K").quants.Q4_K.get_scale_min(packed), -1)
    pairs = (each.reshape(len(blocks), -1, 2) for each in (blocks[..., :4], factors))
    return np.concatenate([*pairs], 1)


def _nibbles(packed: Array) -> Array:
    """The codes `[rows, in]` of `packed` `[rows, n, bytes]`: all low halves before the high."""
    codes = np.empty((*packed.shape[:2], 2, packed.shape[2]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(len(packed), -1)


def _fifth_bits(packed: Array) -> Array:
    """What the bits `[rows, n, 4]` add to codes `[rows, in]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1) << 4


def _halves(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


CODES: Mapping[str, Callable[[Array], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
}
SUPER_CODES: Mapping[str, Callable[[Array], SuperBlocks]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""How blocks, which are rows of bytes, are read, by their type."""


def _stored_as(type_name: str) -> StoredLinear | None:
    """How a matrix of blocks is kept; None: it is decoded."""
    bits = int(type_name[1]) if type_name in (*CODES, *SUPER_CODES) else 0
    if type_name in SUPER_CODES:
        return StoredLinear(bits, GROUP // 2 if bits == 6 else GROUP, ScaleForm.SUPER_BLOCKS)
    return StoredLinear(bits, GROUP) if bits else None


def _kept(tensor: GgufTensor) -> StoredLinear | None:
    """How a matrix is kept that is rows of such blocks, in whatever order."""
    types = {source.type_name for source in tensor.sources}
    is_moved = tensor.change != "none" or tensor.order == "keys and values"
    return None if len(types) > 1 or is_moved else _stored_as(types.pop())


@lru_cache(maxsize=4)
def stored_linears(index: GgufIndex) -> Mapping[str, StoredLinear]:
    """How weights are stored in layers most of whose blocks are such codes; other blocks there are
    held with 8 bit in rows. Those of other layers are decoded, and have the bits of a plan.
    """
    if "interleaved" in ARCHITECTURES[index.architecture].orders.values():
        return {}  # gate and up of experts take turns in stages, row by row
    layers = defaultdict[int, dict[str, GgufTensor]](dict)
    for name, tensor in index.tensors.items():
        layer = layer_of(tensor.sources[0].stored_name)
        if layer is not None and len(tensor.shape) == 2 and not _is_plain(tensor):
            layers[layer][name] = tensor
    return {name: own for each in layers.values() for name, own in _of_layer(each)}


def stored_config(index: GgufIndex) -> StoredConfig | None:
    """How most weights in blocks are stored; None: all are plain numbers."""
    weights = Counter[str]()
    for tensor in index.tensors.values():
        if len(tensor.shape) == 2 and not _is_plain(tensor):
            weights[tensor.sources[0].type_name] += math.prod(tensor.shape)
    if not weights:
        return None
    kept = Counter[StoredLinear]()
    for name, own in stored_linears(index).items():
        if own.bits != BESIDE_BITS:
            kept[own] += math.prod(index.tensors[name].shape)
    most = kept.most_common(1)[0][0] if kept else StoredLinear(FULL_BITS, WHOLE_ROW)
    method = f"{GGUF} {weights.most_common(1)[0][0]}"
    return StoredConfig(most.bits, most.group_size, method=method)


def _is_plain(tensor: GgufTensor) -> bool:
    return any(source.type_name in (*UNPACKED, BFLOAT16) for source in tensor.sources)


def _of_layer(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, StoredLinear]]:
    kept = {name: own for name, each in tensors.items() if (own := _kept(each))}
    weights = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    if 2 * sum(weights[name] for name in kept) <= sum(weights.values()):
        return
    for name, tensor in tensors.items():
        other, own = _beside(name), kept.get(name)
        if own is None or (other in tensors and kept.get(other) != own):
            own = StoredLinear(BESIDE_BITS, tensor.shape[1])
        yield name, own


def _beside(name: str) -> str:
    """The weight that stages hold in one with `name`: gate or up of an expert, else itself."""
    for one, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        if name.endswith(f".{one}.weight") and ".experts." in name:
            return name.replace(one, other)
    return name
