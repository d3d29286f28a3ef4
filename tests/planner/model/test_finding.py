"""Shapes against the parameters that transformers builds, on the meta device."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from planner.model.finding import builtin_names, model_shape, names_of_builtin
from quant.common.errors import SpecError
from tests.planner.model.mixed_configs import library_model

TINY: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 50,
    },
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_bias": False,
    },
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "mistral": {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": 16},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
}
GATED = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
BUILTIN = (
    "opt-125m",
    "opt-350m",
    "opt-30b",
    "bloom-560m",
    "bloom-176b",
    "llama-2-7b",
    "llama-3-8b",
    "qwen2.5-7b",
    "qwen3-8b",
    "mistral-7b",
    "pythia-160m",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "gpt-oss-20b",
    "gemma-4-e2b",
    "gemma-4-31b",
    "gemma-4-26b-a4b",
)


def tiny_config(model_type: str) -> dict[str, Any]:
    config = {"model_type": model_type, "vocab_size": 100, **TINY[model_type]}
    if model_type in ("llama", "mistral", "qwen2", "qwen3"):
        config = {**GATED, "num_attention_heads": 4, **config}
    return config


def save(config: dict[str, Any], folder: Path) -> Path:
    values = {key: value for key, value in config.items() if key not in ("model_type", "names")}
    AutoConfig.for_model(config["model_type"], **values).save_pretrained(folder)
    return folder


def layer_of(model: Any) -> Any:
    base = model.base_model
    layers = getattr(base, "layers", None)
    return (base.h if hasattr(base, "h") else base.decoder.layers if layers is None else layers)[0]


@pytest.mark.parametrize("model_type", TINY)
def test_saved_config_gives_the_librarys_parameters(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    model = library_model(config)
    shape = model_shape(save(config, tmp_path))
    assert shape.total_parameters == model.num_parameters()
    layer = layer_of(model)
    linears = [
        (module.in_features, module.out_features)
        for module in layer.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    assert sorted(linears) == sorted(
        (linear.in_features, linear.out_features) for linear in shape.layer_linears
    )
    assert shape.layer_parameters == sum(weight.numel() for weight in layer.parameters())
    assert (shape.tied_embeddings, shape.layers) == (model.config.tie_word_embeddings, 3)


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_shape_gives_the_librarys_parameters(name: str, builtin: dict[str, Any]) -> None:
    model = library_model(builtin[name])
    shape = model_shape(name)
    assert shape.total_parameters == model.num_parameters()
    embedding = model.get_input_embeddings().weight.numel()
    assert shape.embedding_parameters >= embedding
    assert shape.final_parameters >= model.get_output_embeddings().weight.numel()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-175b", 175),
        ("llama-3.1-405b", 405.9),
        ("qwen2.5-72b", 72.7),
        ("qwen3-32b", 32.8),
        ("mistral-small-24b", 23.6),
        ("mistral-nemo-12b", 12.2),
        ("gpt-neox-20b", 20.6),
        ("llama-65b", 65.3),
        ("smollm2-135m", 0.1345),
        ("tinyllama-1.1b", 1.1),
        ("llama-3.2-1b", 1.236),
        ("smollm3-3b", 3.08),
        ("granite-3.3-2b", 2.53),
        ("granite-3.3-8b", 8.17),
        ("olmo-2-1b", 1.48),
        ("olmo-3-7b", 7.3),
        ("olmo-3-32b", 32.2),
        ("phi-3-mini", 3.82),
        ("phi-4-mini", 3.84),
        ("phi-4", 14.7),
        ("glm-4-9b", 9.4),
        ("glm-4-32b", 32.6),
        ("mistral-small-3.2-24b", 23.6),
        ("ministral-3-3b", 3.4),
        ("ministral-3-14b", 13.5),
        ("gemma-2-9b", 9.24),
        ("gemma-2-27b", 27.2),
        ("gemma-3-1b", 1.0),
        ("gemma-3-4b", 3.88),
        ("gemma-3-27b", 27.0),
        ("gemma-4-e2b", 4.63),  # without what sees and hears: 5.1 with it
        ("gemma-4-e4b", 7.46),
        ("gemma-4-12b", 11.9),
        ("gemma-4-31b", 30.7),
        ("granite-3.1-3b-a800m", 3.3),
        ("gemma-4-26b-a4b", 25.2),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    assert model_shape(name).total_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-coder-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("qwen3-coder-480b-a35b", 480, 35),
        ("qwen3-next-80b-a3b", 80, 3.9),
        ("qwen3.5-27b", 27, 27),
        ("qwen3.5-9b", 9, 9),
        ("qwen3.6-35b-a3b", 35, 3.4),
        ("qwen3.5-122b-a10b", 122, 9.8),
        ("qwen3.5-397b-a17b", 397, 17.3),
        # The makers leave the 0.58 billion weights of the embedding out of what is active.
        ("gpt-oss-20b", 20.9, 3.6 + 0.58),
        ("gpt-oss-120b", 116.8, 5.1 + 0.58),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7),
        ("qwen2-57b-a14b", 57.4, 14.2),
        ("olmoe-1b-7b", 6.9, 1.3),
        # Those of GLM-4.5 leave embedding and head out.
        ("glm-4.5-air", 106, 12 + 1.24),
        ("glm-4.5", 355, 32 + 1.55),
    ],
)
def test_published_sizes_with_experts(name: str, billions: float, active: float) -> None:
    shape = model_shape(name)
    assert shape.total_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_every_built_in_loads_under_all_its_names(builtin: dict[str, Any]) -> None:
    assert len(builtin_names()) > 45
    for name, entry in builtin.items():
        prints = {model_shape(alias).fingerprint() for alias in (*entry["names"], name.upper())}
        assert len(prints) == 1


@pytest.fixture(scope="module")
def builtin() -> dict[str, Any]:
    text = files("planner.model").joinpath("builtin_shapes.toml").read_text(encoding="utf-8")
    return {
        name: entry
        for entry in tomllib.loads(text)["model"]
        for name in entry["names"]
        if "/" not in name
    }


def test_fingerprint_of_built_in_equals_its_checkpoint(
    tmp_path: Path, builtin: dict[str, Any]
) -> None:
    plain = ("opt-350m", "bloom-560m", "qwen2.5-7b", "mistral-7b", "llama-3.2-1b", "phi-4-mini")
    unlike = ("qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-27b", "gpt-oss-20b", "gemma-4-e2b")
    for name in (*plain, *unlike, "olmo-3-7b", "gemma-3-4b"):
        folder = save(builtin[name], tmp_path / name)
        assert model_shape(folder).fingerprint() == model_shape(name).fingerprint()
    other = replace(model_shape("opt-125m"), layers=13)
    assert other.fingerprint() != model_shape("opt-125m").fingerprint()


def test_special_parts() -> None:
    small = model_shape("facebook/OPT-350m")
    assert (small.word_embedding_size, small.final_norm, small.position_rows) == (512, False, 2050)
    assert model_shape("bigscience/bloom").embedding_norm
    assert model_shape("mistralai/Mistral-7B-v0.1").sliding_window == 4096
    assert model_shape("meta-llama/Llama-3.1-8B").kv_width == 1024


def test_config_file_itself_is_accepted(tmp_path: Path) -> None:
    save(tiny_config("opt"), tmp_path)
    assert model_shape(tmp_path / "config.json") == model_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "minimax", "num_local_experts": 8}, "mixture-of-experts"),
        ({"model_type": "qwen3_moe"}, "hidden_size is missing"),
        ({"model_type": "llama", "num_experts": 4}, "mixture-of-experts"),
        ({"model_type": "mamba"}, "supported: bloom, .*llama"),
        ({"hidden_size": 4}, "names no model_type"),
        ({"model_type": "opt", "hidden_size": 64}, "num_attention_heads is missing"),
        ({"model_type": "opt", "hidden_size": "64"}, "hidden_size is '64'"),
        ({**tiny_config("llama"), "num_key_value_heads": 3}, "cannot share"),
        ({**tiny_config("bloom"), "n_head": 5}, "cannot be split over 5 heads"),
        ({**tiny_config("llama"), "num_hidden_layers": 0}, "layers is 0"),
        ({**tiny_config("llama"), "mlp_bias": "yes"}, "mlp_bias is 'yes'"),
    ],
)
def test_refused_configs(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {"max_position_embeddings": 64, **values}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match=message):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("qwen2.5-14b-instruct", "qwen2.5-14b"),
        ("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("llama-3-8b-instruct", "llama-3-8b"),
        ("meta-llama-3-8b-instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama-2-7b-chat", "llama-2-7b"),
        ("mistral-7b-instruct-v0.2", "mistral-7b-v0.2"),
        ("opt-30b", "facebook/opt-30b"),
    ],
)
def test_tuned_models_and_hub_names_have_the_shape_that_they_are_listed_with(
    name: str, same: str
) -> None:
    shape = model_shape(name)
    assert shape.name == name
    assert replace(shape, name="") == replace(model_shape(same), name="")
    assert name.lower() in {each.lower() for each in names_of_builtin(same)}


def test_no_two_shapes_share_a_name() -> None:
    names = [each.lower() for short in builtin_names() for each in names_of_builtin(short)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("opt-30", r"opt-30b, opt-\d+m, opt"),
        ("opt-30b-instruct", "opt-30b, "),
        ("qwen2.5-14", "qwen2.5-14b, qwen2.5-1.5b"),
        ("llama3-8", "llama-3-8b, "),
    ],
)
def test_several_near_names_are_given_for_one_that_is_not_known(name: str, near: str) -> None:
    """No other shape is taken, though one be near."""
    message = f"unknown model '{name}'; nearest built-in: {near}.*`llmpq models` lists all"
    with pytest.raises(SpecError, match=message):
        model_shape(name)


def test_a_model_of_another_owner_is_not_taken_for_the_builtin_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=r"shape of that name, give qwen2\.5-14b-instruct"):
        model_shape("nobody/Qwen2.5-14B-Instruct")


def test_refused_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"holds no config\.json"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match="no JSON object"):
        model_shape(tmp_path)
    with pytest.raises(SpecError, match=r"unknown model 'opt-30'; nearest built-in: opt-30b"):
        model_shape("opt-30")
    with pytest.raises(SpecError, match="no such folder"):
        model_shape(tmp_path / "none")
    for name in ("x" * 300, f"{tmp_path}/{'x' * 300}", "~nobody-of-this-name/x"):
        with pytest.raises(SpecError, match=r"give a name, a folder or a hub id"):
            model_shape(name)
    for text in ("[" * 100_000, "1" * 5000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpecError, match="cannot be read as JSON"):
            model_shape(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = r"nobody/opt-30x.* HF_HUB_OFFLINE forbids .* nearest built-in: opt-30b"
    with pytest.raises(SpecError, match=told):
        model_shape("nobody/opt-30x")
