"""Faults are one line, whose traceback is kept in a file; `--verbose` shows it, and all else."""

from __future__ import annotations

import errno
import re
import tempfile
import warnings
from pathlib import Path

import pytest
from ray.exceptions import RaySystemError, RayTaskError

from llmpq.cli.common import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, run_command
from llmpq.cli.main import SUBCOMMANDS, main
from llmpq.cli.parser import Parser
from llmpq.remote.words import is_verbose
from quant.common.errors import DeviceError


def raising(error: Exception) -> int:
    raise error


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ask_for_all() -> None:
    Parser().parse_args(["--verbose"])


def test_a_fault_is_one_line_that_names_the_file_with_its_traceback(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("llmpq run", lambda: raising(KeyError("stage"))) == EXIT_FAILED
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"llmpq run: a fault of llmpq: KeyError: 'stage' \(its traceback is in (\S+)\); run again "
        r"with --verbose to see all, and please report it\n",
        line,
    )
    (file,) = kept.glob("llmpq-fault-*.txt")
    assert str(file) in line
    assert "Traceback" in file.read_text()
    assert "in raising" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


def test_where_no_file_can_be_written_the_line_stands_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert run_command("llmpq run", lambda: raising(ValueError("odd\nand long"))) == EXIT_FAILED
    assert capsys.readouterr().err.startswith(
        "llmpq run: a fault of llmpq: ValueError: odd; run again"
    )


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RaySystemError("GCS is gone\nmore"), "failed: Ray: RaySystemError: System error: GCS is"),
        (RayTaskError("f", "ray::f()\n  File x\nValueError: no", ValueError("no")),
         "a fault of llmpq in a process of Ray: ValueError: no"),
        (OSError(errno.ENOSPC, "No space left on device"), "failed: OSError: [Errno 28] No space"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("kept")
def test_rays_and_the_machines_faults_are_called_so(
    error: Exception, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("llmpq run", lambda: raising(error)) == EXIT_FAILED
    line = capsys.readouterr().err
    assert line.startswith(f"llmpq run: {wanted}")
    assert line.count("\n") == 1


@pytest.mark.usefixtures("kept")
def test_verbose_shows_tracebacks_and_rays_words_and_ends_with_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = DeviceError("Ray did not start: reasons")
    error.add_note("Ray's own words:\na screen of advice")
    assert run_command("llmpq run", lambda: raising(error)) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == (
        "llmpq run: error: Ray did not start: reasons (--verbose shows Ray's own words)\n"
    )
    ask_for_all()
    assert run_command("llmpq run", lambda: raising(error)) == EXIT_BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith("llmpq run: error: Ray did not start: reasons\nTraceback")
    assert shown.endswith("a screen of advice\n")
    assert not is_verbose()


def test_verbose_shows_the_traceback_of_a_fault_in_place_of_a_file(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_for_all()
    assert run_command("llmpq run", lambda: raising(KeyError("stage"))) == EXIT_FAILED
    assert "in raising" in capsys.readouterr().err
    assert not list(kept.iterdir())


def test_warnings_of_libraries_are_not_for_users() -> None:
    theirs = "/usr/lib/python3/site-packages/torch/nn.py"
    shown: list[str] = []

    def warn() -> int:
        for text, kind, file in (
            ("ours", UserWarning, "llmpq/run/run.py"),
            ("old", FutureWarning, "<frozen importlib>"),
            ("theirs", UserWarning, theirs),
        ):
            shown.append(warnings.formatwarning(text, kind, file, 1))
        return EXIT_DONE

    assert run_command("llmpq run", warn) == EXIT_DONE
    assert shown == ["llmpq run: warning: ours\n", "", ""]
    ask_for_all()
    assert run_command("llmpq run", warn) == EXIT_DONE
    assert all(shown[3:])


@pytest.mark.parametrize("words", [*SUBCOMMANDS, "lengths train", "lengths evaluate"])
def test_every_command_offers_it(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    assert "--verbose" in capsys.readouterr().out
