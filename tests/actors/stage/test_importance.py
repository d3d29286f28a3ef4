"""Importance that stages measure, against hooks on a float64 forward of transformers."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from actors.importance import (
    measure_stage,
    random_token_ids,
    sample_token_ids,
)
from actors.sample_text import MOST_SEQUENCES, PASSAGES, SEQUENCE_TOKENS, sample_sequences
from actors.stage.spec import StageSpec
from planner.model.finding import model_shape
from quant.common.errors import CheckpointError
from quant.rounding.importance import HEAD, LayerImportance
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, LAYERS, SHARED_CONFIGS, VOCABULARY
from tests.actors.models import save_tiny

FAMILIES = ("llama", "qwen3", "mistral-sliding", "opt-post-norm", "bloom", "gpt_neox")
CPU = torch.device("cpu")


def spec(index: int, stages: int, layers: range) -> StageSpec:
    bits = (4,) * len(layers)
    return StageSpec(index, stages, layers, bits, "float32", slots=1, max_tokens=8, kv_tokens=8)


def measured(folder: Path, bounds: tuple[int, ...]) -> list[LayerImportance]:
    """What the stages of layers `bounds[j]` to `bounds[j + 1]` measure, one after another."""
    hidden: Tensor | None = None
    found: list[LayerImportance] = []
    for index, (first, stop) in enumerate(pairwise(bounds)):
        own = spec(index, len(bounds) - 1, range(first, stop))
        hidden, layers = measure_stage(own, folder, CPU, Processor(), hidden)
        found += layers
    return found


def inputs_in_float64(model: Any, token_ids: Tensor) -> tuple[dict[str, Tensor], Any]:
    """What each linear of transformers' own model multiplies, by full name, and the cache."""
    seen: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        seen[name] = inputs.flatten(0, -2)

    for name, module in model.double().named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: note(name, x[0]))
    with torch.no_grad():
        cache = model(input_ids=token_ids, use_cache=True).past_key_values
    return seen, cache


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_transformers_own_forward(family: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS[family])
    token_ids = random_token_ids(model.config, MOST_SEQUENCES, SEQUENCE_TOKENS)
    seen, cache = inputs_in_float64(model, token_ids)
    for index, layer in enumerate(measured(tmp_path, (0, LAYERS))):
        stack = {name: x for name, x in seen.items() if f".{index}." in name}
        if index == LAYERS - 1:
            stack[f".{index}.{HEAD}"] = seen["lm_head"]
        assert len(layer.inputs) == len(stack)
        for name, own in layer.inputs.items():
            (x,) = (x for full, x in stack.items() if full.endswith(f".{index}.{name}"))
            torch.testing.assert_close(own.mean_square, x.square().mean(0).float())
            torch.testing.assert_close(own.largest, x.abs().amax(0).float())
        keys = cache.layers[index].keys.abs().amax(0)  # [kv_heads, tokens, head_dim]
        if "sliding" not in family:  # such a cache forgets the first tokens
            torch.testing.assert_close(layer.keys, keys.amax(1).float())
        assert layer.keys.shape == (keys.shape[0], keys.shape[2])


def test_linears_of_one_input_share_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    inputs = measured(tmp_path, (0, LAYERS))[1].inputs
    assert inputs["self_attn.q_proj"] is inputs["self_attn.k_proj"] is inputs["self_attn.v_proj"]
    assert inputs["mlp.gate_proj"] is inputs["mlp.up_proj"]
    assert len({id(own) for own in inputs.values()}) == 4


@pytest.mark.parametrize(
    ("family", "bounds"), [("opt", (0, 1, 4, LAYERS)), ("gemma4-shared", (0, 2, LAYERS))]
)
def test_a_chain_of_stages_measures_what_one_does(
    family: str, bounds: tuple[int, ...], tmp_path: Path
) -> None:
    save_tiny(tmp_path, (CONFIGS | SHARED_CONFIGS)[family])
    whole, parts = measured(tmp_path, (0, LAYERS)), measured(tmp_path, bounds)
    assert len(whole) == len(parts) == LAYERS
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.keys, other.keys)
        for name, own in one.inputs.items():
            assert torch.equal(own.mean_square, other.inputs[name].mean_square)
            assert torch.equal(own.largest, other.inputs[name].largest)


def test_random_ids_are_no_special_ones_and_always_the_same() -> None:
    config = CONFIGS["llama"]
    token_ids = random_token_ids(config, 4, 64)
    assert token_ids.shape == (4, 64)
    assert not set(token_ids.flatten().tolist()) & {0, 1, 2}
    assert torch.equal(token_ids, random_token_ids(config, 4, 64))
    assert int(token_ids.median()) < VOCABULARY // 4, "low ids are the frequent ones"
    assert int(token_ids.max()) > VOCABULARY // 2
    assert random_token_ids(config, 1, 500).shape == (1, 128), "it has no more positions"


@pytest.fixture
def with_words(tmp_path: Path) -> tuple[Path, Any, list[int]]:
    """A folder with a tokenizer of all words of the sample text, its config, and the text's ids."""
    config = deepcopy(CONFIGS["llama"])
    save_tiny(tmp_path, config)
    split = pre_tokenizers.Whitespace()
    words = [word for word, _ in split.pre_tokenize_str(" ".join(PASSAGES))]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = split
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path, config, [vocabulary[word] for word in words]


def test_the_text_that_is_seen_is_that_of_the_models_tokenizer(
    with_words: tuple[Path, Any, list[int]],
) -> None:
    folder, config, token_ids = with_words
    config.vocab_size = max(token_ids) + 1
    seen = sample_token_ids(folder, config, MOST_SEQUENCES)
    assert seen.flatten().tolist() == token_ids[: MOST_SEQUENCES * SEQUENCE_TOKENS]
    assert torch.equal(sample_token_ids(folder, config, 1), seen[:1])


def test_random_ids_are_seen_where_the_tokenizer_is_not_the_models(
    with_words: tuple[Path, Any, list[int]],
) -> None:
    folder, config, token_ids = with_words
    config.vocab_size = max(token_ids[: 2 * SEQUENCE_TOKENS])
    expected = random_token_ids(config, 2, SEQUENCE_TOKENS)
    assert torch.equal(sample_token_ids(folder, config, 2), expected), "ids beyond the vocabulary"
    for content in ("{}", None):
        file = folder / "tokenizer.json"
        file.unlink() if content is None else file.write_text(content)
        assert torch.equal(sample_token_ids(folder, config, 2), expected)


def test_fewer_sequences_pass_through_a_large_model() -> None:
    tiny = model_shape("opt-125m")
    assert sample_sequences(tiny) == MOST_SEQUENCES
    assert sample_sequences(model_shape("opt-30b")) == 1


def test_values_beyond_the_type_are_told_with_their_layer(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    model = save_tiny(tmp_path, config)
    with torch.no_grad():
        model.model.layers[3].input_layernorm.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layer 3: .*finite"):
        measured(tmp_path, (0, LAYERS))
