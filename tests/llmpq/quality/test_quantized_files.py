"""Where a quantized checkpoint is written: all of it or nothing, and over nothing else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from llmpq.quality.quantize import quantize_checkpoint
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import InputError
from quant.rounding import encoding
from tests.actors.models import save_tiny
from tests.llmpq.quality.test_quantize import CONFIGS, calibrated, make

pytestmark = pytest.mark.usefixtures("short_measurement")


def replaced(path: Path) -> None:
    (path / "made").mkdir()
    (path / "made" / "old").touch()
    (path / "made" / "config.json").write_text("{}")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", CONFIGS["llama"])
    replaced(tmp_path)
    saved = []

    def fill_up(tensors: object, path: Path, **_: object) -> None:
        saved.append(path)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(b"half")

    monkeypatch.setattr(encoding, "save_file", fill_up)
    with pytest.raises(InputError, match=r"cannot write .*made .*No space left on device"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "made", calibrated(), overwrite=True)
    assert len(saved) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["config.json", "old"]


def test_an_old_folder_gives_way(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", CONFIGS["llama"])
    replaced(tmp_path)
    with pytest.raises(InputError, match="exists already; name a new folder or pass --overwrite"):
        make(tmp_path / "model", tmp_path / "made")
    quantize_checkpoint(tmp_path / "model", tmp_path / "made", calibrated(), overwrite=True)
    assert not (tmp_path / "made" / "old").exists()
    assert Checkpoint(tmp_path / "made").keeps_codes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model"]


def test_nothing_but_another_model_is_overwritten(tmp_path: Path) -> None:
    """Neither folders around the model nor in it, nor what is no model."""
    outer = tmp_path / "outer"
    save_tiny(outer / "model", CONFIGS["llama"])
    (outer / "model" / "inner").mkdir()
    (tmp_path / "link").symlink_to(outer, target_is_directory=True)
    (tmp_path / "again").symlink_to("again")
    for folder in (outer, outer / "model" / "inner"):
        (folder / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").touch()
    before = sorted(tmp_path.rglob("*"))
    wrong = {
        outer: "one lies in the other",
        tmp_path: "one lies in the other",
        tmp_path / "link": "one lies in the other",
        tmp_path / "link" / "model": "is the model itself",
        outer / "model" / "inner": "one lies in the other",
        outer / "model" / "new" / "er": "one lies in the other",
        tmp_path / "notes": r"holds no config\.json: .*name another folder or remove it",
        outer / "config.json": r"holds no config\.json",
        tmp_path / "again": "cannot write",
    }
    for target, message in wrong.items():
        with pytest.raises(InputError, match=message):
            quantize_checkpoint(outer / "model", target, calibrated(), overwrite=True)
        assert sorted(tmp_path.rglob("*")) == before
