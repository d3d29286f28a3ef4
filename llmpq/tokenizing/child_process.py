"""Processes of the driver's own that are asked by lines of JSON: starting and ending one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from quant.common.errors import DeviceError
from quant.common.text import SECRET_VARIABLES


def start_child(program: Path, settings: Mapping[str, Any], does: str) -> subprocess.Popen[bytes]:
    """Start the Python file `program` with `settings` as JSON in its only argument.

    What it asks for comes to its standard input, which does not block; it has no secrets, no
    network and no threads of its own. `does` tells in a message what it is for. Raises
    `DeviceError` where it cannot be started.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", str(program), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Rust reports every panic there
            bufsize=0,
            env=_environment(),
        )
    except OSError as error:
        raise DeviceError(
            f"the process that {does} cannot be started: {error.strerror}; free memory or processes"
        ) from error
    os.set_blocking(_fd(process.stdin), False)
    return process


def pipes_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The file descriptors of its input and its output."""
    return _fd(process.stdin), _fd(process.stdout)


def end_child(process: subprocess.Popen[bytes]) -> None:
    """End it at once, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _environment() -> dict[str, str]:
    """The environment of the process: no secrets, no network, no threads, no reports of panics."""
    kept = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RUST_BACKTRACE": "0",
    }


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()
