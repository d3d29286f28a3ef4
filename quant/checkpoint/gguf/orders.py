"""How llama.cpp's converter moves the rows and changes the numbers of tensors, undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

RowOrder = Literal[
    "as stored", "rotary", "fused", "by key head", "interleaved",
    "tiled heads", "tiled numbers", "tiled behind keys", "keys and values",
]  # fmt: skip
"""Of queries and keys whose rotary positions turn neighbours; of fused queries, keys and values, in
three blocks; of queries, keys, values and gate of a delta rule, in four; of gate and up that take
turns; of the value heads of a delta rule, those of one key head after another: rows of heads,
numbers of heads, or channels whose first ones are of queries and keys; of the keys and values that
are made of latents, those of all heads in two tensors, columns before rows in that of keys."""

Change = Literal["none", "plus one", "decay", "one row", "one channel", "tiled columns"]
"""Numbers of a norm, stored with the one that transformers adds to them; of a decay, stored as the
factor and not as its logarithm; dimensions of one that are not stored; columns as `tiled heads`."""

Rows = np.ndarray[Any, np.dtype[np.int64]]
_PARTS = {"rotary": 2, "fused": 3}


def order_numbers(order: str, config: Mapping[str, Any], is_key: bool) -> tuple[int, ...]:
    """Sizes by which rows are in `order`: heads, or those of a delta rule."""
    heads = config.get("num_attention_heads") or config.get("n_head", 1)
    if order in _PARTS:
        return (config.get("num_key_value_heads", heads) if is_key else heads,)
    if "tiled" not in order and order != "by key head":
        return ()
    keys, values = (config[f"linear_num_{part}_heads"] for part in ("key", "value"))
    key_width, value_width = (config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    if order == "by key head":
        return keys, key_width, values // keys * value_width
    width = 1 if order == "tiled numbers" else value_width
    return keys, values // keys, width, 2 * keys * key_width * (order == "tiled behind keys")


def row_order(order: str, numbers: tuple[int, ...], count: int) -> Rows | None:
    """Where each of `count` rows of transformers' tensor is stored; None: in the same order.
    ValueError where so many are not of such heads.
    """
    if order in _PARTS:
        return _of_heads(count, numbers[0], _PARTS[order])
    if order == "by key head":
        return _by_key_head(count, *numbers)
    return untiled(count, *numbers) if "tiled" in order else None


def _of_heads(count: int, heads: int, parts: int) -> Rows:
    each, rest = divmod(count, heads * parts)
    if rest:
        raise ValueError(f"{heads} heads")
    rows = np.arange(count)
    if parts == _PARTS["rotary"]:  # pairs of neighbours become halves of a head
        return rows.reshape(heads, each, parts).swapaxes(1, 2).reshape(-1)
    # all queries, keys and values become those of each head
    return rows.reshape(parts, heads, each).swapaxes(0, 1).reshape(-1)


def _by_key_head(count: int, heads: int, key_width: int, value_width: int) -> Rows:
    widths = (key_width, key_width, value_width, value_width)
    if count != heads * sum(widths):
        raise ValueError(f"{heads} heads of {sum(widths)} rows")
    blocks = np.split(np.arange(count), np.cumsum([heads * width for width in widths])[:-1])
    return np.concatenate([block.reshape(heads, -1) for block in blocks], axis=1).reshape(-1)


def untiled(count: int, heads: int, per_head: int, width: int, first: int) -> Rows:
    """Where each row or column behind `first` is stored of the value heads of `heads` key heads."""
    if count != first + heads * per_head * width:
        raise ValueError(f"{first} rows and {heads * per_head} heads of {width}")
    moved = np.arange(first, count).reshape(per_head, heads, width).swapaxes(0, 1)
    return np.concatenate([np.arange(first), moved.reshape(-1)])


def joined_shape(order: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape in transformers of tensors of these `shapes` in one. Of parts that are missing, or
    do not belong together, it has no rows, so that this is noticed.
    """
    if order == "keys and values":
        keys, values = (*shapes, (), ())[:2]
        if len(keys) != 3 or len(values) != 3 or keys[:2] != (values[0], values[2]):
            return (0, *shapes[0][1:2])
        return keys[0] * (keys[2] + values[1]), keys[1]
    if order == "interleaved":
        return (*shapes[0][:-1], sum(each[-1] for each in shapes))
    return (sum(each[0] for each in shapes), *shapes[0][1:])


def changed_shape(shape: tuple[int, ...], change: str) -> tuple[int, ...]:
    """The shape in transformers of a tensor of `shape` in the file."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    if change == "one row":
        return (1, *shape)
    return (shape[0], 1, *shape[1:]) if change == "one channel" else shape
