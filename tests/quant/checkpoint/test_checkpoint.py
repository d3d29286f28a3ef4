from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import INDEX_FILE, SINGLE_FILE, stored_tensors
from quant.common.errors import CheckpointError

TENSORS = {
    "model.a": torch.arange(12, dtype=torch.float16).view(3, 4),
    "model.b": torch.randn(5),
    "c": torch.randn(2, 2, dtype=torch.bfloat16),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"part-{number}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_names_shapes_and_values(kind: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    assert checkpoint.names() == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert checkpoint.shape_of(name) == tuple(tensor.shape)
        assert checkpoint.read(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.read(name), tensor)


def test_a_single_file_comes_before_a_stale_index(single: Path) -> None:
    """As in transformers: the index is one that a tool left there when it merged the shards."""
    index = {"weight_map": {"model.a": "model-00001-of-00002.safetensors", "gone": "x"}}
    (single / INDEX_FILE).write_text(json.dumps(index))
    taken, _ = _get_resolved_checkpoint_files(str(single), None, None, None, None, False)
    assert [Path(file).name for file in taken] == [SINGLE_FILE]
    checkpoint = Checkpoint(single)
    checkpoint.check_files()
    assert checkpoint.names() == sorted(TENSORS) == sorted(stored_tensors(single))
    assert torch.equal(checkpoint.read("model.a"), TENSORS["model.a"])


def test_only_the_shards_asked_for_are_opened(sharded: Path) -> None:
    (sharded / "part-1.safetensors").unlink()
    checkpoint = Checkpoint(sharded)
    assert torch.equal(checkpoint.read("model.a"), TENSORS["model.a"])
    with pytest.raises(CheckpointError, match=r"lacks part-1\.safetensors.*missing shard"):
        checkpoint.read("model.b")


def test_find_with_and_without_the_prefix(single: Path) -> None:
    checkpoint = Checkpoint(single)
    assert checkpoint.find("a", "model") == "model.a"
    assert checkpoint.find("model.a", "model") == "model.a"
    assert checkpoint.find("model.c", "model") == "c"
    with pytest.raises(CheckpointError, match=r"no tensor d \(tried model\.d, d\) among its 3"):
        checkpoint.find("d", "model")
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.read("nothing")


def test_index_that_lies(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["c"] = "part-0.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places tensor c in part-0\.safetensors"):
        Checkpoint(sharded).read("c")


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": 3}'],
)
def test_malformed_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_truncated_file_is_named(single: Path, kept_bytes: int) -> None:
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(\d+ bytes\) is truncated"):
        Checkpoint(single)


def test_damaged_header(single: Path) -> None:
    path = single / SINGLE_FILE
    content = bytearray(path.read_bytes())
    content[8:20] = b"x" * 12
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint(single)


def test_bin_weights_name_the_converter(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"run: llmpq convert \S+ \S+-safetensors"):
        Checkpoint(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        Checkpoint(tmp_path / "missing")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint(file)


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/x"])
def test_impossible_folder(name: str) -> None:
    with pytest.raises(CheckpointError, match="give the folder that holds the weights"):
        Checkpoint(name)


@pytest.mark.parametrize("name", ["some-org/no-such-model", "bad//id", "two words/x"])
def test_hub_id_that_cannot_be_reached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="no folder"):
        Checkpoint(name)


def test_hub_id_in_the_local_cache(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's layout: a reference names a commit, whose snapshot is a folder of files."""
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (single / SINGLE_FILE).rename(snapshot / SINGLE_FILE)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert Checkpoint("org/name").names() == sorted(TENSORS)
