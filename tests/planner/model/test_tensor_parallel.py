"""Dividing models among ranks: every part is held, groups stay whole, the impossible is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from planner.model.families import FAMILIES
from planner.model.finding import builtin_names, model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import (
    layer_cuts,
    possible_degrees,
    rank_share,
    refusal,
    spread,
    vocabulary_cut,
)
from quant.checkpoint.gptq_config import GptqConfig
from quant.common.errors import SpecError
from quant.scheme import COLUMNS, group_size, part_shape

DEGREES = (1, 2, 4, 8)
BUILT_IN = [model_shape(name) for name in builtin_names()]
MODELS = [shape for shape in BUILT_IN if refusal(shape, 2) is None]
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
    return [shape for shape in MODELS if shape.heads >= degree]


def indices(parts: list[range]) -> list[int]:
    return [index for part in parts for index in part]


@pytest.mark.parametrize("degree", DEGREES)
def test_every_head_column_and_row_is_on_one_rank(degree: int) -> None:
    for shape in divisible(degree):
        shares = [rank_share(shape, degree, rank) for rank in range(degree)]
        assert indices([each.heads for each in shares]) == list(range(shape.heads)), shape.name
        assert indices([each.mlp for each in shares]) == list(range(shape.intermediate_size))
        assert indices([each.vocabulary for each in shares]) == list(range(shape.vocab_size))


@pytest.mark.parametrize("degree", DEGREES)
def test_every_query_head_finds_its_key_value_head(degree: int) -> None:
    """Attention on a rank counts on equal numbers of query heads for each key/value head."""
    for shape in divisible(degree):
        per_kv_head = shape.heads // shape.kv_heads
        for rank in range(degree):
            share = rank_share(shape, degree, rank)
            own = len(share.heads) // len(share.kv_heads)
            needed = [head // per_kv_head for head in share.heads]
            given = [share.kv_heads[head // own] for head in range(len(share.heads))]
            assert given == needed, (shape.name, rank)


@pytest.mark.parametrize("degree", DEGREES)
def test_columns_of_the_mlp_are_cut_between_groups(degree: int) -> None:
    for shape in divisible(degree):
        group = group_size(shape.intermediate_size)
        if shape.intermediate_size // group < degree:
            continue
        for rank in range(degree):
            columns = rank_share(shape, degree, rank).mlp
            assert columns.start % group == columns.stop % group == 0, shape.name


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


def rank_shape(shape: ModelShape, degree: int, rank: int) -> ModelShape:
    """The shape of what a rank holds, to be sized as a model of its own."""
    share = rank_share(shape, degree, rank)
    return replace(
        shape,
        heads=len(share.heads),
        kv_heads=len(share.kv_heads),
        intermediate_size=len(share.mlp),
        vocab_size=len(share.vocabulary),
    )


def test_models_whose_layers_have_other_parts_are_not_divided() -> None:
    refused = {shape.model_type for shape in BUILT_IN if refusal(shape, 2) is not None}
    experts, states = {"gpt_oss", "qwen3_moe"}, {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
    # OLMo norms all heads as one, and Gemma 4's heads differ from layer to layer.
    assert refused == experts | states | {"olmo2", "olmo3", "gemma4_text"}


def test_ranks_together_have_the_weights_of_the_model() -> None:
    for shape, degree in product(MODELS, DEGREES):
        if shape.kv_heads < degree:  # these are on several ranks
            continue
        parts = [rank_shape(shape, degree, rank) for rank in range(degree)]
        total = sum(part.layer_linear_parameters for part in parts)
        assert total == shape.layer_linear_parameters, shape.name
        assert sum(part.kv_width for part in parts) == shape.kv_width
        assert sum(part.head_parameters for part in parts) == shape.head_parameters


def test_linears_of_a_rank_are_those_of_its_shape() -> None:
    for shape, degree in product(MODELS, DEGREES):
        if shape.heads < degree:
            continue
        architecture = FAMILIES[shape.model_type].architecture
        for rank in range(degree):
            share = rank_share(shape, degree, rank)
            sized = rank_shape(shape, degree, rank).layer_linears
            cuts = layer_cuts(shape, share, architecture)
            names = (*architecture.attention, *architecture.mlp)
            for name, whole, other in zip(names, shape.layer_linears, sized, strict=True):
                own = part_shape(whole, cuts[name])
                assert (own.in_features, own.out_features) == (
                    other.in_features,
                    other.out_features,
                )
                assert other.group % own.group == 0


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


def test_norms_over_all_heads_are_not_divided() -> None:
    normed = replace(SMALL, qk_norm_width=SMALL.query_width + SMALL.kv_width)
    assert possible_degrees(normed) == (1,)
    assert "give each stage one device" in str(refusal(normed, 2))


def test_rows_of_the_vocabulary() -> None:
    parts = [vocabulary_cut(SMALL, rank_share(SMALL, 4, rank)) for rank in range(4)]
    assert [(part.begin, part.end) for part in parts] == [
        (0, 50),
        (50, 100),
        (100, 150),
        (150, 199),
    ]


def stored(desc_act: bool, group: int = 128) -> GptqConfig:
    return GptqConfig(4, group, desc_act, 1, False)


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
