"""Folders whose weights are of another kind than is read, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import unread_file, unread_weights
from quant.common.errors import CheckpointError

FOLDERS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    ".bin": ({"pytorch_model.bin": ""}, (".bin weights", "llmpq convert")),
    ".bin in shards": (
        {"pytorch_model-00001-of-00002.bin": "", "pytorch_model.bin.index.json": "{}"},
        (".bin weights", "llmpq convert"),
    ),
    "an adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "a/b"}', "adapter_model.bin": ""},
        ("adapter of a/b", "--adapter"),
    ),
    "an adapter of nobody": ({"adapter_config.json": "["}, ("holds an adapter, ", "--adapter")),
    "shards without index": (
        {"model-00001-of-00002.safetensors": "", "model-00002-of-00002.safetensors": ""},
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "download"),
    ),
    "of LLaMA's authors": ({"consolidated.00.pth": ""}, ("consolidated.00.pth", "safetensors")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_reason_is_the_true_one_also_when_loading(name: str, tmp_path: Path) -> None:
    files, words = FOLDERS[name]
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    said = unread_weights(tmp_path)
    assert said is not None
    assert all(word in said for word in (*words, str(tmp_path))), said
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert str(caught.value) == said


@pytest.mark.parametrize("files", [(), ("config.json", "training_args.bin", "optimizer.pt")])
def test_no_weights_at_all_are_no_fault(files: tuple[str, ...], tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert unread_weights(tmp_path) is None


def test_what_can_be_read_is_read_whatever_lies_beside_it(tmp_path: Path) -> None:
    for file in ("model.safetensors", "pytorch_model.bin", "model.gguf", "consolidated.00.pth"):
        (tmp_path / file).touch()
    assert unread_weights(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("a.onnx", "not read"),
        ("model.safetensors", "give the folder"),
        ("a.bin", "give the folder"),
    ],
)
def test_files_of_weights_are_no_models(file: str, words: str) -> None:
    assert words in (unread_file(Path(file)) or "")


def test_a_configuration_is_no_file_of_weights() -> None:
    assert unread_file(Path("config.json")) is None
