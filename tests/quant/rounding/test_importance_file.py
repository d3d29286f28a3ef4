"""Files of importance: the same numbers come back, and what is wrong with a file is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quant.common.errors import CheckpointError, InputError
from quant.rounding.importance import (
    Importance,
    InputStatistics,
    LayerImportance,
    digest_of_inputs,
    load_importance,
    save_importance,
)
from quant.rounding.importance_header import read_importance_header
from quant.rounding.importance_store import ImportanceStore

Edit = Callable[[dict[str, Tensor], dict[str, str]], None]


def importance(seed: int = 0, seen: str = "5 tokens") -> Importance:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    layers = []
    for _ in range(2):
        shared, own = (InputStatistics(draw(width), draw(width)) for width in (6, 9))
        inputs = {"attn.q": shared, "attn.k": shared, "mlp.down": own}
        layers.append(LayerImportance(inputs, draw(2, 3)))
    return Importance(tuple(layers), seen, "shape of a model")


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "one.importance.safetensors", importance()
    save_importance(path, written)
    read = load_importance(path)
    assert (read.seen, read.shape) == (written.seen, written.shape)
    assert read.fingerprint == written.fingerprint == read_importance_header(path).fingerprint
    for one, other in zip(read.layers, written.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert list(one.inputs) == list(other.inputs)
        assert one.inputs["attn.q"] is one.inputs["attn.k"]
        for name, own in one.inputs.items():
            assert torch.equal(own.mean_square, other.inputs[name].mean_square)
            assert torch.equal(own.largest, other.inputs[name].largest)


def test_another_number_is_another_fingerprint() -> None:
    first, second = importance(), importance()
    assert first.fingerprint == second.fingerprint != importance(1).fingerprint
    second.layers[1].keys[1, 2] += 1
    second = Importance(second.layers, second.seen, second.shape)
    assert first.fingerprint != second.fingerprint
    inputs = dict(first.layers[0].inputs)
    digest = digest_of_inputs(inputs)
    inputs["attn.q"].largest[3] += 1
    assert digest_of_inputs(inputs) != digest


def drop(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    del tensors["1.mlp.down.largest"]


def negative(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["0.attn.k.mean_square"][2] = -1


def infinite(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["1.keys"][0, 0] = torch.inf


def short(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["0.mlp.down.largest"] = torch.ones(8)


def half(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["0.keys"] = tensors["0.keys"].half()


def other_number(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["0.keys"][0, 0] += 1


def other_format(_: dict[str, Tensor], notes: dict[str, str]) -> None:
    notes["format"] = "something else"


def no_list(_: dict[str, Tensor], notes: dict[str, str]) -> None:
    notes["shared"] = "[1, 2]"


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (drop, r"no tensor 1\.mlp\.down\.largest"),
        (negative, r"0\.attn\..\.mean_square has negative"),
        (infinite, r"1\.keys has negative or infinite"),
        (short, r"0\.mlp\.down has 9 mean squares and 8"),
        (half, r"0\.keys is torch\.float16 \[2, 3\]"),
        (other_number, "is damaged: its numbers have fingerprint"),
        (other_format, "holds no importance .*something else"),
        (no_list, "holds no importance"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_and_a_remedy(
    edit: Edit, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "one.importance.safetensors"
    save_importance(path, importance())
    with safe_open(path, framework="pt") as opened:
        notes = dict(opened.metadata())
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors = {name.replace("attn.q", "attn.k"): each for name, each in tensors.items()}
    notes["shared"] = notes["shared"].replace('"attn.q": "attn.q"', '"attn.q": "attn.k"')
    notes["shared"] = notes["shared"].replace('"attn.k": "attn.q"', '"attn.k": "attn.k"')
    edit(tensors, notes)
    save_file(tensors, path, notes)
    with pytest.raises(CheckpointError, match=told) as raised:
        load_importance(path)
    assert str(path) in str(raised.value)
    assert "llmpq indicator" in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}", b"not a file of tensors"])
def test_what_is_no_file_of_tensors_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds no importance"):
        load_importance(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_importance(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot write"):
        save_importance(tmp_path / "missing" / "one", importance())


def test_a_store_finds_what_was_kept_of_the_same_model_and_tokens(tmp_path: Path) -> None:
    kept = ImportanceStore(tmp_path / "new", "a model", "shape of a model")
    assert kept.find("5 tokens") is None
    found = kept.keep(importance().layers, "5 tokens")
    assert kept.find("5 tokens") is found
    again = ImportanceStore(tmp_path / "new", "a model", "shape of a model").find("5 tokens")
    assert again is not None
    assert again.fingerprint == found.fingerprint
    assert ImportanceStore(tmp_path / "new", "another").find("5 tokens") is None
    assert ImportanceStore(tmp_path / "new", "a model").find("6 tokens") is None


def test_a_damaged_file_in_a_store_is_measured_again_with_a_warning(tmp_path: Path) -> None:
    ImportanceStore(tmp_path, "a model").keep(importance().layers, "5 tokens")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    store = ImportanceStore(tmp_path, "a model")
    with pytest.warns(RuntimeWarning, match="measured again"):
        assert store.find("5 tokens") is None
    store.keep(importance(1).layers, "5 tokens")
    found = ImportanceStore(tmp_path, "a model").find("5 tokens")
    assert found is not None
    assert found.fingerprint == importance(1).fingerprint


def test_a_folder_that_cannot_be_written_costs_a_warning_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ImportanceStore(tmp_path / "file" / "folder", "a model")
    with pytest.warns(RuntimeWarning, match="next start"):
        found = store.keep(importance().layers, "5 tokens")
    assert store.find("5 tokens") is found
