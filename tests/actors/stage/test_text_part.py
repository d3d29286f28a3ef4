"""The text part of models that take images too, against `generate` of the whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from actors.stage.layer_stream import compute_on
from actors.stage.model_config import end_tokens, read_config
from llmpq.model_check import checked_shape, left_out_note
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from planner.model.finding import shape_from_config
from quant.checkpoint.stored_tensors import stored_tensors
from quant.checkpoint.text_part import WRAPPERS
from quant.common.errors import SpecError
from quant.scheme import GptqOptions
from tests.actors.configs import EVERY_CONFIG, LAYERS, VOCABULARY
from tests.actors.models import generate, random_prompts, references, stages_of

CPU = torch.device("cpu")
LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 7
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def whole_model(folder: Path, tied: bool, text_type: str = "mistral") -> Any:
    """Save a random model for text and images as transformers does."""
    torch.manual_seed(0)
    text = EVERY_CONFIG[text_type].to_dict()
    config = Mistral3Config(
        text_config=text | {"tie_word_embeddings": False},
        vision_config=VISION,
        tie_word_embeddings=tied,
    )
    model = Mistral3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def renamed(folder: Path) -> None:
    """Name the tensors as newer checkpoints do: `model.language_model.layers`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    old, new = "language_model.model.", "model.language_model."
    named = {
        name.replace(old, new).replace("language_model.lm_head", "lm_head"): tensor
        for name, tensor in tensors.items()
    }
    save_file({**named, "mtp.fc.weight": torch.zeros(2)}, path)


def values_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


@pytest.mark.parametrize(
    ("tied", "is_new", "text_type"), [(False, False, "mistral"), (True, True, "ministral3")]
)
def test_tokens_of_the_text_part_equal_those_of_the_whole(
    tied: bool, is_new: bool, text_type: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = whole_model(tmp_path, tied, text_type)
    if is_new:
        renamed(tmp_path)
    shape = checked_shape(tmp_path)
    assert (shape.model_type, shape.tied_embeddings) == (text_type, tied)
    assert not [each for each in recwarn if "takes" in str(each.message)]
    note = left_out_note(tmp_path) or ""
    parts = {"vision_tower", "multi_modal_projector", *["mtp"] * is_new}
    assert {*note.partition("(")[2].partition(")")[0].split(", ")} == parts
    assert {*end_tokens(tmp_path).sources} == {2}
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    for bounds in ((0, LAYERS), (0, 2, LAYERS)):
        stages = stages_of(tmp_path, bounds, len(prompts), max(LENGTHS) + NEW_TOKENS)
        assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


def test_the_text_configuration_is_that_of_transformers(tmp_path: Path) -> None:
    model = whole_model(tmp_path, tied=False)
    found, wanted = read_config(tmp_path), model.config.get_text_config()
    assert type(found) is type(wanted)
    ignored = ("dtype", "_name_or_path", "transformers_version")
    same = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (found, wanted))
    assert next(same) == next(same)


def test_entries_of_the_text_part_are_refused_by_their_names(tmp_path: Path) -> None:
    whole_model(tmp_path, tied=False)
    values = values_of(tmp_path)

    def refusal(**text: Any) -> str:
        with pytest.raises(SpecError) as caught:
            shape_from_config("m", values | {"text_config": values["text_config"] | text})
        return str(caught.value)

    place = "config.json of m: "
    assert refusal(hidden_size="48").startswith(f"{place}text_config.hidden_size is '48'")
    assert refusal(rope_parameters={"rope_type": "?"}).startswith(
        f"{place}text_config.rope_parameters.rope_type is '?'"
    )
    assert refusal(model_type="qwen2").startswith(f"{place}text_config.model_type is 'qwen2'")
    assert "mistral or ministral3" in refusal(model_type=["mistral"])
    with pytest.raises(SpecError, match=r"^config.json of m: text_config is \[\]"):
        shape_from_config("m", values | {"text_config": []})
    with pytest.raises(SpecError, match=r"^config.json of m: tie_word_embeddings is 'no'"):
        shape_from_config("m", values | {"tie_word_embeddings": "no"})
    with pytest.raises(SpecError, match=r"quant_method|AWQ weights"):
        shape_from_config("m", values | {"quantization_config": {"quant_method": "awq"}})


def test_what_is_quantized_is_a_text_model(tmp_path: Path) -> None:
    whole_model(tmp_path / "model", tied=False)
    calibration = torch.randint(3, VOCABULARY, (2, 12))
    wanted = Quantization(
        (16, 8) * 2 + (4,), calibration, compute_on(CPU, torch.float32), GptqOptions()
    )
    quantize_checkpoint(tmp_path / "model", tmp_path / "made", wanted)
    shape = checked_shape(tmp_path / "made")
    assert (shape.model_type, shape.stored is not None) == ("mistral", True)
    assert left_out_note(tmp_path / "made") is None
    assert all(n.startswith(("model.", "lm_head.")) for n in stored_tensors(tmp_path / "made"))
    assert values_of(tmp_path / "made")["model_type"] == "mistral"


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_those_of_transformers(name: str) -> None:
    """What is assumed where a configuration does not say is what transformers assumes."""
    from transformers import AutoConfig

    whole = AutoConfig.for_model(name)
    assert whole.text_config.model_type == WRAPPERS[name].text_types[0]
    assert whole.tie_word_embeddings == WRAPPERS[name].ties
