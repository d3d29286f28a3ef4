"""Ray workers as forks of one process that has imported torch and transformers already.

A worker that starts by itself imports them for seconds, and every stage of a run is a worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOST_BYTES = 1 << 20
"""Most bytes of a worker's arguments and environment."""


START_S = 120.0


@contextmanager
def fork_server(folder: Path) -> Iterator[Path]:
    """Start the process that forks; yield the address of its socket in `folder`, not there yet."""
    address = folder / "workers"
    variables = {**os.environ, **shared_loops(address), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), address], stdin=subprocess.PIPE, env=variables
    )
    try:
        yield address
    finally:
        process.kill()
        process.communicate()


def shared_loops(address: Path) -> dict[str, str]:
    """Variables by which a process keeps what numba compiles beside the socket at `address`."""
    return {"NUMBA_CACHE_DIR": str(address.with_name("loops"))}


SET_UP = {"setup_worker_path": __file__}
"""Argument of a Ray node: this file sets its workers up, and need not import Ray for that."""


def forked_workers(address: Path) -> dict[str, str]:
    """The `runtime_env` of a Ray whose workers are forked, once something listens at `address`."""
    deadline = time.monotonic() + START_S
    while not address.exists():
        assert time.monotonic() < deadline, "the process to fork from does not listen"
        time.sleep(0.02)
    python = [sys.executable, "-S", "-E", str(Path(__file__))]
    return {"py_executable": " ".join([*python, str(address)])}


def serve(address: str) -> None:
    """Fork a worker for every connection."""
    prepare()
    gc.freeze()  # a fork that searches for garbage would copy all pages of what is imported
    assert "ray" not in sys.modules, "Ray cannot be imported before a fork"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
        os.rename(f"{address}.new", address)  # who sees it can connect
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become_worker(connection)
            connection.close()


def prepare() -> None:
    """Import and compile what takes long, with what Ray imports of others' packages."""
    import asyncio  # noqa: F401
    from unittest.mock import patch

    import google.protobuf.internal.builder  # noqa: F401
    import jsonschema  # noqa: F401
    import requests  # noqa: F401
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401

    from actors.attention.cpu import warm_up
    from actors.stage import emulation  # noqa: F401

    torch.set_num_threads(1)
    with patch("numba.set_num_threads"):  # it starts threads, which do not survive a fork
        for dtype in (torch.float32, torch.bfloat16):
            warm_up(dtype)


def become_worker(connection: socket.socket) -> None:
    """Run the program that the other side was asked for, in its folder, with all that it has."""
    import numba

    message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    folder, count, *words = [os.fsdecode(word) for word in message.split(b"\0")]
    sys.argv[:] = words[: int(count)]
    os.environ.clear()
    os.environ.update(word.split("=", 1) for word in words[int(count) :])
    os.chdir(folder)
    layer = numba.config.THREADING_LAYER
    numba.config.reload_config()  # it has read its variables where they were others
    numba.config.THREADING_LAYER = layer  # OpenMP's would set torch's threads too
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def call(address: str, arguments: list[str]) -> None:
    """Have a worker forked, and stay as long as it lives."""
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    message = os.fsencode("\0".join([os.getcwd(), str(len(arguments)), *arguments, *variables]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        socket.send_fds(connection, [message], [0, 1, 2])
        connection.recv(1)


def set_up(arguments: list[str]) -> None:
    """Do as Ray's `setup_worker.py`, which it is left to where the worker is none to fork."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, rest = parser.parse_known_args(arguments)
    context = json.loads(options.serialized_runtime_env_context)
    command = shlex.split(context.get("py_executable") or "")
    if command[-2:-1] != [__file__]:
        sys.argv[:] = [str(Path(rest[0]).with_name("setup_worker.py")), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    os.environ.update({k: os.path.expandvars(v) for k, v in context["env_vars"].items()})
    call(command[-1], rest)


if __name__ == "__main__":
    if Path(sys.argv[1]).suffix == ".py":
        set_up(sys.argv[1:])
    elif len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        call(sys.argv[1], sys.argv[2:])
