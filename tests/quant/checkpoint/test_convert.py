from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmpq.cli.measure.checkpoints import convert_main
from quant.checkpoint.convert import convert
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError

Build = Callable[[str], PreTrainedModel]
INDEX = "pytorch_model.bin.index.json"


def save_bin(model: PreTrainedModel, folder: Path, shards: int = 1, prefix: str = "") -> None:
    """A checkpoint as older hub uploads are: torch.save, names without `prefix`."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    (folder / "vocab.json").write_text("{}")
    state = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = list(state)
    files = {name: f"pytorch_model-{index % shards + 1}.bin" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: state[name].clone() for name in names if files[name] == file}
        torch.save(part, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("family", "prefix"), [("opt", "model."), ("llama", ""), ("bloom", "")])
def test_converted_model_is_the_same(
    shards: int, family: str, prefix: str, tiny_model: Build, tmp_path: Path
) -> None:
    model = tiny_model(family)
    save_bin(model, tmp_path / "old", shards, prefix)
    summary = convert(tmp_path / "old", tmp_path / "new")
    assert summary.shards == shards
    assert {"config.json", "vocab.json"} <= set(summary.copied)
    checkpoint = Checkpoint(tmp_path / "new")
    assert len(checkpoint.names()) == summary.tensors
    state = model.state_dict()
    for name in checkpoint.names():
        stored = name if name in state else prefix + name
        assert torch.equal(checkpoint.read(name), state[stored])
    stored_bytes = sum(checkpoint.read(name).nbytes for name in checkpoint.names())
    assert stored_bytes == summary.tensor_bytes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_tied_head_is_saved_once(tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("opt"), tmp_path / "old")
    summary = convert(tmp_path / "old", tmp_path / "new")
    assert summary.aliases == (("lm_head.weight", "model.decoder.embed_tokens.weight"),)
    assert "lm_head.weight" not in Checkpoint(tmp_path / "new").names()


def test_shared_tensors_of_an_untied_model_are_both_kept(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text('{"tie_word_embeddings": false}')
    whole = torch.randn(6, 4)
    torch.save({"a": whole, "b": whole, "c": whole[2:4], "d": whole.t()}, old / "pytorch_model.bin")
    summary = convert(old, tmp_path / "new")
    assert summary.aliases == ()
    checkpoint = Checkpoint(tmp_path / "new")
    for name, tensor in {"a": whole, "b": whole, "c": whole[2:4], "d": whole.t()}.items():
        assert torch.equal(checkpoint.read(name), tensor)


def test_the_format_before_zip_files(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    state = {"a": torch.randn(3)}
    torch.save(state, old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert(old, tmp_path / "new")
    assert torch.equal(Checkpoint(tmp_path / "new").read("a"), state["a"])


class Anything:
    """An object that unpickling would have to import code for."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": Anything()}, r"pytorch_model\.bin \(\d+ bytes\) is damaged or holds more"),
        ([1, 2], "holds a list, not a dictionary"),
        ({}, "holds a dict, not a dictionary of tensors"),
        ({"a": torch.zeros(1), "epoch": 3}, "1 entries that are no tensors, 'epoch' first"),
    ],
)
def test_more_than_tensors(state: object, message: str, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text("{}")
    torch.save(state, old / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        convert(old, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"], "nothing half-written stays"


@pytest.mark.parametrize("kept_bytes", [0, 10, 2000])
def test_truncated_bin(kept_bytes: int, tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("llama"), tmp_path / "old", shards=2)
    path = tmp_path / "old" / "pytorch_model-2.bin"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"pytorch_model-2\.bin .*damaged"):
        convert(tmp_path / "old", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_refusals(tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("llama"), tmp_path / "old", shards=2)
    with pytest.raises(CheckpointError, match="exists already"):
        convert(tmp_path / "old", tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"cannot convert .* which lies in it"):
        convert(tmp_path / "old", tmp_path / "old" / "safetensors")
    (tmp_path / "old" / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards, pytorch_model-2\.bin"):
        convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old" / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"neither pytorch_model\.bin nor"):
        convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old" / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="safetensors already"):
        convert(tmp_path / "old", tmp_path / "new")


@pytest.mark.parametrize("inside", ["file/new", "file/more/new", "x" * 300, "a/b/" + "x" * 300])
def test_targets_that_cannot_be_made(inside: str, tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("llama"), tmp_path / "old")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot convert .*choose folders"):
        convert(tmp_path / "old", tmp_path / inside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old"]


def test_impossible_source_and_read_only_target(tiny_model: Build, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot convert .*too long"):
        convert(tmp_path / ("x" * 300), tmp_path / "new")
    save_bin(tiny_model("llama"), tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"cannot convert .* into /proc/x"):
        convert(tmp_path / "old", Path("/proc/x"))


def test_target_below_folders_that_lack(tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("llama"), tmp_path / "old")
    target = tmp_path / "a" / ".." / "b" / "c"
    assert convert(tmp_path / "old", target).target == target
    assert Checkpoint(tmp_path / "b" / "c").names()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "old"]
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        convert(tmp_path / "old", tmp_path / "d" / "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "old"]


def test_command_line_says_what_was_made(
    tiny_model: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    save_bin(model, tmp_path / "old", shards=2)
    assert convert_main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    gib = sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**30
    tensors = len(model.state_dict())
    assert capsys.readouterr().out == (
        f"wrote {tensors} tensors ({gib:.2f} GiB) in 2 safetensors files to {tmp_path / 'new'}; "
        f"plan it: llmpq plan --model {tmp_path / 'new'} --cluster cluster.yaml\n"
    )
    assert convert_main([str(tmp_path / "old"), str(tmp_path / "old" / "config.json" / "x")]) == 2
    assert "llmpq-convert: error: cannot convert" in capsys.readouterr().err


def test_configuration_is_needed(tiny_model: Build, tmp_path: Path) -> None:
    save_bin(tiny_model("llama"), tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is no JSON object"):
        convert(tmp_path / "old", tmp_path / "new")
    (tmp_path / "old" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        convert(tmp_path / "old", tmp_path / "new")
