"""Processes of tokenizers as forks of one that has imported transformers already.

One that starts by itself imports it for 0.8 s, and every run of rows has one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

PROGRAM = "tokenizer_child.py"


class ForkedTokenizer:
    """What `JsonChild` asks of a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.llmpq.prepared_tokenizer"])
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        with patch.dict(os.environ, {**environment, **path}, clear=True):
            forkserver.ensure_running()
        tasks, self.stdin = context.Pipe(duplex=False)
        self.stdout, answers = context.Pipe(duplex=False)
        given = list(arguments), dict(environment), tasks, answers
        self._process = context.Process(target=become, args=given, daemon=True)
        self._process.start()
        tasks.close()
        answers.close()
        self.pid, self.kill = self._process.pid, self._process.kill

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def start(command: Sequence[str], **options: Any) -> ForkedTokenizer | subprocess.Popen[bytes]:
    """Fork a tokenizer; start any other program as `subprocess.Popen` does."""
    executable, alone, *arguments = command
    if (executable, alone, Path(arguments[0]).name) == (sys.executable, "-P", PROGRAM):
        return ForkedTokenizer(arguments, options["env"])
    return subprocess.Popen(command, **options)


def become(
    arguments: Sequence[str], environment: Mapping[str, str], tasks: Connection, answers: Connection
) -> None:
    """Run the program of `arguments`, which has nothing else of the process that asked for it."""
    with open(os.devnull, "wb") as nowhere:
        for number, file in enumerate((tasks, answers, nowhere)):
            os.dup2(file.fileno(), number)
    tasks.close()
    answers.close()
    sys.stdin = open(0)  # noqa: SIM115  (until the process ends)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")
