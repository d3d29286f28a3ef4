"""Spoiled model folders: `llmpq plan` and `llmpq run` refuse them alike, before Ray starts."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file

from llmpq import Cluster, Workload
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from llmpq.model_check import checked_shape
from llmpq.run.engine import CheckedModel
from llmpq.run.options import RunOptions
from planner.plan.spec import PlanSpec
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, LlmpqError, SpecError
from tests.paths import ROOT

DEMO = ROOT / "examples/demo_model"
CLUSTER = ROOT / "cluster_specs/demo_mixed_cpu.yaml"
LENGTHS = ["--s", "16", "--n", "4", "--global_bz", "2"]
CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Model:
    """A copy of the demo model whose JSON files can be changed."""

    folder: Path

    def spoil(self, file: str, entries: dict[str, Any]) -> None:
        """Put `entries` into the JSON of `file`."""
        path = self.folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    def change_weights(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Write other weights than the demo model's."""
        tensors = dict(load_file(DEMO / "model.safetensors"))
        change(tensors)
        (self.folder / "model.safetensors").unlink()
        save_file(tensors, self.folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
        else:
            (folder / path.name).symlink_to(path)
    return Model(folder)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    Cluster.from_yaml(CLUSTER).plan(DEMO, Workload(2, 16, 4)).save(path)
    return path


def deep(opening: str, inner: str, closing: str) -> str:
    return opening * 100_000 + inner + closing * 100_000


def run_of(plan: Path, folder: Path) -> list[str]:
    """Options of a run of one row."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": [5, 6]}\n')
    return ["--plan", str(plan), "--input", str(rows), "--output", str(folder / "out.jsonl")]


SPOILED: dict[str, tuple[str, dict[str, Any] | str, tuple[str, ...]]] = {
    "fewer layers than the weights": (
        CONFIG, {"num_hidden_layers": 11}, (CONFIG, "num_hidden_layers", "11", "12")),
    "more layers than the weights": (
        CONFIG, {"num_hidden_layers": 13}, (CONFIG, "num_hidden_layers", "13", "12")),
    "no room for the plan's requests": (
        CONFIG, {"max_position_embeddings": 1}, ("model", "max_position_embeddings", " 1 ")),
    "an odd head": (CONFIG, {"head_dim": 31}, (CONFIG, "head_dim", "31", "even")),
    "an epsilon below 0": (CONFIG, {"rms_norm_eps": -1}, (CONFIG, "rms_norm_eps is -1")),
    "an epsilon that is none": (
        CONFIG, {"rms_norm_eps": float("nan")}, (CONFIG, "rms_norm_eps is nan")),
    "no theta": (
        CONFIG, {"rope_parameters": {"rope_theta": None}},
        (CONFIG, "rope_parameters.rope_theta is None")),
    "theta 0 in an older file": (
        CONFIG, {"rope_parameters": None, "rope_theta": 0}, (CONFIG, "rope_theta is 0")),
    "theta as text": (
        CONFIG, {"rope_parameters": {"rope_theta": "1e4"}}, (CONFIG, "rope_theta is '1e4'")),
    "an unknown rope type": (
        CONFIG, {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        (CONFIG, "rope_scaling.rope_type is 'spiral'", "yarn")),
    "an unknown activation": (CONFIG, {"hidden_act": "sulu"}, (CONFIG, "hidden_act is 'sulu'")),
    "an end token as text": (
        CONFIG, {"eos_token_id": "2"}, (CONFIG, "eos_token_id is '2'", "2047")),
    "an end token beyond the vocabulary": (
        CONFIG, {"eos_token_id": [2, 2048]}, (CONFIG, "eos_token_id is [2, 2048]", "2047")),
    "a padding token that no embedding has": (
        CONFIG, {"pad_token_id": 2048}, (CONFIG, "pad_token_id is 2048")),
    "an unknown type": (CONFIG, {"dtype": "float17"}, (CONFIG, "dtype is 'float17'")),
    "a deep configuration": (CONFIG, deep('{"a":', "1", "}"), (CONFIG, "64 levels at most")),
    "another end token beyond the vocabulary": (
        GENERATION, {"eos_token_id": 2048}, (GENERATION, "eos_token_id is 2048", "2047")),
    "a truth as end token": (
        GENERATION, {"eos_token_id": True}, (GENERATION, "eos_token_id is True")),
    "a deep generation configuration": (
        GENERATION, deep("[", "", "]"), (GENERATION, "64 levels at most")),
    "a less deep one": (GENERATION, {"a": json.loads("[" * 70 + "]" * 70)},
                        (GENERATION, "64 levels at most")),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_both_commands_refuse(
    name: str, model: Model, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, words = SPOILED[name]
    if isinstance(content, str):
        (model.folder / file).write_text(content)
    else:
        model.spoil(file, content)
    commands = (
        lambda: plan_cli.main(["--model", str(model.folder), "--cluster", str(CLUSTER), *LENGTHS]),
        lambda: run_cli.main([*run_of(plan, tmp_path), "--model", str(model.folder)]),
    )
    for command in commands:
        assert command() == 2
        said = capsys.readouterr().err
        assert all(word in said for word in (*words, model.folder.name)), said
        assert "Traceback" not in said
    assert not (tmp_path / "out.jsonl").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of me/demo in a hub's cache that is not asked for more; no weights in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--me--demo"
    for folder in ("blobs", "refs", snapshot := f"snapshots/{'0' * 40}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    for path in DEMO.glob("*.json"):
        (repository / snapshot / path.name).symlink_to(path)
    return repository / snapshot


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ((), "lacks its weights;"),
        (("a.safetensors",), "lacks 1 of 2 files of its weights (b.safetensors);"),
    ],
)
def test_a_part_of_a_model_in_the_hubs_cache_is_told(
    files: tuple[str, ...], lacks: str, hub: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """While planning, which needs no weights; a run of this machine's refuses them before Ray."""
    for file in files:
        names = [*load_file(DEMO / "model.safetensors")]
        index = {"weight_map": dict.fromkeys(names, file) | {names[0]: "b.safetensors"}}
        (hub / "model.safetensors.index.json").write_text(json.dumps(index))
        (hub / file).symlink_to(DEMO / "model.safetensors")
    told = f"{lacks} fetch what is missing: HF_HUB_OFFLINE=0 hf download me/demo"
    plan = str(tmp_path / "plan.json")
    options = ["--model", "me/demo", "--cluster", str(CLUSTER), *LENGTHS]
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert plan_cli.main([*options, "-o", plan]) == 0
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert run_cli.main(run_of(Path(plan), tmp_path)) == 2
    assert told in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="hf download me/demo"):
        Checkpoint(hub).check_files()


