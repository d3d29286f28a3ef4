"""Dividing the layers of a model among the ranks of a tensor-parallel stage (Megatron-LM, Shoeybi
et al. 2019, section 3).

Attention is divided by heads, the MLP by the columns between its linears, embedding and LM head by
rows of the vocabulary. Ranks whose number does not divide these get parts that differ by one unit,
the first ones the larger parts. The columns of the MLP are cut between the quantization groups of
its last linear where there are enough. Where a cut goes through a group, as between heads that are
narrower, ranks have the scale of the group in common (`quant.cuts.part_group`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import gcd

from planner.model.family import Architecture
from planner.model.shape import ModelShape
from quant.common.errors import SpecError
from quant.cuts import COLUMNS, ROWS, Cut
from quant.scheme import GROUP_SIZES

DEGREES = (1, 2, 4, 8)
"""Numbers of devices that a group may have."""

_FINER_UNITS = (16, 8, 4, 2, 1)
"""Columns of the MLP that stay together where there are too few groups for all ranks."""


@dataclass(frozen=True)
class RankShare:
    """The part of every layer, of the embedding and of the LM head that a rank holds.

    All are half-open ranges: of query heads, of the key/value heads that these need (held by
    several ranks where there are fewer than ranks), of the MLP's columns, of the vocabulary's rows.
    """

    rank: int
    degree: int
    heads: range
    kv_heads: range
    mlp: range
    vocabulary: range


@cache
def rank_share(shape: ModelShape, degree: int, rank: int) -> RankShare:
    """The part of a model of `shape` that `rank` of `degree` ranks holds.

    SpecError, with the number and the remedy, for what cannot be divided so often.
    """
    if not 0 <= rank < degree:
        raise SpecError(f"rank {rank} is none of a stage of {degree} ranks; 0 to {degree - 1} are")
    if degree > 1 and shape.stored is not None and shape.stored.desc_act:
        raise SpecError(
            f"model {shape.name} cannot be divided among {degree} ranks: its GPTQ checkpoint has "
            "desc_act, with the columns of a group apart; quantize it without desc_act, or give "
            "each stage one device"
        )
    _check_enough(shape, "attention heads", shape.heads, degree)
    _check_enough(shape, "rows of vocabulary", shape.vocab_size, degree)
    heads, kv_heads = _heads(shape, degree)[rank]
    unit = _mlp_unit(shape, degree)
    units = spread(shape.intermediate_size // unit, degree)[rank]
    return RankShare(
        rank=rank,
        degree=degree,
        heads=heads,
        kv_heads=kv_heads,
        mlp=range(units.start * unit, units.stop * unit),
        vocabulary=spread(shape.vocab_size, degree)[rank],
    )


def refusal(shape: ModelShape, degree: int) -> str | None:
    """Say why `degree` ranks cannot share this model, and the remedy; None where they can."""
    try:
        rank_share(shape, degree, 0)
    except SpecError as error:
        return str(error)
    return None


def possible_degrees(shape: ModelShape) -> tuple[int, ...]:
    return tuple(each for each in DEGREES if refusal(shape, each) is None)


@cache
def largest_rank_shape(shape: ModelShape, degree: int) -> ModelShape:
    """The shape of what no rank of `degree` exceeds in any part, to plan memory and times by."""
    if degree == 1:
        return shape
    shares = [rank_share(shape, degree, rank) for rank in range(degree)]
    kv_heads = max(len(share.kv_heads) for share in shares)
    heads = max(len(share.heads) for share in shares)
    return replace(
        shape,
        heads=-(-heads // kv_heads) * kv_heads,
        kv_heads=kv_heads,
        intermediate_size=max(len(share.mlp) for share in shares),
        vocab_size=max(len(share.vocabulary) for share in shares),
        cut_groups=cut_groups(shape, degree),
    )


@cache
def cut_groups(shape: ModelShape, degree: int) -> tuple[int, int]:
    """Columns that share a scale on every rank, of attention's output and of the MLP's last linear.

    They are those of the undivided linear, or finer where a cut between two ranks falls inside.
    """
    output, down = shape.output_linear.group, shape.layer_linears()[-1].group
    shares = [rank_share(shape, degree, rank) for rank in range(degree)]
    heads = [share.heads.stop * shape.head_dim for share in shares]
    columns = [share.mlp.stop for share in shares]
    return gcd(output, *heads), gcd(down, *columns)


def layer_cuts(
    shape: ModelShape, share: RankShare, architecture: Architecture
) -> Mapping[str, Cut]:
    """The part of each linear of a decoder layer that a rank holds, by the linear's name."""
    *projections, output = architecture.attention
    *first, last = architecture.mlp
    heads = _cut(ROWS, share.heads, shape.heads, shape.head_dim)
    kv_heads = _cut(ROWS, share.kv_heads, shape.kv_heads, shape.head_dim)
    cuts = dict(zip(projections, (heads, kv_heads, kv_heads), strict=False))
    if shape.fused_qkv:  # queries, keys and values of one head after those of another
        cuts = {projections[0]: _cut(ROWS, share.heads, shape.heads, 3 * shape.head_dim)}
    cuts[output] = _cut(COLUMNS, share.heads, shape.heads, shape.head_dim)
    cuts |= {name: _cut(ROWS, share.mlp, shape.intermediate_size) for name in first}
    return cuts | {last: _cut(COLUMNS, share.mlp, shape.intermediate_size)}


