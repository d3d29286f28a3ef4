"""Nothing that came as data is run: weights, tokenizers and the packages' own source."""

from __future__ import annotations

import ast
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq.cli.common import EXIT_BAD_INPUT
from llmpq.cli.measure.checkpoints import convert_main
from quant.common.errors import CheckpointError
from tests.paths import ROOT

PACKAGES = ("llmpq", "actors", "planner", "quant")


class Bomb:
    """A pickle that touches a file when it is read."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._touched}",)


# --- nothing of others is run -------------------------------------------------------------------

_RUNS_CODE = {"eval", "exec", "compile", "__import__"}
_UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
_AUTO_CLASSES = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel")


def unsafe_calls(source: str) -> list[str]:
    """What in `source` could run code that came with data, by its syntax tree."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in _UNSAFE_MODULES]
        if isinstance(node, ast.ImportFrom) and (node.module or "") in _UNSAFE_MODULES:
            found += [a.name for a in node.names if a.name != "UnpicklingError"]
        if isinstance(node, ast.Call):
            found += filter(None, [_unsafe_call(node)])
    return found


def _unsafe_call(call: ast.Call) -> str | None:
    given = {each.arg: each.value for each in call.keywords}
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name in _RUNS_CODE or name in ("os.system", "os.popen", "torch.hub.load"):
        return name
    if name == "torch.load" and not _is_constant(given.get("weights_only"), True):
        return "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and not _is_constant(given.get("allow_pickle"), False):
        return "np.load without allow_pickle=False"
    if name.startswith("yaml.") and last in ("load", "unsafe_load", "full_load", "load_all"):
        return name
    if name == "yaml.compose" and ast.unparse(given.get("Loader", call)) != "yaml.SafeLoader":
        return "yaml.compose without SafeLoader"
    if "shell" in given and not _is_constant(given["shell"], False):
        return "shell"
    trusted = given.get("trust_remote_code")
    if trusted is not None and not _is_constant(trusted, False):
        return "trust_remote_code"
    asks = last in ("from_pretrained",) and name.split(".")[-2] in _AUTO_CLASSES
    return f"{name} without trust_remote_code=False" if asks and trusted is None else None


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_of_others_is_run(package: str) -> None:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = {str(path): unsafe_calls(path.read_text()) for path in paths}
    assert not {path: calls for path, calls in found.items() if calls}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(p)",
        "torch.load(p, weights_only=flag)",
        "eval(x)",
        "np.load(p)",
        "yaml.load(t, Loader=L)",
        "yaml.compose(t)",
        "subprocess.run(c, shell=True)",
        "AutoTokenizer.from_pretrained(p)",
        "AutoConfig.from_pretrained(p, trust_remote_code=True)",
        "f(trust_remote_code=x)",
    ],
)
def test_the_search_finds_what_it_should(source: str) -> None:
    assert unsafe_calls(source)


@pytest.mark.parametrize("form", ["zip", "legacy", "tensors and more"])
def test_weights_that_are_a_program_are_refused(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, touched = tmp_path / "source", tmp_path / "touched"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "opt"}')
    weights = source / "pytorch_model.bin"
    if form == "legacy":
        weights.write_bytes(pickle.dumps(Bomb(touched)))
    else:
        more = {"w": torch.ones(2)} if form == "tensors and more" else {}
        torch.save({**more, "bomb": Bomb(touched)}, weights)
        assert zipfile.is_zipfile(weights)
    assert convert_main([str(source), str(tmp_path / "target")]) == EXIT_BAD_INPUT
    assert "more than tensors" in capsys.readouterr().err
    assert not touched.exists()
    assert not (tmp_path / "target").exists()
    with pytest.raises(pickle.UnpicklingError):  # and the bomb is one
        torch.load(weights, weights_only=True)
    torch.load(weights, weights_only=False) if form != "legacy" else pickle.loads(
        weights.read_bytes()
    )
    assert touched.exists()


def test_a_tokenizer_with_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    from llmpq.tokenizing.requests import load_tokenizer

    touched = tmp_path / "touched"
    (tmp_path / "evil.py").write_text(f"open({str(touched)!r}, 'w')\nclass Evil: pass\n")
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody", **settings}))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    assert not touched.exists()


# --- nothing is written or read elsewhere -------------------------------------------------------
