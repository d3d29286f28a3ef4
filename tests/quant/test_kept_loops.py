"""Compiled loops on disk: found by another closure of the same code and numbers, by no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.kept_loops import described
from quant.numba_loops import compiled_loop
from tests.paths import ROOT

_ADDED = 1


def _loop(factor: int) -> Any:
    def scale(number: Any) -> Any:
        return number * factor

    inner = compiled_loop(scale, parallel=False)

    def scale_all(numbers: Any) -> None:
        for i in range(len(numbers)):
            numbers[i] = inner(numbers[i]) + _ADDED

    return compiled_loop(scale_all, parallel=False)


def _run(factor: int) -> tuple[list[float], int]:
    """What the loop makes of 1 and 2, and how often numba found it on disk."""
    loop, numbers = _loop(factor), np.array([1.0, 2.0])
    loop(numbers)
    return numbers.tolist(), sum(loop.stats.cache_hits.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "loops"))
    return tmp_path / "loops"


def test_a_loop_is_compiled_once_for_all_closures_of_its_numbers(folder: Path) -> None:
    assert _run(3) == ([4.0, 7.0], 0)
    assert _run(3) == ([4.0, 7.0], 1)
    assert _run(5) == ([6.0, 11.0], 0)  # the factor is a number within the loop that is called
    assert not list(folder.glob("*.lock"))


def test_globals_that_a_loop_names_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described(_loop(3))
    monkeypatch.setitem(globals(), "_ADDED", 2)
    assert described(_loop(3)) != before


class _Writer:
    def instructions(self) -> int:
        return 1


def _other_instructions(writer: _Writer) -> int:
    return 2


def test_methods_that_write_instructions_are_part_of_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Writer, "__module__", "quant.backends.any")
    before = described(lambda: _Writer().instructions())
    monkeypatch.setattr(_Writer, "instructions", _other_instructions)
    assert described(lambda: _Writer().instructions()) != before


NAMES_INSTRUCTIONS = """
import sys
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from quant.numba_loops import compiled_loop

def code(context, builder, signature, arguments):
    builder.asm(ir.FunctionType(ir.VoidType(), []), "nop", "", [], True)
    return context.get_dummy_value()

wait = intrinsic(lambda context: (types.void(), code))

def waited(number):
    wait()
    return number

inner, more = compiled_loop(waited, parallel=False), int(sys.argv[1])
print(compiled_loop(lambda number: inner(number) + more, parallel=False)(1))
"""


def test_another_process_calls_a_kept_loop_that_names_instructions(folder: Path) -> None:
    for more in (1, 2):  # the second compiles the caller alone
        command = [sys.executable, "-c", NAMES_INSTRUCTIONS, str(more)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"{1 + more}\n"), done.stderr


CALLS_A_CLOSURE = """
import os, sys
from quant.numba_loops import compiled_loop

def loop(factor):
    def scale(number):
        total = 0.0
        for i in range(factor):
            for _ in range(int(number)):
                total += 1 / (1 + i * 0)
            try:  # which is not written out within the caller
                if total < 0: raise ValueError
            except Exception:
                total = 0.0
        return total

    inner = compiled_loop(scale, parallel=False)
    return compiled_loop(lambda number: inner(number) + 1, parallel=False)

how, *factors = sys.argv[1], *map(int, sys.argv[2:])
if how == "forked":
    for factor in factors:
        child = os.fork()
        if not child:
            loop(factor)(2.0)
            os._exit(0)
        os.waitpid(child, 0)
found = [loop(factor) for factor in factors]
print([each(2.0) for each in found], sum(sum(each.stats.cache_hits.values()) for each in found))
"""


@pytest.mark.parametrize("makers", ["alone 3, alone 5", "forked 3 5"])
def test_closures_that_other_processes_compiled_are_not_taken_for_one_another(
    folder: Path, makers: str
) -> None:
    # options are part of functions' names, in the order of a set
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    for arguments in [*makers.split(", "), "alone 3 5"]:
        command = [sys.executable, "-c", CALLS_A_CLOSURE, *arguments.split()]
        told = subprocess.check_output(command, cwd=ROOT, text=True, env=environment)
    assert told == "[7.0, 11.0] 2\n"


def test_nothing_is_taken_where_others_may_write_or_files_are_damaged(folder: Path) -> None:
    _run(3)
    folder.chmod(0o777)
    assert _run(3) == ([4.0, 7.0], 0)
    folder.chmod(0o700)
    for path in folder.iterdir():
        path.write_bytes(b"")
    assert _run(3) == ([4.0, 7.0], 0)
