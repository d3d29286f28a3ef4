"""Dividing layers among the ranks of a tensor-parallel stage (Megatron-LM, Shoeybi et al. 2019,
section 3): attention by heads, the MLP by columns, embedding and head by the vocabulary. Parts
differ by one unit at most. MLP columns are cut between quantization groups where there are enough;
where a cut goes through a group, ranks share its scale (`quant.scheme.part_group`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd

from planner.model.family import Architecture
from planner.model.shape import ModelShape
from quant.common.errors import SpecError
from quant.scheme import COLUMNS, GROUP_SIZES, ROWS, Cut, stacked

DEGREES = (1, 2, 4, 8)
"""Numbers of devices that a group may have."""

_FINER_UNITS = (16, 8, 4, 2, 1)
"""Columns of the MLP that stay together where there are too few groups for all ranks."""


@dataclass(frozen=True)
class RankShare:
    """Half-open ranges of a rank: query heads, the key/value heads these need (which ranks may
    share), columns of the MLP, rows of the vocabulary.
    """

    rank: int
    degree: int
    heads: range
    kv_heads: range
    mlp: range
    vocabulary: range


@cache
def rank_share(shape: ModelShape, degree: int, rank: int) -> RankShare:
    if not 0 <= rank < degree:
        raise SpecError(f"rank {rank} is none of a stage of {degree} ranks; 0 to {degree - 1} are")
    if degree > 1 and shape.stored is not None and shape.stored.desc_act:
        raise SpecError(
            f"model {shape.name} cannot be divided among {degree} ranks: its GPTQ checkpoint has "
            "desc_act, with the columns of a group apart; quantize it without desc_act, or give "
            "each stage one device"
        )
    if degree > 1:
        _check_parts(shape, degree)
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
    if degree == 1:
        return shape
    shares = [rank_share(shape, degree, rank) for rank in range(degree)]
    kv_heads = max(len(share.kv_heads) for share in shares)
    heads = max(len(share.heads) for share in shares)
    return shape.with_all(
        heads=-(-heads // kv_heads) * kv_heads,
        kv_heads=kv_heads,
        intermediate_size=max(len(share.mlp) for share in shares),
        vocab_size=max(len(share.vocabulary) for share in shares),
        cut_groups=cut_groups(shape, degree),
    )


@cache
def cut_groups(shape: ModelShape, degree: int) -> tuple[int, int]:
    """Columns that share a scale on every rank, of attention's output and the MLP's last linear:
    those of the undivided linear, or finer where a cut between two ranks falls inside.
    """
    output, down = shape.output_linear.group, shape.layer_linears[-1].group
    shares = [rank_share(shape, degree, rank) for rank in range(degree)]
    heads = [share.heads.stop * shape.head_dim for share in shares]
    columns = [share.mlp.stop for share in shares]
    return gcd(output, *heads), gcd(down, *columns)


def layer_cuts(
    shape: ModelShape, share: RankShare, architecture: Architecture
) -> Mapping[str, Cut]:
    *projections, output = architecture.attention
    *first, last = architecture.mlp
    heads = _cut(ROWS, share.heads, shape.heads, shape.head_dim)
    kv_heads = _cut(ROWS, share.kv_heads, shape.kv_heads, shape.head_dim)
    cuts = dict(zip(projections, (heads, kv_heads, kv_heads), strict=False))
    if architecture.qkv_in_blocks:
        cuts = {projections[0]: stacked((heads, kv_heads, kv_heads))}
    elif shape.fused_qkv:  # queries, keys and values of one head after those of another
        cuts = {projections[0]: _cut(ROWS, share.heads, shape.heads, 3 * shape.head_dim)}
    cuts[output] = _cut(COLUMNS, share.heads, shape.heads, shape.head_dim)
    columns = _cut(ROWS, share.mlp, shape.intermediate_size)
    cuts |= {name: stacked((columns, columns)) if shape.fused_mlp else columns for name in first}
    return cuts | {last: _cut(COLUMNS, share.mlp, shape.intermediate_size)}


def vocabulary_cut(shape: ModelShape, share: RankShare) -> Cut:
    return _cut(ROWS, share.vocabulary, shape.vocab_size)


def spread(count: int, parts: int) -> list[range]:
    """Divide `count` into `parts` neighbouring ranges, the first longer by at most one."""
    least, more = divmod(count, parts)
    bounds = [part * least + min(part, more) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _heads(shape: ModelShape, degree: int) -> list[tuple[range, range]]:
    """List query heads and key/value heads of every rank; where there are fewer key/value heads
    than ranks, the query heads of one are divided among the ranks that hold it.
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
    """Columns of the MLP that no cut takes apart: a group of its last linear, if it has enough."""
    stored = shape.layer_linears[-1].stored_group
    groups = [*GROUP_SIZES] if stored is None else [stored, *GROUP_SIZES]
    columns = shape.intermediate_size
    for unit in (*groups, *_FINER_UNITS):
        if columns % unit == 0 and columns // unit >= degree:
            return unit
    raise SpecError(
        f"model {shape.name}: {columns} columns of the MLP cannot be divided among {degree} ranks; "
        "choose fewer ranks"
    )


def _check_parts(shape: ModelShape, degree: int) -> None:
    """Refuse layers with parts of which ranks would not have theirs, or whose parts differ."""
    sizes = {(k.heads, k.kv_heads, k.head_dim, k.intermediate_size) for k in shape.kind_shapes}
    if len(sizes) > 1:
        raise SpecError(
            f"model {shape.name} cannot be divided among {degree} ranks: its layers differ in "
            f"heads or widths ({shape.model_type}); give each stage one device"
        )
    for kind in shape.kind_shapes:
        has_others = kind.experts or kind.delta or kind.output_gate or kind.sinks
        if (
            kind.qk_norm_width
            or has_others
            or kind.extra_linears
            or kind.values_are_keys
            or kind.reads_earlier_keys
        ):
            raise SpecError(
                f"model {shape.name} cannot be divided among {degree} ranks: its layers have parts "
                f"that are not divided ({shape.model_type}); give each stage one device"
            )


def _check_enough(shape: ModelShape, what: str, count: int, degree: int) -> None:
    if count < degree:
        raise SpecError(
            f"model {shape.name} has {count} {what}, which cannot be divided among {degree} ranks; "
            f"choose at most {count}"
        )


def _cut(dimension: int, part: range, count: int, width: int = 1) -> Cut:
    return Cut(dimension, part.start * width, part.stop * width, count * width)
