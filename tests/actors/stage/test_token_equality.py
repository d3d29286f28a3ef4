"""Stages against `transformers` generate: every architecture, token for token in float32."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from actors.stage.model_config import check_frequencies_agree
from planner.model.finding import model_shape
from quant.common.errors import SpecError
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, SHARED_CONFIGS, STATE_CONFIGS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

ALL = EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS
LENGTHS = (5, 11, 1, 8, 17, 2, 11)
NEW_TOKENS = 11
FEW_TOKENS = 8
"""New tokens of every family: windows of up to nine tokens end within them too."""
SPLITS = (0, LAYERS), (0, 1, LAYERS), (0, 2, 3, LAYERS)
MADE_OF = ("granitemoe", "granitemoehybrid")
"""Families all of whose parts `granite` and `granitemoeshared` have."""
MIXED = ("bloom", "mistral-sliding", "qwen3_5", "gemma4-shared", "gpt_oss", "deepseek_v3")
"""Families whose tokens `test_mixed_batches.py` compares, of two stages too."""

LAYOUTS = tuple(product(SPLITS, (False, True)))
"""Bounds of stages, and whether the LM head is on the first one."""

TWO_STAGES = (((0, 2, LAYERS), True),)
"""For every family; of three stages, `test_tensor_parallel.py` has many."""


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *((name, TWO_STAGES) for name in ALL if name not in ("llama", *MADE_OF, *MIXED)),
        ("llama", LAYOUTS),
        *(pytest.param(name, LAYOUTS, marks=pytest.mark.rare) for name in ALL),
    ],
)
def test_greedy_tokens_equal_generate(
    name: str, layouts: tuple[tuple[tuple[int, ...], bool], ...], tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, ALL[name], shard="60KB")
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, FEW_TOKENS)
    for bounds, head_on_first in layouts:
        stages = stages_of(
            tmp_path, bounds, len(prompts), max(LENGTHS) + FEW_TOKENS, head_on_first=head_on_first
        )
        tokens = generate(stages, prompts, FEW_TOKENS, prefill=3, decode=4)
        assert tokens == expected, (bounds, head_on_first)


@pytest.mark.parametrize(("kind", "trained"), [("yarn", 16), ("yarn", None), ("linear", None)])
def test_positions_beyond_those_of_training_equal_generate(
    kind: str, trained: int | None, tmp_path: Path
) -> None:
    """The factor of rotary positions counts for the longest request, as in vLLM."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    rope |= {} if trained is None else {"original_max_position_embeddings": trained}
    values = CONFIGS["llama"].to_dict()
    values |= {"max_position_embeddings": trained or 10, "rope_parameters": rope}
    model = save_tiny(tmp_path, type(CONFIGS["llama"]).from_dict(values))
    most = model_shape(tmp_path).max_positions
    assert most == 4 * (trained or 10)
    prompts = random_prompts((most - NEW_TOKENS, 3))
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), most)
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=2) == expected


@pytest.mark.parametrize("lengths", [(5, 9), (17, 25)])
def test_frequencies_of_longrope_are_those_of_the_longest_request(
    lengths: tuple[int, int], tmp_path: Path
) -> None:
    """Up to the length of training, and beyond; requests of one plan have the same ones."""
    trained, new_tokens = 16, 7
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [3.0, 9.0]}
    values = EVERY_CONFIG["phi3"].to_dict() | {"original_max_position_embeddings": trained}
    values |= {"rope_parameters": rope | {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    model = save_tiny(tmp_path, type(EVERY_CONFIG["phi3"]).from_dict(values))
    assert model_shape(tmp_path).max_positions == 128
    prompts = random_prompts(lengths)
    expected = references(model, prompts, new_tokens)
    longest = max(lengths) + new_tokens
    stages = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), longest)
    assert generate(stages, prompts, new_tokens, prefill=2, decode=2) == expected
    check_frequencies_agree(tmp_path, (max(lengths) + 1, longest))
    with pytest.raises(SpecError, match=r"of more than 16 tokens.*--schedule rra"):
        check_frequencies_agree(tmp_path, (trained, trained + 1))
    stream = LayerStream(tmp_path, compute_on(torch.device("cpu"), torch.float32))
    token_ids = torch.tensor([prompts[1]])
    *_, last = stream_layers(stream, token_ids)
    tail = stream.tail()
    found = tail.logits(tail.normed(last.hidden))
    with torch.inference_mode():
        torch.testing.assert_close(found, model(token_ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bloom", "opt", "mistral-sliding"])
def test_equal_length_batches_take_the_dense_path_to_the_same_tokens(
    name: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, CONFIGS[name])
    prompts = random_prompts((9,) * 6)
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(tmp_path, (0, 3, LAYERS), len(prompts), 9 + NEW_TOKENS)
    assert generate(stages, prompts, NEW_TOKENS, prefill=3, decode=6) == expected


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 7), (4, 5), (7, 7)])
def test_micro_batch_sizes_do_not_change_tokens(prefill: int, decode: int, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    prompts = random_prompts(LENGTHS)
    counts = [3, NEW_TOKENS, 1, 9, NEW_TOKENS, 6, 2]
    expected = references(model, prompts, counts)
    stages = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS)
    assert generate(stages, prompts, counts, prefill, decode) == expected


def test_slots_are_reused_by_the_next_global_batch(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["llama"])
    stages = stages_of(tmp_path, (0, 2, LAYERS), 3, 30)
    for seed, lengths in enumerate([(16, 12, 9), (2, 5, 3)]):
        prompts = random_prompts(lengths, seed)
        expected = references(model, prompts, 10)
        assert generate(stages, prompts, 10, prefill=2, decode=2) == expected


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("llama", (0, LAYERS)),
        *((name, (0, 2, LAYERS)) for name in ("llama", "bloom", "mistral-sliding")),
        *(
            pytest.param(n, (0, LAYERS), marks=pytest.mark.rare)
            for n in ("bloom", "mistral-sliding")
        ),
    ],
)
def test_newcomers_join_running_groups_without_changing_tokens(
    name: str, bounds: tuple[int, ...], tmp_path: Path
) -> None:
    """A queue five times as long as the slots, with ends at all times."""
    model = save_tiny(tmp_path, CONFIGS[name])
    prompts = random_prompts(LENGTHS * 3)
    counts = [1 + 5 * i % NEW_TOKENS for i in range(len(prompts))]
    expected = references(model, prompts, counts)
    stages = stages_of(tmp_path, bounds, 4, max(LENGTHS) + NEW_TOKENS)
    assert generate(stages, prompts, counts, prefill=2, decode=2) == expected
