"""The tokens at which answers end: all that a checkpoint's files name, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.stage.model_config import checked_end_tokens, end_tokens
from quant.checkpoint.gguf.folder import folder_of_gguf
from quant.common.errors import CheckpointError
from tests.actors.configs import CONFIGS
from tests.llmpq.small_tokenizers import write_tokenizer
from tests.quant.checkpoint.gguf.written import write_gguf

TEXT_END, TURN_END = 1, 2
ADDED = [
    {"id": 0, "content": "<unk>", "special": True},
    {"id": TEXT_END, "content": "<|endoftext|>", "special": True},
    {"id": TURN_END, "content": "<|im_end|>", "special": True},
]
TOKEN = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}


def write_model(folder: Path, config: Any, generation: Any, **settings: Any) -> Path:
    """A folder of settings; its tokenizer has the tokens `ADDED`."""
    write_tokenizer(folder, **settings)
    path = folder / "tokenizer.json"
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {each["content"]: each["id"] for each in ADDED} | {
        "a": 3,
        "</s>": 4,
    }
    content["added_tokens"] = [plain | each for each in ADDED]
    path.write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("generation", [None, {"eos_token_id": TEXT_END}])
@pytest.mark.parametrize("config", [{}, {"eos_token_id": None}, {"eos_token_id": [TEXT_END, 7]}])
@pytest.mark.parametrize("named", ["<|im_end|>", TOKEN, "</s>", None])
def test_all_that_any_file_names(config: Any, generation: Any, named: Any, tmp_path: Path) -> None:
    settings = {} if named is None else {"eos_token": named}
    folder = write_model(tmp_path / "model", config, generation, **settings)
    found = end_tokens(folder).sources
    wanted = {
        AutoTokenizer.from_pretrained(folder).eos_token_id,
        *(config.get("eos_token_id") or ()),
    }
    wanted |= set() if generation is None else {generation["eos_token_id"]}
    assert set(found) == wanted - {None}


@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens.json", "vocab.json"])
def test_a_tokenizer_without_tokenizer_json(place: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eos_token": "<|im_end|>"}
    if place == "added_tokens_decoder":
        settings |= {place: {str(each["id"]): each for each in ADDED}}
    else:
        (tmp_path / place).write_text(json.dumps({"<|im_end|>": TURN_END}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert end_tokens(tmp_path).sources == {TURN_END: ("tokenizer_config.json",)}


@pytest.mark.parametrize("settings", [{}, {"eos_token": ""}, {"eos_token": "<|endoftext|>"}])
@pytest.mark.parametrize("named", ["<|im_end|>", TOKEN])
def test_the_map_of_special_tokens_counts_too(named: Any, settings: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {}, None, **settings)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": named}))
    found = end_tokens(folder).sources
    assert found[TURN_END] == ("special_tokens_map.json",)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id in found
    assert (TEXT_END in found) == ("<|endoftext|>" in settings.values())


def test_the_line_that_tells_them(tmp_path: Path) -> None:
    config = {"eos_token_id": TEXT_END}
    chat = write_model(tmp_path / "chat", config, config, eos_token="<|im_end|>")
    assert end_tokens(chat).note == (
        "answers end at <|endoftext|> (generation_config.json, config.json) and <|im_end|> "
        "(tokenizer_config.json)"
    )
    base = write_model(tmp_path / "base", {"eos_token_id": [TEXT_END, 9]}, None, eos_token="</s>")
    assert end_tokens(base).note == (
        "answers end at <|endoftext|>, token 9 (config.json) and </s> (tokenizer_config.json)"
    )
    same = write_model(tmp_path / "same", config, None, eos_token="<|endoftext|>")
    assert list(end_tokens(same).sources) == [TEXT_END]


@pytest.mark.parametrize(
    "broken", ["{", "[]", '{"eos_token": 5}', '{"eos_token": {"content": [2]}}', "[" * 100_000]
)
def test_broken_tokenizer_files_are_no_matter_of_end_tokens(broken: str, tmp_path: Path) -> None:
    """Loading the tokenizer tells of them."""
    folder = write_model(tmp_path / "model", {"eos_token_id": 7}, None)
    for name in ("tokenizer_config.json", "tokenizer.json", "added_tokens.json"):
        (folder / name).write_text(broken)
    assert list(end_tokens(folder).sources) == [7]


@pytest.mark.parametrize("wrong", ["2", [2, "3"], [[2]], 2.0, True])
def test_configs_that_name_no_token_ids(wrong: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"eos_token_id": wrong}, None)
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        end_tokens(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        checked_end_tokens(folder)


def test_a_gguf_file_names_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End of text, of a turn and of a message, as llama.cpp has them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = ["<s>", "a", "</s>", "<|turn|>", *(f"t{number}" for number in range(195))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0] * len(texts),
        "tokenizer.ggml.token_type": [3, 1, 3, 3, *[1] * 195],
        "tokenizer.ggml.eot_token_id": 3,
    }
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    folder = folder_of_gguf(write_gguf(model, tmp_path / "m.gguf", metadata=metadata))
    assert folder is not None
    assert end_tokens(folder).note == "answers end at </s>, <|turn|> (m.gguf)"