def test_python_refuses_too(model: Model) -> None:
    model.spoil(CONFIG, {"num_hidden_layers": 11})
    with pytest.raises(CheckpointError, match=r"11 layers .* weights have 12"):
        Cluster.from_yaml(CLUSTER).plan(model.folder, Workload(2, 16, 4))


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 300, "/" + "x" * 300])
def test_names_that_no_folder_can_have(
    name: str, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_cli.main(["--model", name, "--cluster", str(CLUSTER)]) == 2
    assert run_cli.main([*run_of(plan, tmp_path), "--model", name]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["llmpq-algo", "llmpq-dist"]
    assert all(name[:100] in line and "folder or a hub id" in line for line in said)


def test_weights_that_nothing_takes_are_told_once(model: Model) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for index in range(3):
            tensors[f"model.layers.{index}.adapter.weight"] = np.zeros((2, 2), np.float16)
        tensors["score.weight"] = np.zeros((2, 128), np.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)

    model.change_weights(add)
    with pytest.warns(
        UserWarning,
        match=r"no part of a llama .* model\.layers\.\*\.adapter\.weight \(3\), score\.weight ",
    ):
        checked_shape(model.folder)


def test_harmless_weights_are_not_told(model: Model) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float16)  # of auto-gptq

    model.change_weights(add)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_shape(model.folder).tied_embeddings


def narrower(tensors: dict[str, Any]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((511, 128), np.float16)


def in_codes(tensors: dict[str, Any]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((512, 128), np.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            narrower,
            r"model\.safetensors: tensor model\.layers\.3\..*weight is \[511, 1",
        ),
        (in_codes, "holds I8: the checkpoint is quantized already"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"has no tensor model\.norm\.weight"),
    ],
)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, Any]], None], message: str, model: Model
) -> None:
    model.change_weights(change)
    with pytest.raises(CheckpointError, match=message):
        checked_shape(model.folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("self_attn.q_proj.bias", r"q_proj\.bias \(2\) .* set attention_bias to true in config"),
        ("mlp.up_proj.bias", r"up_proj\.bias \(2\) .* set mlp_bias to true"),
        ("input_layernorm.bias", r"norm\.bias \(2\) .*; take the config\.json that belongs"),
        ("self_attn.q_norm.weight", r"q_norm\.weight \(2\) .*; take the config\.json"),
        ("self_attn.q_proj.lora_A.weight", r"lora_A\.weight \(2\) .* merge the adapter"),
    ],
)
def test_what_answers_depend_on_is_never_left_out(name: str, message: str, model: Model) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for index in (3, 11):
            tensors[f"model.layers.{index}.{name}"] = np.eye(1, 128, dtype=np.float16)[0]

    model.change_weights(add)
    with pytest.raises(CheckpointError, match=message):
        checked_shape(model.folder)


