"""Dividing layers among the ranks of a tensor-parallel stage (Megatron-LM, Shoeybi et al. 2019,
section 3): attention and mixers by heads, the MLP and each expert by columns, embedding and head by
the vocabulary. Every rank has a part of each expert, rather than some experts whole: all have as
much to do whichever experts are asked, and routers choose as on one device.

Parts differ by one unit at most. Columns are cut between quantization groups where there are
enough; where a cut goes through a group, ranks share its scale (`quant.scheme.part_group`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any

from planner.model.family import Architecture
from planner.model.layer_parts import DeltaMixer, LatentAttention
from planner.model.shape import ModelShape
from quant.common.errors import SpecError
from quant.scheme import (
    COLUMNS,
    GROUP_SIZES,
    ROWS,
    SUPER_BLOCK,
    Cut,
    LinearShape,
    ScaleForm,
    stacked,
)

DEGREES = (1, 2, 4, 8)
"""Numbers of devices that a group may have."""

_FINER_UNITS = (16, 8, 4, 2, 1)
"""Columns that stay together where there are too few groups for all ranks."""

_CODE_BITS, _SCALE_BITS = 4, 32
"""Of a weight, and of scale and zero of a group, by which units of experts are chosen."""


@dataclass(frozen=True)
class RankShare:
    """Half-open ranges of a rank in layers of one kind: query heads, the key/value heads these need
    (which ranks may share), columns of the MLP that all tokens ask and of each expert (empty where
    there is none), rows of the vocabulary. Of a mixer `heads` are the value heads, `kv_heads` the
    key heads.
    """

    rank: int
    degree: int
    heads: range
    kv_heads: range
    mlp: range
    experts: range
    vocabulary: range


@cache
def rank_share(shape: ModelShape, degree: int, rank: int) -> RankShare:
    """Give the share of `rank` in layers of the kind of `shape`; SpecError where it cannot be
    divided so often. Of a model with several kinds, all are checked.
    """
    if not 0 <= rank < degree:
        raise SpecError(f"rank {rank} is none of a stage of {degree} ranks; 0 to {degree - 1} are")
    if degree > 1 and shape.stored is not None and shape.stored.desc_act:
        raise SpecError(
            f"model {shape.name} cannot be divided among {degree} ranks: its checkpoint has "
            "desc_act, with the columns of a group apart; quantize it without desc_act, or give "
            "each stage one device"
        )
    for kind in shape.kinds:
        rank_share(kind, degree, rank)
    _check_enough(shape, "rows of vocabulary", shape.vocab_size, degree)
    heads, kv_heads = _heads(shape, degree)[rank]
    asked, experts = shape.experts, range(0)
    if asked is None:
        linear = shape.layer_linears[-1]
        mlp = _columns(shape, linear.in_features, degree, _first_unit(linear, degree))[rank]
    else:
        mlp = range(0)
        if asked.shared_width:
            unit = _smallest_unit(asked.shared_width, degree)
            mlp = _columns(shape, asked.shared_width, degree, unit)[rank]
        unit = _smallest_unit(asked.width, degree)
        experts = _columns(shape, asked.width, degree, unit)[rank]
    vocabulary = spread(shape.vocab_size, degree)[rank]
    return RankShare(rank, degree, heads, kv_heads, mlp, experts, vocabulary)


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
    """The shape of what a rank has, of each part that of the rank which has most of it."""
    return shape if degree == 1 else shape_of_ranks(shape, degree, range(degree))


def shape_of_ranks(shape: ModelShape, degree: int, ranks: range) -> ModelShape:
    """As `largest_rank_shape`, of these `ranks` alone: of one, what it holds exactly."""
    kinds = tuple(shape_of_ranks(kind, degree, ranks) for kind in shape.kinds)
    alone = replace(shape, kinds=(), pattern=())
    shares = [rank_share(alone, degree, rank) for rank in ranks]
    names = "heads", "kv_heads", "mlp", "experts", "vocabulary"
    heads, kv_heads, mlp, experts, rows = (
        max(len(getattr(share, name)) for share in shares) for name in names
    )
    heads = -(-heads // kv_heads) * kv_heads
    own: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    if shape.delta is not None:
        own = {"delta": replace(shape.delta, key_heads=kv_heads, value_heads=heads)}
    if shape.qk_norm_width:
        own["qk_norm_width"] = (heads + kv_heads) * shape.head_dim
    if shape.experts is not None:
        own["experts"] = replace(shape.experts, width=experts, shared_width=mlp)
    else:
        own["intermediate_size"] = mlp
    own |= {"vocab_size": rows, "cut_groups": cut_groups(alone, shares)}
    return replace(shape, kinds=kinds, **own)


def cut_groups(shape: ModelShape, shares: Sequence[RankShare]) -> tuple[int, ...]:
    """Columns that share a scale on all ranks of `shares`, of attention's output, of the last
    linear of the MLP and of each expert, where there are such: those of the undivided linear, or
    finer where a cut between two ranks falls inside.
    """
    output = shape.output_linear
    own = shape.heads if shape.delta is None else shape.delta.value_heads
    groups = [_finest(output, (share.heads for share in shares), output.in_features // own)]
    if any(share.mlp for share in shares):
        groups.append(_finest(shape.layer_linears[-1], (share.mlp for share in shares)))
    if shape.experts is not None:
        groups.append(_finest(shape.expert_linears[-1], (share.experts for share in shares)))
    return tuple(groups)


def summed_modules(shape: ModelShape, architecture: Architecture) -> tuple[str, ...]:
    """Names of the modules in a layer of the kind of `shape` of which each rank computes a summand:
    the output of attention, and the MLP's last linear or, where there are experts, the module that
    has them and what all tokens ask.
    """
    names = architecture.of_kind(shape.kind)
    output, last = names.attention[-1:], names.mlp[-1:]
    if shape.experts is None or names.experts is None:
        return output + last
    block = names.experts.rpartition(".")[0]
    if not block:
        return (*output, *last, names.experts)
    apart = tuple(name for name in last if not name.startswith(f"{block}."))
    return (*output, *apart, block)


def layer_sums(shape: ModelShape, architecture: Architecture) -> tuple[int, ...]:
    """Numbers of a token in each sum over the ranks in a layer of the kind of `shape`."""
    squares = (1, 1) if shape.qk_norm_width else ()  # of queries and of keys
    return (*squares, *(shape.hidden_size for _ in summed_modules(shape, architecture)))


def layer_cuts(
    shape: ModelShape, share: RankShare, architecture: Architecture
) -> Mapping[str, Cut]:
    """The part that a rank holds of all that is divided in a layer of the kind of `shape`, by the
    name of the parameter or of the module that has it; of fused experts, of each.
    """
    names = architecture.of_kind(shape.kind)
    mixer = shape.delta
    cuts = (
        _attention_cuts(shape, share, names)
        if mixer is None
        else _mixer_cuts(mixer, share, names.attention)
    )
    if names.mlp:
        *first, last = names.mlp
        width = shape.intermediate_size
        if shape.experts is not None:
            width = shape.experts.shared_width
        columns = _cut(ROWS, share.mlp, width)
        fused = stacked((columns, columns)) if shape.fused_mlp else columns
        cuts |= dict.fromkeys(first, fused) | {last: _cut(COLUMNS, share.mlp, width)}
    return cuts | _expert_cuts(shape, share, names)


def _latent_cuts(
    latent: LatentAttention, heads: int, share: RankShare, names: Sequence[str]
) -> dict[str, Cut]:
    """Those of latent attention, whose latents all ranks have whole."""
    *_, queries, _, output = names
    made = f"{output.rpartition('.')[0]}.kv_b_proj"
    return {
        queries: _cut(ROWS, share.heads, heads, latent.plain_width + latent.rotary_width),
        made: _cut(ROWS, share.heads, heads, latent.plain_width + latent.value_width),
        output: _cut(COLUMNS, share.heads, heads, latent.value_width),
    }


def _attention_cuts(shape: ModelShape, share: RankShare, names: Architecture) -> dict[str, Cut]:
    if shape.latent is not None:
        return _latent_cuts(shape.latent, shape.heads, share, names.attention)
    *projections, output = names.attention
    heads = _cut(ROWS, share.heads, shape.heads, shape.head_dim)
    kv_heads = _cut(ROWS, share.kv_heads, shape.kv_heads, shape.head_dim)
    queries = heads
    if shape.output_gate:  # of each head its queries, then its gate
        queries = _cut(ROWS, share.heads, shape.heads, 2 * shape.head_dim)
    cuts = dict(zip(projections, (queries, kv_heads, kv_heads), strict=False))
    if names.qkv_in_blocks:
        cuts = {projections[0]: stacked((heads, kv_heads, kv_heads))}
    elif shape.fused_qkv:  # queries, keys and values of one head after those of another
        cuts = {projections[0]: _cut(ROWS, share.heads, shape.heads, 3 * shape.head_dim)}
    cuts[output] = _cut(COLUMNS, share.heads, shape.heads, shape.head_dim)
    module = output.rpartition(".")[0]
    if shape.qk_norm_width:
        cuts |= {f"{module}.q_norm": heads, f"{module}.k_norm": kv_heads}
    if shape.sinks:
        cuts[f"{module}.sinks"] = _cut(ROWS, share.heads, shape.heads)
    return cuts


def _mixer_cuts(mixer: DeltaMixer, share: RankShare, names: Sequence[str]) -> dict[str, Cut]:
    *projections, output = names
    module = output.rpartition(".")[0]
    keys = _cut(ROWS, share.kv_heads, mixer.key_heads, mixer.key_dim)
    values = _cut(ROWS, share.heads, mixer.value_heads, mixer.value_dim)
    mixed, rates = stacked((keys, keys, values)), _cut(ROWS, share.heads, mixer.value_heads)
    whole: Iterable[Cut] = (mixed, values, rates, rates)
    if mixer.fused:
        whole = (
            _by_key_head(mixer, share, 2 * mixer.key_dim, mixer.value_dim),
            _by_key_head(mixer, share, 0, 1),
        )
    beside = {f"{module}.conv1d": mixed, f"{module}.A_log": rates, f"{module}.dt_bias": rates}
    cuts = dict(zip(projections, whole, strict=True)) | beside
    return cuts | {output: _cut(COLUMNS, share.heads, mixer.value_heads, mixer.value_dim)}


def _by_key_head(mixer: DeltaMixer, share: RankShare, key_rows: int, value_rows: int) -> Cut:
    """The cut of a linear with `key_rows`, then twice `value_rows` per value head, by key head."""
    values = mixer.value_heads // mixer.key_heads
    each = key_rows + 2 * values * value_rows
    spans = []
    for head in share.kv_heads:
        first, rows = head * each + key_rows, values * value_rows
        begin = max(0, share.heads.start - head * values) * value_rows
        end = min(values, share.heads.stop - head * values) * value_rows
        spans += [(first - key_rows, first), (first + begin, first + end)]
        spans += [(first + rows + begin, first + rows + end)]
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        elif begin < end:
            joined.append((begin, end))
    (begin, end), *more = joined
    return Cut(ROWS, begin, end, mixer.key_heads * each, tuple(more))


def _expert_cuts(shape: ModelShape, share: RankShare, names: Architecture) -> dict[str, Cut]:
    if shape.experts is None:
        return {}
    width, name = shape.experts.width, names.experts
    columns = _cut(ROWS, share.experts, width)
    grown = stacked((columns, columns))
    if names.experts_by_inputs:  # rows of gate and up by turns
        grown = _cut(ROWS, share.experts, width, 2)
    cuts = {f"{name}.gate_up_proj": grown}
    if shape.experts.has_biases:
        cuts[f"{name}.gate_up_proj_bias"] = replace(grown, dimension=COLUMNS)
    return cuts | {f"{name}.down_proj": _cut(COLUMNS, share.experts, width)}


def hands_over(shape: ModelShape) -> bool:
    """Whether ranks hand over what they keep: the same range of heads in all layers."""
    held = {(kind.heads, kind.kv_heads, kind.delta) for kind in shape.kind_shapes}
    return len(held) == 1 and shape.kind_shapes[0].delta is None


def vocabulary_cut(shape: ModelShape, share: RankShare) -> Cut:
    return _cut(ROWS, share.vocabulary, shape.vocab_size)


def spread(count: int, parts: int) -> list[range]:
    """Divide `count` into `parts` neighbouring ranges, the first longer by at most one."""
    least, more = divmod(count, parts)
    bounds = [part * least + min(part, more) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _heads(shape: ModelShape, degree: int) -> list[tuple[range, range]]:
    """List query heads and key/value heads of every rank, or value and key heads of a mixer; where
    there are fewer key/value heads than ranks, the query heads of one are divided among the ranks
    that hold it.
    """
    heads, kv_heads, queries, keys = shape.heads, shape.kv_heads, "query", "key/value"
    if shape.delta is not None:
        heads, kv_heads = shape.delta.value_heads, shape.delta.key_heads
        queries, keys = "value", "key"
    what = "attention heads" if shape.delta is None else "value heads of linear attention"
    _check_enough(shape, what, heads, degree)
    per_kv_head = heads // kv_heads
    if kv_heads >= degree:
        return [
            (range(own.start * per_kv_head, own.stop * per_kv_head), own)
            for own in spread(kv_heads, degree)
        ]
    found = []
    for kv_head, ranks in enumerate(spread(degree, kv_heads)):
        if len(ranks) > per_kv_head:
            raise SpecError(
                f"model {shape.name} cannot be divided among {degree} ranks: {keys} head "
                f"{kv_head} has {per_kv_head} {queries} heads for {len(ranks)} ranks; choose at "
                f"most {heads} ranks, a divisor of {heads}"
            )
        first = kv_head * per_kv_head
        for own in spread(per_kv_head, len(ranks)):
            own_queries = range(first + own.start, first + own.stop)
            found.append((own_queries, range(kv_head, kv_head + 1)))
    return found


def _columns(shape: ModelShape, columns: int, degree: int, unit: int | None) -> list[range]:
    if unit is None:
        raise SpecError(
            f"model {shape.name}: {columns} columns of the MLP cannot be divided among {degree} "
            "ranks; choose fewer ranks"
        )
    units = spread(columns // unit, degree)
    return [range(own.start * unit, own.stop * unit) for own in units]


def _units(columns: int, degree: int, groups: Sequence[int]) -> list[int]:
    """Numbers of columns that no cut need take apart: groups of a linear, if it has enough."""
    return [unit for unit in groups if columns % unit == 0 and columns // unit >= degree]


def _first_unit(linear: LinearShape, degree: int) -> int | None:
    stored = () if linear.stored_group is None else (linear.stored_group,)
    stored = (SUPER_BLOCK, *stored) if linear.form is ScaleForm.SUPER_BLOCKS else stored
    found = _units(linear.in_features, degree, (*stored, *GROUP_SIZES, *_FINER_UNITS))
    return next(iter(found), None)


def _smallest_unit(columns: int, degree: int) -> int | None:
    """The group with the smallest largest part, with scales: most of it is narrow experts."""
    groups = _units(columns, degree, GROUP_SIZES) or _units(columns, degree, _FINER_UNITS)[:1]
    return min(
        groups,
        key=lambda unit: -(-columns // unit // degree) * (unit * _CODE_BITS + _SCALE_BITS),
        default=None,
    )


def _finest(linear: LinearShape, parts: Iterable[range], width: int = 1) -> int:
    ends = [width * end for part in parts for end in (part.start, part.stop)]
    return gcd(linear.group, *ends)


def _check_enough(shape: ModelShape, what: str, count: int, degree: int) -> None:
    if count < degree:
        raise SpecError(
            f"model {shape.name} has {count} {what}, which cannot be divided among {degree} ranks; "
            f"choose at most {count}"
        )


def _cut(dimension: int, part: range, count: int, width: int = 1) -> Cut:
    return Cut(dimension, part.start * width, part.stop * width, count * width)
