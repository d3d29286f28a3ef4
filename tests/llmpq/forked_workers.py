"""Ray workers of tests as those of a local run are: forks of one process (`WorkerForks`).

Where a test starts Ray's nodes itself, this file sets their workers up, and need not import Ray for
that.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import sys
from pathlib import Path

SET_UP = {"setup_worker_path": __file__}
"""Argument of a Ray node."""


def set_up(arguments: list[str]) -> None:
    """Do as Ray's `setup_worker.py`, which it is left to where the worker is none to fork."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, rest = parser.parse_known_args(arguments)
    context = json.loads(options.serialized_runtime_env_context)
    command = shlex.split(context.get("py_executable") or "")
    if command[-2:-1] != ["call"]:
        sys.argv[:] = [str(Path(rest[0]).with_name("setup_worker.py")), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    os.environ.update({k: os.path.expandvars(v) for k, v in context["env_vars"].items()})
    os.execv(command[0], [*command, *rest])


if __name__ == "__main__":
    set_up(sys.argv[1:])
