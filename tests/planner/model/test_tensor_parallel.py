"""Dividing models among ranks: every part is held, groups stay whole, the impossible is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from planner.model.families import FAMILIES
from planner.model.family import LINEAR
from planner.model.finding import builtin_names, model_shape
from planner.model.layer_parts import DeltaMixer, Experts
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import (
    layer_cuts,
    layer_sums,
    rank_share,
    refusal,
    shape_of_ranks,
    spread,
    vocabulary_cut,
)
from quant.checkpoint.stored_config import StoredConfig
from quant.common.errors import SpecError
from quant.scheme import COLUMNS, group_size, part_shape

DEGREES = (1, 2, 4, 8)
MODELS = [model_shape(name) for name in builtin_names()]
KINDS = [replace(kind, pattern=()) for shape in MODELS for kind in shape.kind_shapes]
SMALL = ModelShape(
    name="small",
    model_type="llama",
    layers=2,
    hidden_size=48,
    intermediate_size=80,
    heads=6,
    kv_heads=2,
    head_dim=8,
    vocab_size=199,
    max_positions=128,
    word_embedding_size=48,
    norm_parameters=48,
    tied_embeddings=False,
    gated_mlp=True,
)


def divisible(degree: int) -> list[ModelShape]:
    """Kinds of layers that can be divided so often."""
    return [shape for shape in KINDS if refusal(shape, degree) is None]


def heads_of(shape: ModelShape) -> tuple[int, int]:
    """Query and key/value heads; of a mixer value and key heads."""
    mixer = shape.delta
    return (shape.heads, shape.kv_heads) if mixer is None else (mixer.value_heads, mixer.key_heads)


def in_a_row(parts: list[range], count: int) -> bool:
    """Whether `parts` are all of `count`, each behind the one before."""
    starts, stops = [0, *(part.stop for part in parts)], [*(part.start for part in parts), count]
    return starts == stops


def test_all_built_in_models_are_divided() -> None:
    assert all(refusal(shape, 2) is None for shape in MODELS)
    few = {shape.name for shape in MODELS if refusal(shape, 8) is not None}
    assert all(model_shape(name).heads < 8 for name in few)


@pytest.mark.parametrize("degree", DEGREES)
def test_every_head_column_and_row_is_on_one_rank(degree: int) -> None:
    for shape in divisible(degree):
        shares = [rank_share(shape, degree, rank) for rank in range(degree)]
        experts = shape.experts
        mlp = shape.intermediate_size if experts is None else experts.shared_width
        width = 0 if experts is None else experts.width
        assert in_a_row([each.heads for each in shares], heads_of(shape)[0]), shape.name
        assert not mlp or in_a_row([each.mlp for each in shares], mlp), shape.name
        assert not width or in_a_row([each.experts for each in shares], width), shape.name
        assert in_a_row([each.vocabulary for each in shares], shape.vocab_size), shape.name


@pytest.mark.parametrize("degree", DEGREES)
def test_every_query_head_finds_its_key_value_head(degree: int) -> None:
    """Attention on a rank counts on equal numbers of query heads for each key/value head."""
    for shape in divisible(degree):
        heads, kv_heads = heads_of(shape)
        for rank in range(degree):
            share = rank_share(shape, degree, rank)
            own = len(share.heads) // len(share.kv_heads)
            needed = [head // (heads // kv_heads) for head in share.heads]
            given = [share.kv_heads[head // own] for head in range(len(share.heads))]
            assert given == needed, (shape.name, rank)


@pytest.mark.parametrize("degree", DEGREES)
def test_columns_of_the_mlp_are_cut_between_groups(degree: int) -> None:
    for shape in divisible(degree):
        group = group_size(shape.intermediate_size)
        if shape.experts is not None or shape.intermediate_size // group < degree:
            continue
        for rank in range(degree):
            columns = rank_share(shape, degree, rank).mlp
            assert columns.start % group == columns.stop % group == 0, shape.name


@pytest.mark.parametrize(
    ("width", "degree", "parts"),
    [(768, 2, [384, 384]), (768, 4, [192] * 4), (2880, 2, [1472, 1408]), (512, 8, [64] * 8)],
)
def test_experts_are_cut_evenly_rather_than_between_their_groups(
    width: int, degree: int, parts: list[int]
) -> None:
    """Qwen3-30B-A3B, gpt-oss and Qwen3-Next: their largest part is what a rank must hold."""
    shape = replace(SMALL, heads=8, experts=Experts(4, 2, width))
    shares = [rank_share(shape, degree, rank).experts for rank in range(degree)]
    assert [len(share) for share in shares] == parts


@pytest.mark.parametrize(
    ("kv_heads", "degree", "heads", "kv"),
    [
        (6, 2, [3, 3], [3, 3]),
        (6, 4, [2, 2, 1, 1], [2, 2, 1, 1]),
        (3, 2, [4, 2], [2, 1]),
        (3, 4, [1, 1, 2, 2], [1, 1, 1, 1]),  # the first head is held twice
        (2, 4, [2, 1, 2, 1], [1, 1, 1, 1]),
        (1, 4, [2, 2, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_uneven_heads(kv_heads: int, degree: int, heads: list[int], kv: list[int]) -> None:
    shape = replace(SMALL, kv_heads=kv_heads)
    shares = [rank_share(shape, degree, rank) for rank in range(degree)]
    assert [len(each.heads) for each in shares] == heads
    assert [len(each.kv_heads) for each in shares] == kv


def test_the_first_ranks_have_the_larger_parts() -> None:
    assert [len(part) for part in spread(86, 4)] == [22, 22, 21, 21]
    llama_7b = replace(SMALL, intermediate_size=11008, heads=32, kv_heads=32)
    assert [len(rank_share(llama_7b, 4, rank).mlp) // 128 for rank in range(4)] == [22, 22, 21, 21]


@pytest.mark.parametrize("degree", DEGREES)
def test_ranks_together_have_the_model_and_copies_of_what_is_not_divided(degree: int) -> None:
    """Norms, routers and what stands beside them are on every rank, and the biases of what is
    summed.
    """
    for shape in divisible(degree):
        if heads_of(shape)[1] < degree:  # key/value heads are on several ranks
            continue
        parts = [shape_of_ranks(shape, degree, range(rank, rank + 1)) for rank in range(degree)]
        hidden, experts, mixer = shape.hidden_size, shape.experts, shape.delta
        whole = shape.layer_norms * shape.norm_parameters + shape.output_bias * hidden
        whole += shape.qk_norm * shape.head_dim * (1 if shape.reads_earlier_keys else 2)
        whole += 0 if mixer is None else mixer.value_dim
        whole += sum(linear.parameters for linear in shape.extra_linears)
        whole += shape.mlp_bias * hidden
        if experts is not None:
            whole += experts.count * (hidden + experts.has_biases * (1 + hidden))
            whole += experts.router_bias * experts.count + experts.shared_gate * hidden
            whole += experts.router_scales * (hidden + experts.count)
        total = sum(part.layer_parameters for part in parts)
        assert total == shape.layer_parameters + (degree - 1) * whole, shape.kind
        assert sum(part.kv_width for part in parts) == shape.kv_width
        assert sum(part.state_bytes(2) for part in parts) == shape.state_bytes(2)
        assert sum(part.head_parameters for part in parts) == shape.head_parameters


@pytest.mark.parametrize("degree", DEGREES)
def test_linears_of_a_rank_are_those_of_its_shape(degree: int) -> None:
    for shape, rank in product(divisible(degree), range(degree)):
        architecture = FAMILIES[shape.model_type].architecture
        names = architecture.of_kind(shape.kind)
        sized = shape_of_ranks(shape, degree, range(rank, rank + 1))
        cuts = layer_cuts(shape, rank_share(shape, degree, rank), architecture)
        experts = [f"{names.experts}.{part}" for part in ("gate_up_proj", "down_proj")]
        linears = [*names.attention, *names.mlp, *(experts if shape.experts else ())]
        wholes = *shape.layer_linears, *shape.expert_linears
        parts = *sized.layer_linears, *sized.expert_linears
        for name, whole, other in zip(linears, wholes, parts, strict=True):
            own = part_shape(whole, cuts[name]) if name in cuts else whole  # a latent's
            assert (own.in_features, own.out_features) == (other.in_features, other.out_features)
            assert own.group == other.group, (shape.name, name)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_mixer_is_divided_by_value_heads_and_their_key_heads(degree: int, fused: bool) -> None:
    """Rows are told apart by what transformers' own module makes of them."""
    config = Qwen3NextConfig(
        hidden_size=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    module = Qwen3NextGatedDeltaNet(config, 0)
    mixer = DeltaMixer(2, 4, 3, 5, 4, fused)
    shape = replace(SMALL, model_type="qwen3_next", delta=mixer, kind=LINEAR)
    shape = shape if fused else replace(shape, model_type="qwen3_5_text")
    rows = torch.arange(2 * 2 * 3 + 2 * 4 * 5)[None, None], torch.arange(2 * 4)[None, None]
    ordered = [each[0, 0] for each in module.fix_query_key_value_ordering(*rows)]
    for rank in range(degree):
        share = rank_share(shape, degree, rank)
        cuts = layer_cuts(shape, share, FAMILIES[shape.model_type].architecture)
        keys, values = ([*each] for each in (share.kv_heads, share.heads))
        expected = [
            *(each.view(2, 3)[keys] for each in ordered[:2]),
            *(each.view(4, 5)[values] for each in ordered[2:4]),
            *(each[values] for each in ordered[4:]),
        ]
        if fused:
            module.num_k_heads, module.num_v_heads = len(keys), len(values)
            own = (cuts[f"linear_attn.in_proj_{name}"].index for name in ("qkvz", "ba"))
            held = (each[..., index[0]] for each, index in zip(rows, own, strict=True))
            found = [each[0, 0] for each in module.fix_query_key_value_ordering(*held)]
            for one, other in zip(found, expected, strict=True):
                assert one.flatten().tolist() == other.flatten().tolist()
        channels = torch.cat(
            [
                torch.arange(12).view(2, 2, 3)[:, keys].flatten(),
                12 + torch.arange(20).view(4, 5)[values].flatten(),
            ]
        )
        assert torch.arange(32)[cuts["linear_attn.conv1d"].index].tolist() == channels.tolist()
        assert torch.arange(4)[cuts["linear_attn.A_log"].index].tolist() == values


DIVIDED = [
    name
    for name, each in FAMILIES.items()
    if each.architecture.experts is None and not each.architecture.kinds
]


@pytest.mark.parametrize("model_type", DIVIDED)
def test_the_last_linears_are_cut_along_their_columns(model_type: str) -> None:
    by_head = model_type in ("bloom", "gpt_neox")
    fused_mlp = model_type in ("glm", "glm4", "phi3")
    gated = model_type not in ("bloom", "gpt_neox", "opt")
    kv_heads = 6 if by_head else 3
    shape = replace(SMALL, kv_heads=kv_heads, gated_mlp=gated, fused_mlp=fused_mlp)
    shape = replace(shape, fused_qkv=by_head or model_type == "phi3")
    architecture = FAMILIES[model_type].architecture
    cuts = layer_cuts(shape, rank_share(shape, 2, 1), architecture)
    assert set(cuts) == {*architecture.attention, *architecture.mlp}
    by_columns = {name for name, cut in cuts.items() if cut.dimension == COLUMNS}
    assert by_columns == {architecture.attention[-1], architecture.mlp[-1]}
    wholes = dict(zip(cuts, shape.layer_linears, strict=False))
    sizes = dict.fromkeys(architecture.mlp, 80) | ({architecture.mlp[0]: 160} if fused_mlp else {})
    assert all(cuts[name].size == size for name, size in sizes.items())
    first = cuts[architecture.attention[0]]
    assert first.size == wholes[architecture.attention[0]].out_features
    assert first.begin == (3 * 3 * 8 if by_head else 4 * 8)


def test_norms_over_all_heads_are_divided_with_them() -> None:
    normed = replace(SMALL, qk_norm_width=SMALL.query_width + SMALL.kv_width)
    architecture = FAMILIES["olmo2"].architecture
    cuts = [layer_cuts(normed, rank_share(normed, 2, rank), architecture) for rank in range(2)]
    spans = [(each["self_attn.q_norm"].begin, each["self_attn.q_norm"].end) for each in cuts]
    assert spans == [(0, 24), (24, 48)]
    assert layer_sums(normed, architecture) == (1, 1, 48, 48)
    assert layer_sums(SMALL, architecture) == (48, 48)


def test_rows_of_the_vocabulary() -> None:
    parts = [vocabulary_cut(SMALL, rank_share(SMALL, 4, rank)) for rank in range(4)]
    assert [(part.begin, part.end) for part in parts] == [
        (0, 50),
        (50, 100),
        (100, 150),
        (150, 199),
    ]


def stored(desc_act: bool, group: int = 128) -> StoredConfig:
    return StoredConfig(4, group, desc_act, 1)


@pytest.mark.parametrize(
    ("shape", "degree", "words"),
    [
        (SMALL, 8, "6 attention heads.*8 ranks; choose at most 6"),
        (replace(SMALL, kv_heads=3), 5, "no error"),
        (replace(SMALL, heads=9, kv_heads=3, intermediate_size=81), 8, "no error"),
        (replace(SMALL, heads=8, intermediate_size=7), 8, "7 columns.*8 ranks.*fewer"),
        (replace(SMALL, heads=8, vocab_size=5), 8, "5 rows of vocabulary.*at most 5"),
        (replace(SMALL, stored=stored(True)), 2, "desc_act.*quantize it without"),
        (replace(SMALL, stored=stored(True)), 1, "no error"),
        (replace(SMALL, stored=stored(False, 16)), 4, "no error"),
        (replace(SMALL, stored=stored(False, 40)), 4, "no error"),
    ],
)
def test_what_cannot_be_divided_is_said(shape: ModelShape, degree: int, words: str) -> None:
    if words == "no error":
        assert all(len(rank_share(shape, degree, rank).mlp) for rank in range(degree))
        return
    with pytest.raises(SpecError, match=words):
        rank_share(shape, degree, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(SpecError, match=f"rank {rank} is none of a stage of 2 ranks; 0 to 1"):
        rank_share(SMALL, 2, rank)