def vocabulary_cut(shape: ModelShape, share: RankShare) -> Cut:
    return _cut(ROWS, share.vocabulary, shape.vocab_size)


def spread(count: int, parts: int) -> list[range]:
    """Divide `count` neighbours into `parts` ranges whose lengths differ by one at most, the first
    being the longer ones.
    """
    least, more = divmod(count, parts)
    bounds = [part * least + min(part, more) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _heads(shape: ModelShape, degree: int) -> list[tuple[range, range]]:
    """Query heads and key/value heads of every rank.

    A rank has whole groups of query heads with their key/value heads; where there are fewer of
    these than ranks, the query heads of one are divided among the ranks that hold it.
    """
    per_kv_head = shape.heads // shape.kv_heads
    if shape.kv_heads >= degree:
        return [
            (range(own.start * per_kv_head, own.stop * per_kv_head), own)
            for own in spread(shape.kv_heads, degree)
        ]
    found = []
    for kv_head, ranks in enumerate(spread(degree, shape.kv_heads)):
        if len(ranks) > per_kv_head:
            raise SpecError(
                f"model {shape.name} cannot be divided among {degree} ranks: key/value head "
                f"{kv_head} has {per_kv_head} query heads for {len(ranks)} ranks; choose at most "
                f"{shape.kv_heads * per_kv_head} ranks, a divisor of {shape.heads}"
            )
        first = kv_head * per_kv_head
        for own in spread(per_kv_head, len(ranks)):
            queries = range(first + own.start, first + own.stop)
            found.append((queries, range(kv_head, kv_head + 1)))
    return found


def _mlp_unit(shape: ModelShape, degree: int) -> int:
    """Columns of the MLP that no cut takes apart: a group of its last linear, where it has enough
    of them.
    """
    stored = shape.layer_linears()[-1].stored_group
    groups = [*GROUP_SIZES] if stored is None else [stored, *GROUP_SIZES]
    columns = shape.intermediate_size
    for unit in (*groups, *_FINER_UNITS):
        if columns % unit == 0 and columns // unit >= degree:
            return unit
    raise SpecError(
        f"model {shape.name}: {columns} columns of the MLP cannot be divided among {degree} ranks; "
        "choose fewer ranks"
    )


def _check_enough(shape: ModelShape, what: str, count: int, degree: int) -> None:
    if count < degree:
        raise SpecError(
            f"model {shape.name} has {count} {what}, which cannot be divided among {degree} ranks; "
            f"choose at most {count}"
        )


def _cut(dimension: int, part: range, count: int, width: int = 1) -> Cut:
    """The cut of units of `width` neighbours, of which there are `count`."""
    return Cut(dimension, part.start * width, part.stop * width, count * width)
