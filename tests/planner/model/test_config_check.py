"""Checks of `config.json`: no less strict than transformers, and right for models in use."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from actors.stage.model_config import config_of_values
from planner.model.config_check import ACTIVATIONS, ROPE_TYPES
from planner.model.family import FULL
from planner.model.finding import shape_from_config
from quant.common.errors import SpecError
from tests.actors.configs import EVERY_CONFIG

FAMILIES = {config.model_type: config for config in EVERY_CONFIG.values()}
WRONG: tuple[Any, ...] = ("x", -1, 0, 1.5, [], ["a"], {}, {"a": 1}, True, 10**6, 1e300, None)
_OF_TRAINING = {"num_labels", "problem_type", "label2id"}


def test_activations_are_those_of_transformers() -> None:
    assert {*ACT2CLS} - ACTIVATIONS == {"prelu", "xielu"}  # with weights of their own
    assert set(ACT2CLS) >= ACTIVATIONS


def test_rope_types_are_those_of_transformers() -> None:
    assert {*ROPE_INIT_FUNCTIONS} - {*ROPE_TYPES} == {"longrope", "proportional"}
    assert {*ROPE_TYPES} - {*ROPE_INIT_FUNCTIONS} == {"default"}


def values_of(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_refuses_is_refused(family: str) -> None:
    """Every field of its configuration, with values of every type."""
    config = FAMILIES[family]
    text = config.to_json_string()
    fields = {field.name for field in dataclasses.fields(config)}
    fields |= {"rope_theta", "rope_scaling", "torch_dtype"} | {*json.loads(text)}
    missed = []
    for field in sorted(fields - _OF_TRAINING):
        for wrong in WRONG:
            values = json.loads(text) | {field: wrong}
            try:
                shape_from_config("m", values)
            except SpecError:
                continue
            if not taken(values):
                missed.append((field, wrong))
    assert missed == []


def taken(values: dict[str, Any]) -> bool:
    try:
        config_of_values(values)
    except Exception:  # whatever it is, transformers does not take them
        return False
    return True


ROPE: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
        "original_max_position_embeddings": 64,
    },
    "yarn of older files": {"type": "yarn", "factor": 4.0, "attention_factor": 1.1},
    "yarn without mscale": {"rope_type": "yarn", "factor": 4, "mscale": 1.0, "mscale_all_dim": 0},
    "linear": {"rope_type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "both spellings": {"rope_type": "linear", "type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 1000),
        ({"rope_type": "default"}, 1000),
        ({"type": "linear", "factor": 4}, 4000),
        ({"type": "yarn", "factor": 4.0}, 4000),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 1000}, 2500),
        ({"type": "dynamic", "factor": 4.0}, 1000),  # beyond, the longest of a batch decides
        (ROPE["llama3"], 1000),
    ],
)
def test_the_longest_request_follows_from_the_factor(
    rope: dict[str, Any] | None, positions: int
) -> None:
    """vLLM's lengths, but for `dynamic`."""
    values = values_of(FAMILIES["qwen2"]) | {"max_position_embeddings": 1000}
    values.pop("rope_parameters")
    found = shape_from_config("m", values | {"rope_theta": 1e6, "rope_scaling": rope})
    assert found.max_positions == positions


YARN = {"rope_scaling": ROPE["yarn of older files"]}


@pytest.mark.parametrize("name", ROPE)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_in_both_places(name: str, key: str) -> None:
    values = values_of(FAMILIES["llama"]) | {"rope_parameters": None, "rope_theta": 500000.0}
    assert shape_from_config("m", values | {key: ROPE[name]}).layers


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, r"rope_scaling\.factor is 0"),
        ({"rope_scaling": ROPE["llama3"] | {"low_freq_factor": 4.0}}, "below high_freq_factor"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling\.type is \['yarn'\]"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope', which llmpq does not run"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention is an obj"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta is None"),
        ({"rope_parameters": {"rope_theta": 1e400}}, "rope_theta is inf"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": ROPE["yarn of older files"] | {"beta_fast": "x"}}, "beta_fast is 'x'"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"head_dim": 31}, "head size .* is 31"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* 5 .*of full_attention"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
    ],
)
def test_what_is_refused_names_the_entry(entries: dict[str, Any], message: str) -> None:
    values = values_of(FAMILIES["llama"]) | entries
    with pytest.raises(SpecError, match=message) as caught:
        shape_from_config("m", values, "/models/m/config.json")
    assert str(caught.value).startswith("/models/m/config.json: ")


