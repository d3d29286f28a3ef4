"""The Ray head that this process started: without its processes no local run can go on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

import ray

# isort: split
import psutil  # Ray brings it, and has just put it on the path

from quant.common.errors import HeadLostError

LOOK_S = 1.0  # between two looks at its processes

_NEEDED = {"raylet": "raylet", "gcs_server": "control service (GCS)"}


def ended_process() -> str | None:
    """Which process of this process's own Ray head has ended, and how; None while all live."""
    for kind, process in _started():
        if kind in _NEEDED and process.poll() is not None:
            code = process.returncode
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            return f"Ray's {_NEEDED[kind]} (process {process.pid}) has ended with {how}"
    return None


def _started() -> list[tuple[str, subprocess.Popen[bytes]]]:
    """The processes of the head, by Ray's name for their kind."""
    node = ray._private.worker._global_node
    kinds: list[tuple[str, Any]] = [] if node is None else list(node.all_processes.items())
    return [(kind, info.process) for kind, started in kinds for info in started]


def has_stage_environment() -> bool:
    """Whether workers of this process's own Ray head have the variables of stages without being
    given them: a runtime environment of each would need Ray's agent for that.
    """
    return bool(getattr(ray._private.worker._global_node, "has_stage_environment", False))


class Process(Protocol):
    """A process that is not mistaken for a later one with the same number, as psutil's are not."""

    def kill(self) -> None: ...


def below_head() -> list[Process]:
    """List the processes that those of the head have started."""
    found: list[Process] = []
    for _, process in _started():
        with suppress(psutil.Error):
            found += psutil.Process(process.pid).children(recursive=True)
    return found


def below_this() -> list[Process]:
    """List all processes below this one, those of a head that is only starting among them."""
    found: list[Process] = psutil.Process().children(recursive=True)
    return found


def end_all(processes: Iterable[Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def lost_message(ended: str) -> str:
    return f"{ended}; the Ray of a local run does not come back, so this run cannot go on"


def check_head() -> None:
    """Raise `HeadLostError` once a local Ray cannot serve any more."""
    ended = ended_process()
    if ended is not None:
        raise HeadLostError(lost_message(ended))
