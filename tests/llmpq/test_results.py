"""The output file: nothing lost before there is something new, odd files, full disks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq.results import Result, ResultFile
from quant.errors import InputError

RESULT = Result("a", "text \u2028 ünïcode", (1, 2), "stop")


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    with ResultFile(path) as output:
        output.write(RESULT)
        (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
        assert json.loads(line) == {
            "custom_id": "a",
            "text": RESULT.text,
            "token_ids": [1, 2],
            "finish_reason": "stop",
            "error": None,
        }


def test_old_results_stay_until_the_first_new_one(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("old\n")
    with ResultFile(path, overwrite=True):
        assert path.read_text() == "old\n"
    assert path.read_text() == "old\n"
    with ResultFile(path, overwrite=True) as output:
        output.write(RESULT)
        output.write(RESULT)
    assert path.read_text(encoding="utf-8").count("\n") == 2


def test_devices_take_results_too() -> None:
    with ResultFile(Path("/dev/null")) as output:
        output.write(RESULT)
    assert Path("/dev/null").read_text() == ""


def test_a_full_disk_is_one_message() -> None:
    with pytest.raises(InputError, match="No space left"), ResultFile(Path("/dev/full")) as output:
        output.write(RESULT)