def test_biases_that_the_configuration_has_are_taken(model: Model) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for index in range(12):
            for part in "qkvo":
                linear = f"model.layers.{index}.self_attn.{part}_proj"
                rows = len(tensors[f"{linear}.weight"])
                tensors[f"{linear}.bias"] = np.ones(rows, np.float16)

    model.change_weights(add)
    model.spoil(CONFIG, {"attention_bias": True})
    assert checked_shape(model.folder).qkv_bias


def test_what_is_said_when_planning_is_said_when_running(
    model: Model, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of another format, before Ray starts: the words of both commands are the same."""
    (model.folder / "model.safetensors").unlink()
    (model.folder / "pytorch_model.bin").touch()
    assert plan_cli.main(["--model", str(model.folder), "--cluster", str(CLUSTER), *LENGTHS]) == 2
    planning = capsys.readouterr().err.removeprefix("llmpq-algo")
    assert run_cli.main([*run_of(plan, tmp_path), "--model", str(model.folder)]) == 2
    assert capsys.readouterr().err.removeprefix("llmpq-dist") == planning
    assert "llmpq convert" in planning


def test_what_lacks_weights_can_be_planned(model: Model) -> None:
    (model.folder / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"no weights yet: .* config\.json alone"):
        assert checked_shape(model.folder).layers == 12
    assert checked_shape(model.folder / CONFIG).layers == 12
    assert checked_shape("opt-125m").layers == 12


@pytest.mark.parametrize("pad", [-1, None, 0])
def test_padding_that_generation_does_not_use_is_left_alone(pad: int | None, model: Model) -> None:
    model.spoil(CONFIG, {"pad_token_id": pad, "bos_token_id": 99_999, "eos_token_id": [2, 3]})
    assert checked_shape(model.folder).layers == 12


def test_advice_of_other_libraries_is_replaced() -> None:
    theirs = (
        "the tokenizer in /m cannot be loaded: The repository /m contains custom code. You can "
        "inspect it at https://hf.co/m .\nPlease pass the argument `trust_remote_code=True` to "
        "allow custom code to be run."
    )
    said = str(LlmpqError(theirs))
    assert "trust_remote_code" not in said
    assert said.startswith("the tokenizer in /m cannot be loaded: The repository /m contains")
    assert said.endswith(
        "llmpq runs no code that comes with a model: give a checkpoint that needs none"
    )
    cached = SpecError("no x (E: None here. To look online, pass 'local_files_only=False'.); check")
    assert "local_files_only" not in str(cached)
    assert "HF_HUB_OFFLINE" in str(cached)


class Fork:
    """What is asked of a process that is prepared, and whether it comes to its end."""

    def __init__(self, is_done: bool) -> None:
        self.asked: tuple[Any, ...] = ()
        self._is_done = is_done

    def ask(self, *asked: Any) -> Callable[[], bool]:
        self.asked = asked
        return lambda: self._is_done


def test_what_a_fork_objects_to_is_told_here(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> None:
        raise CheckpointError("no such architecture")

    monkeypatch.setattr("actors.stage.model_config.check_transformers_builds", refused)
    checked, fork = CheckedModel(PlanSpec.load(plan), RunOptions()), Fork(is_done=True)
    checked.check_loads(cast(Any, fork))()
    for each in (cast(Any, Fork(is_done=False)), None):
        with pytest.raises(CheckpointError, match="no such architecture"):
            checked.check_loads(each)()
    function, *arguments = fork.asked
    with pytest.raises(CheckpointError, match="no such architecture"):  # the fork does the same
        resolve_name(function)(*json.loads(json.dumps(arguments)))
