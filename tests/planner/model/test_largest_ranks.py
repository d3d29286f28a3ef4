"""What the largest rank holds, by which memory and times are planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import (
    largest_rank_shape,
    possible_degrees,
    rank_share,
    refusal,
)
from quant.checkpoint.stored_config import StoredConfig
from quant.common.errors import SpecError

LLAMA = model_shape("llama-2-70b")  # 64 heads that read 8 key/value heads


def small(**changes: object) -> ModelShape:
    """A model of 12 heads that read 3 key/value heads of 16 channels."""
    sizes = {"heads": 12, "kv_heads": 3, "head_dim": 16, "hidden_size": 192}
    return replace(LLAMA, **{**sizes, "intermediate_size": 512, "vocab_size": 101, **changes})


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_parts_are_whole_and_beside_each_other(degree: int) -> None:
    shares = [rank_share(LLAMA, degree, rank) for rank in range(degree)]
    for name, whole in (("heads", 64), ("kv_heads", 8), ("mlp", 28672), ("vocabulary", 32000)):
        parts = [getattr(share, name) for share in shares]
        assert [parts[0].start, parts[-1].stop] == [0, whole]
        assert all(one.stop == other.start for one, other in pairwise(parts))
    assert largest_rank_shape(LLAMA, degree).cut_groups == (32, 32)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_layer_is_divided(degree: int) -> None:
    """All that is divided of a layer without biases are its linears."""
    part = largest_rank_shape(LLAMA, degree)
    assert part.layer_linear_parameters * degree == LLAMA.layer_linear_parameters
    assert part.kv_width * degree == LLAMA.kv_width
    assert part.layer_other_parameters == LLAMA.layer_other_parameters


def test_key_value_heads_are_shared_where_ranks_are_more() -> None:
    few = small(kv_heads=2, heads=12)
    shares = [rank_share(few, 4, rank) for rank in range(4)]
    assert [list(share.kv_heads) for share in shares] == [[0], [0], [1], [1]]
    assert [len(share.heads) for share in shares] == [3, 3, 3, 3]
    for share in shares:  # every head with the key/value head that it reads
        assert {head // 6 for head in share.heads} == set(share.kv_heads)


def test_first_ranks_hold_more() -> None:
    uneven = small()
    shares = [rank_share(uneven, 2, rank) for rank in range(2)]
    assert [len(share.kv_heads) for share in shares] == [2, 1]
    assert [len(share.heads) for share in shares] == [8, 4]
    assert [len(share.vocabulary) for share in shares] == [51, 50]
    assert largest_rank_shape(uneven, 2).kv_heads == 2


def test_groups_become_finer_where_a_cut_falls_inside() -> None:
    uneven = small()  # 192 columns in groups of 32, cut after 128
    assert largest_rank_shape(uneven, 2).cut_groups == (32, 32)
    # cut after 48, 96, 144
    assert largest_rank_shape(small(kv_heads=12), 4).cut_groups == (16, 32)


def test_what_cannot_be_divided_is_refused() -> None:
    three = small(heads=3, kv_heads=3)
    assert possible_degrees(three) == (1, 2)
    assert "4 ranks" in str(refusal(three, 4))
    with pytest.raises(SpecError, match="cannot be divided among 4 ranks"):
        rank_share(three, 4, 0)
    stored = StoredConfig(4, 128, desc_act=True, zero_offset=1)
    assert "desc_act" in str(refusal(replace(LLAMA, stored=stored), 2))
    assert refusal(LLAMA, 8) is None
