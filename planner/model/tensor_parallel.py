"""What each rank of a tensor-parallel group holds of a model (Megatron-LM's division).

Queries, keys, values and the first linears of the MLP are divided by rows, attention's output and
the last linear of the MLP by columns, embedding and LM head by rows of the vocabulary. Norms,
positions and projections are whole on every rank. Where something cannot be divided evenly, the
first ranks hold more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd

from planner.model.shape import ModelShape
from quant.common.errors import SpecError
from quant.scheme import group_size

DEGREES = (1, 2, 4, 8)
"""Numbers of devices that a group may have."""


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a model: attention `heads`, the `kv_heads` that they read, `mlp` columns
    and rows of the `vocabulary`.

    A key/value head may be held by several ranks, each with some of the heads that read it.
    """

    heads: range
    kv_heads: range
    mlp: range
    vocabulary: range


def refusal(shape: ModelShape, degree: int) -> str | None:
    """Say why `degree` ranks cannot share this model, and the remedy; None where they can."""
    if degree == 1:
        return None
    if shape.stored is not None and shape.stored.desc_act:
        return (
            f"{shape.name} is quantized in the order of its activations (desc_act), in which the "
            "columns of a group lie apart and cannot be divided; use tensor_parallel 1, or a "
            "checkpoint without desc_act"
        )
    if _heads_of(shape, degree, 0) is None:
        return (
            f"{shape.heads} attention heads with {shape.kv_heads} key/value heads of {shape.name} "
            f"cannot be divided over {degree} ranks; use a tensor_parallel of "
            f"{', '.join(map(str, possible_degrees(shape)))}"
        )
    return None


def possible_degrees(shape: ModelShape) -> tuple[int, ...]:
    """The numbers of ranks that can share the model's heads, ascending."""
    return tuple(each for each in DEGREES if _heads_of(shape, each, 0) is not None)


@cache
def rank_share(shape: ModelShape, degree: int, rank: int) -> RankShare:
    """The part of `rank` among `degree`; SpecError where the model cannot be divided so."""
    if (problem := refusal(shape, degree)) is not None:
        raise SpecError(problem)
    found = _heads_of(shape, degree, rank)
    assert found is not None, "refused above"
    heads, kv_heads = found
    unit = _mlp_unit(shape, degree)
    units = part_of(shape.intermediate_size // unit, degree, rank)
    return RankShare(
        heads,
        kv_heads,
        range(units.start * unit, units.stop * unit),
        part_of(shape.vocab_size, degree, rank),
    )


@cache
def rank_shape(shape: ModelShape, degree: int) -> ModelShape:
    """The shape of what the first rank of `degree` holds and computes, which none exceeds."""
    if degree == 1:
        return shape
    share = rank_share(shape, degree, 0)
    return replace(
        shape,
        heads=len(share.heads),
        kv_heads=len(share.kv_heads),
        intermediate_size=len(share.mlp),
        vocab_size=len(share.vocabulary),
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


def part_of(whole: int, degree: int, rank: int) -> range:
    """Part number `rank` of `whole` things in `degree` parts, of which the first have one more."""
    each, more = divmod(whole, degree)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def _heads_of(shape: ModelShape, degree: int, rank: int) -> tuple[range, range] | None:
    """The attention and key/value heads of a rank; None where a rank would need parts of heads."""
    readers = shape.heads // shape.kv_heads
    if degree <= shape.kv_heads:
        kv_heads = part_of(shape.kv_heads, degree, rank)
        return range(kv_heads.start * readers, kv_heads.stop * readers), kv_heads
    holders, rest = divmod(degree, shape.kv_heads)
    if rest or holders > readers:
        return None
    head, place = divmod(rank, holders)
    part = part_of(readers, holders, place)
    first = head * readers
    return range(first + part.start, first + part.stop), range(head, head + 1)


def _mlp_unit(shape: ModelShape, degree: int) -> int:
    """Columns of the MLP that stay together: a group of its last linear, or fewer where there are
    fewer groups than ranks.
    """
    unit = group_size(shape.intermediate_size)
    while shape.intermediate_size // unit < degree:
        unit = next(each for each in range(unit // 2, 0, -1) if unit % each == 0)
    return unit
