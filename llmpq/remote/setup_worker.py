"""The program that asks the prepared process for a worker, and stays as long as that lives; where
there is none to fork, it becomes Python.

A Ray that a run starts for itself has it in place of its worker program. Other ones may have it in
place of their `setup_worker.py`, which imports Ray for every worker, only to become the
`py_executable` of the worker's runtime environment; that is this program too. It is run by its
path, and imports little.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # this folder, whose names are no packages

import socket
from contextlib import suppress

OOM_SCORE = "/proc/self/oom_score_adj"

WORKERS = "LLMPQ_WORKERS"
"""The variable with the address of what workers are forks of, in a Ray that is a run's own."""

OWN_PROGRAM = "LLMPQ_RAY_WORKER"
"""The variable with Ray's program, in whose place such a Ray starts this one."""


def set_up(arguments: list[str]) -> None:
    """Do as Ray's `setup_worker.py`, which it is left to where the worker is none to fork."""
    import argparse
    import json
    import runpy
    import shlex

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, rest = parser.parse_known_args(arguments)
    context = json.loads(options.serialized_runtime_env_context)
    command = shlex.split(context.get("py_executable") or "")
    if command[-2:-1] != ["call"]:
        sys.argv[:] = [os.path.join(os.path.dirname(rest[0]), "setup_worker.py"), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    os.environ.update({k: os.path.expandvars(v) for k, v in context["env_vars"].items()})
    call(command[-1], rest)


def call(address: str, arguments: list[str]) -> None:
    """Have a worker forked, and stay as long as it lives; become one where that fails."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        with open(OOM_SCORE) as file:
            score = file.read().strip()
        own = [os.getcwd(), str(os.nice(0)), score, str(len(arguments))]
        variables = [f"{name}={value}" for name, value in os.environ.items()]
        message = os.fsencode("\0".join([*own, *arguments, *variables]))
        socket.send_fds(connection, [message], [0, 1, 2])
        if connection.recv(16):
            connection.recv(1)  # nothing comes but its end
            return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    if sys.argv[1] == "call":
        call(sys.argv[2], sys.argv[3:])
    elif WORKERS in os.environ:
        call(os.environ.pop(WORKERS), [os.environ.pop(OWN_PROGRAM), *sys.argv[1:]])
    else:
        set_up(sys.argv[1:])
