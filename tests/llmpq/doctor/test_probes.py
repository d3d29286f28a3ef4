"""What `llmpq doctor` sees: drivers by their words, crashing libraries, folders, limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmpq.cli.doctor import doctor_main
from llmpq.cli.main import main
from llmpq.doctor import probes
from llmpq.doctor.child import said_of
from llmpq.doctor.facts import Library, Torch
from llmpq.doctor.probes import asked, driver_here, host_here
from quant.common.errors import DeviceError
from quant.common.host_memory import memory_limit_bytes
from quant.common.units import GIB, MIB
from tests.llmpq.doctor.machines import CUDA_13, P100, WITHOUT_GPU, driver, with_gpus

HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""


def answer_as(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put an `nvidia-smi` with this body first in PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_driver_is_read_from_what_nvidia_smi_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = "GPU-1, 16384, Tesla P100-PCIE-16GB\\nGPU-2, 15360, Tesla T4\\nGPU-3, 4096, Tesla K80"
    body = f"case $1 in --query*) printf '{rows}\\n';; *) cat <<'E'\n{HEAD}E\n;; esac"
    answer_as(monkeypatch, tmp_path, body)
    found = driver_here()
    assert (found.version, found.cuda, found.said) == ("550.90.07", (12, 4), ())
    assert [each.capability for each in found.gpus] == [(6, 0), (7, 5), None]
    assert found.gpus[2].problem is not None


def test_what_a_broken_driver_says_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    answer_as(monkeypatch, tmp_path, f"echo '{said}'; exit 18")
    found = driver_here()
    assert found.gpus == ()
    assert found.said == (f"nvidia-smi says: {said}",)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def test_a_library_that_crashes_its_process_is_an_error() -> None:
    crashed = asked(Torch, "torch", command=shell("echo bad code >&2; kill -ILL $$"))
    assert crashed.error == "its process was ended by SIGILL: bad code"
    left = asked(Library, "numba", command=shell("echo ImportError: no llvm >&2; exit 3"))
    assert left.error == "its process ended with code 3: ImportError: no llvm"
    assert asked(Library, "ray", command=("/no/such/python",)).error is not None


def test_a_library_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", probes.CHILD_S)

    monkeypatch.setattr(subprocess, "run", late)
    assert asked(Library, "ray").error == "no answer within 120 s"


def test_words_of_libraries_are_kept_apart_from_the_answer() -> None:
    said = '{"version": "1", "cuda": [12, 6], "targets": ["sm_60"], "available": true}'
    found = asked(Torch, "torch", command=shell(f"echo a banner; echo '{said}'"))
    assert found == Torch("1", cuda=(12, 6), targets=("sm_60",), available=True)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("libcudart.so.13:\n cannot open"), "OSError: libcudart.so.13: cannot open"),
        (DeviceError("bitsandbytes is 0.45"), "bitsandbytes is 0.45"),
    ],
)
def test_what_a_library_raises_is_its_error(error: Exception, said: str) -> None:
    def trial() -> dict[str, object]:
        raise error

    assert said_of("numpy", trial)["error"] == said
    assert said_of("no-such-package", trial) == {}


def test_the_child_tries_a_real_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "numba.py").write_text("raise ImportError('of the folder, not of the library')")
    monkeypatch.chdir(tmp_path)
    found = asked(Library, "numba")
    assert (found.error, found.complaints) == (None, ())
    assert found.version is not None


def test_folders_that_cannot_be_made_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new" / "deep"))
    found = host_here()
    assert not found.cache.writable
    assert found.ray.writable
    assert found.ray.free_bytes > 0
    assert not (tmp_path / "new").exists()


def test_a_user_without_passwd_entry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {line.split(":")[2] for line in Path("/etc/passwd").read_text().splitlines()}
    stranger = next(number for number in range(54321, 60000) if str(number) not in taken)
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert not host_here().has_entry


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "4294967296", "a/b/memory.max": "max"}, 4 * GIB),
        ("0::/pod/own\n", {"memory.max": "1073741824\n"}, GIB),  # the path on the host
        ("5:cpu,memory:/d\n", {"memory/d/memory.limit_in_bytes": "536870912"}, 512 * MIB),
        ("5:cpu:/d\n0::/\n", {"d/memory.max": "1"}, None),
    ],
    ids=["parent", "container", "version-1", "none"],
)
def test_limits_of_control_groups_are_read(
    own: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit_bytes(tmp_path / "cgroup", tmp_path / "own") == limit


Called = Callable[..., int]


@pytest.mark.parametrize(
    ("facts", "code"),
    [(WITHOUT_GPU, 0), (with_gpus(driver((13, 0), P100), CUDA_13), 1)],
    ids=["in-order", "P100"],
)
def test_the_command_prints_findings_and_leaves_with_their_code(
    facts: object, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "facts_here", lambda _: facts)
    assert doctor_main([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} <= {"works", "note", "fails", "->"}
    assert lines[-1].startswith("runs can start here") == (code == 0)
    if code:
        (remedy,) = [line.strip() for line in lines if line.strip().startswith("->")]
        assert remedy.endswith("https://download.pytorch.org/whl/cu126 'llmpq[cuda126]'")
    assert doctor_main(["--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["works"] == (code == 0)
    assert len(shown["findings"]) == len([line for line in lines[:-1] if "->" not in line])


@pytest.mark.rare
def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert code == (0 if shown["works"] else 1)
    assert shown["facts"]["torch"]["version"].startswith("2.")
    assert shown["facts"]["host"]["python"].endswith(sys.executable)