SLIDES = {"use_sliding_window": True, "sliding_window": 9}
LONG: dict[str, Any] = {"type": "su", "short_factor": [1.0, 2], "long_factor": [3, 4.0]}


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; .* 5 numbers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 0, 1]}, "no_rope_layers is .* 5 numbers"),
        ("smollm3", {"layer_types": ["full_attention"] * 4 + ["x"]}, r"layer_types\[4\] is 'x'"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types is a list of 1; .* 5"),
        ("ministral", {"head_dim": None}, "head_dim is missing"),
        ("ministral3", {"rope_parameters": {"rope_theta": 9.0}}, "llama_4_scaling_beta is None"),
        ("olmo3", {"rope_parameters": {"rope_theta": 9.0}}, r"rope_parameters\.rope_theta is 9"),
        ("olmo3", {"rope_scaling": {"factor": 2.0}}, "rope_scaling is .* left out beside"),
        (
            "olmo3",
            {"rope_parameters": {FULL: {"type": "dynamic"}}},
            r"full_attention\.type is 'dyn",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number above 0"),
        ("granite", {"residual_multiplier": "x"}, "residual_multiplier is 'x'"),
        ("phi3", {"rope_parameters": LONG | {"long_factor": [1.0]}}, "long_factor is .* 2 numbers"),
        ("phi3", {"rope_parameters": LONG | {"factor": -1}}, r"rope_parameters\.factor is -1"),
        ("phi3", {"rope_parameters": {"type": "yarn"}}, "'yarn', which llmpq does not run"),
        ("phi3", {"original_max_position_embeddings": None}, "original_max_position_embeddings is"),
        ("glm4", {"head_dim": None}, "head_dim is None"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3; .* whole groups of two or more"),
        ("glm4_moe", {"n_group": 8}, "n_group is 8; .* whole groups of two or more"),
        ("glm4_moe", {"topk_group": 5}, r"topk_group is 5; .* at most 4 \(n_group\)"),
        ("glm4_moe", {"topk_group": 1}, "num_experts_per_tok is 3; .* at most 2"),
        ("glm4_moe", {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        ("glm", {"partial_rotary_factor": 0, "rope_parameters": None}, "partial_rotary_factor is"),
    ],
)
def test_entries_of_a_family_are_checked(
    family: str, entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        shape_from_config("m", values_of(FAMILIES[family]) | entries)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("qwen2-sliding", {}),
        ("qwen3", SLIDES | {"max_window_layers": 3}),
        ("olmo3", {}),
        ("ministral", {}),
        ("smollm3", SLIDES | {"no_rope_layers": [1, 0] * 4}),
        ("smollm3", SLIDES | {"no_rope_layers": None}),
    ],
)
def test_windows_of_layers_are_those_of_transformers(name: str, entries: dict[str, Any]) -> None:
    values = {k: v for k, v in values_of(EVERY_CONFIG[name]).items() if k != "layer_types"}
    values |= {"num_hidden_layers": 8} | entries
    with torch.device("meta"):
        config = AutoConfig.for_model(**copy.deepcopy(values))
        model = AutoModelForCausalLM.from_config(config)
    expected = [layer.self_attn.sliding_window for layer in model.model.layers]
    shape = shape_from_config("m", values)
    assert [shape.layer(index).sliding_window for index in range(8)] == expected
    assert len(shape.kind_shapes) == len({*expected})


def test_longrope_is_taken_of_the_family_that_has_it() -> None:
    values = values_of(FAMILIES["phi3"]) | {"rope_parameters": LONG, "partial_rotary_factor": 0.5}
    assert shape_from_config("m", values).max_positions == 128


def test_a_part_of_a_neox_head_turns() -> None:
    values = values_of(FAMILIES["gpt_neox"])
    del values["rope_parameters"]
    for share in (0.25, 1.0, 0.9):
        assert shape_from_config("m", values | {"rotary_pct": share}).head_dim == 8
    for share in (0, 1.1, "x"):
        with pytest.raises(SpecError, match="rotary_pct is"):
            shape_from_config("m", values | {"rotary_pct": share})
    with pytest.raises(SpecError, match="rotary_emb_base is 0"):
        shape_from_config("m", values | {"rotary_emb_base": 0})


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "llama", "pad_token_id": -1, "bos_token_id": -1, "torch_dtype": "bfloat16"},
        {"model_type": "llama", "torch_dtype": "torch.bfloat16", "dtype": "torch.half"},
        {"model_type": "llama", "eos_token_id": [1, 2, 3], "pretraining_tp": 1},
        {"model_type": "mistral", "sliding_window": None, "attention_dropout": 0.0},
        {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3, "use_mrope": False},
        {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25},
        {"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}, "unknown": [[1]]},
    ],
)  # fmt: skip
def test_configurations_in_use_are_taken(entries: dict[str, Any]) -> None:
    values = values_of(FAMILIES[entries["model_type"]])
    values.pop("rope_parameters")
    assert shape_from_config("m", values | {"rope_theta": 10000} | entries).layers == 5
