"""Checkpoints behind URLs: downloaded whole, once for each state of the store, and told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from llmpq.model_check import checked_shape
from quant.checkpoint.model_reference import model_at, resolve
from quant.common import url_files
from quant.common.errors import CheckpointError
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny

URL = "memory://models/tiny"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_at.cache_clear()
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_a_folder_there_is_a_folder_here(memory: Any, tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny", CONFIGS["llama"])
    (tmp_path / "tiny" / "README.md").write_text("nothing that a model needs")
    memory.put(str(tmp_path / "tiny"), "/models/tiny", recursive=True)
    folder = resolve(URL)
    expected = {path.name for path in (tmp_path / "tiny").iterdir()} - {"README.md"}
    assert {path.name for path in folder.iterdir()} == expected
    for name in expected:
        assert (folder / name).read_bytes() == (tmp_path / "tiny" / name).read_bytes()
    assert checked_shape(URL) == checked_shape(tmp_path / "tiny")
    assert resolve(f"{URL}/") == folder
    model_at.cache_clear()
    (folder / "config.json").unlink()  # as where a download was cut off
    assert resolve(URL) == folder
    assert (folder / "config.json").exists()
    memory.pipe_file("/models/tiny/config.json", b"{}")
    model_at.cache_clear()
    assert resolve(URL) != folder


def test_what_is_no_model(memory: Any) -> None:
    with pytest.raises(CheckpointError, match=f"model {URL}: .*no such file, or no such bucket"):
        resolve(URL)
    memory.pipe_file("/models/tiny/notes.md", b"nothing")
    with pytest.raises(CheckpointError, match=f"model {URL}: .*no file of that"):
        resolve(URL)
    with pytest.raises(CheckpointError, match="Protocol not known: nosuch"):
        resolve("nosuch://models/tiny")
