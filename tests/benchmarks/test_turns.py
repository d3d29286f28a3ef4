"""Contestants of a benchmark that take turns."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import lab
from benchmarks.lab import Contestant, ContestantError, process_tree
from tests.paths import ROOT

END_S = 20.0
SPINS = """
import subprocess, sys, threading
from benchmarks.lab import serve
if sys.argv[1:] != ["alone"]:
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()
def run(prompts):
    print("what a library says")
    if [] in prompts:
        raise ValueError("an empty prompt")
    return sum(map(len, prompts))
serve(run, "two threads")
"""


@pytest.fixture(autouse=True)
def _no_timers_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "SETTLE_S", 0.02)


def contestant(tmp_path: Path, name: str, program: str = SPINS, *arguments: str) -> Contestant:
    command = [sys.executable, "-c", program, *arguments]
    return Contestant(name, command, {"PYTHONPATH": str(ROOT)}, tmp_path / f"{name}.log")


def cpu_ticks(pids: list[int]) -> list[int]:
    """User and system time of each process."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [int(fields[11]) + int(fields[12]) for fields in stats]


def wait_for_end(pid: int) -> None:
    """Fail where a process goes on."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([process], [], [], END_S)
    os.close(process)
    assert ready, f"process {pid} goes on"


def test_who_has_no_turn_takes_no_time(tmp_path: Path) -> None:
    """Of threads and child processes that spin, too."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(contestant(tmp_path, name)) for name in ("first", "second")
        )
        tree = process_tree(first.pid)
        assert len(tree) == 2
        before = cpu_ticks(tree)
        assert second.run([[1, 2], [3, 4]], 2).tokens == 4
        assert cpu_ticks(tree) == before
        while not all(now > then for now, then in zip(cpu_ticks(tree), before, strict=True)):
            assert first.run([[5, 6]], 2).tokens == 2
        assert first.what == "two threads"
    for pid in tree:
        wait_for_end(pid)


def test_less_work_than_asked_for_is_an_error(tmp_path: Path) -> None:
    lazy = contestant(tmp_path, "lazy", SPINS, "alone")
    with pytest.raises(ContestantError, match="lazy made 3 tokens of 2 prompts, not 4"), lazy:
        lazy.run([[1], [2, 3]], 2)


def test_a_contestant_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    weak = contestant(tmp_path, "weak", SPINS, "alone")
    with pytest.raises(ContestantError, match=r"(?s)weak ended.*an empty prompt"), weak:
        weak.run([[]], 1)
    unready = contestant(tmp_path, "unready", "raise SystemExit('no such model')")
    with pytest.raises(ContestantError, match=r"(?s)unready ended.*no such model"), unready:
        pass


def test_a_contestant_dies_with_its_race(tmp_path: Path) -> None:
    """Also where it stands still and the race is killed at once."""
    race = (
        "import os, sys\nfrom pathlib import Path\nfrom benchmarks.lab import Contestant\n"
        f"program = {SPINS!r}\n"
        "command = [sys.executable, '-c', program, 'alone']\n"
        f"with Contestant('only', command, {{}}, Path({str(tmp_path / 'log')!r})) as only:\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(only.pid))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", race], environment)
    assert ended == -signal.SIGKILL
    wait_for_end(int((tmp_path / "pid").read_text()))
