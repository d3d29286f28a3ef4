"""Other processes of a node that do the same work, as those of a pipeline's other stages."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pydantic import TypeAdapter

from actors.profiling.task import ProfileTask, measure
from quant.common.errors import DeviceError

_BEGUN = b"begun\n"
_TASKS = TypeAdapter(ProfileTask)
_ENDLESS_S = 1e9
"""JSON has no infinite numbers."""


@contextmanager
def others_busy(task: ProfileTask) -> Iterator[None]:
    """Have `task.beside` processes with this one's environment measure what `task` says, over and
    over. Raises `DeviceError` where one of them ends before this one is done.
    """
    command, path = [sys.executable, "-m", __name__], os.pathsep.join(filter(None, sys.path))
    others = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        for _ in range(task.beside)
    ]
    try:
        for number, each in enumerate(others, 1):
            assert each.stdin is not None
            with suppress(BrokenPipeError):  # it says nothing then
                own = replace(task, beside=0, seed=task.seed + number, budget_s=_ENDLESS_S)
                each.stdin.write(_TASKS.dump_json(own) + b"\n")
        for each in others:
            assert each.stdout is not None
            if each.stdout.readline() != _BEGUN:
                raise DeviceError("a process that was to be busy beside the measured one failed")
        yield
        if any(each.poll() is not None for each in others):
            raise DeviceError("a process that was busy beside the measured one ended; free memory")
    finally:
        for each in others:
            each.kill()
            each.wait()
            for pipe in (each.stdin, each.stdout):
                assert pipe is not None
                pipe.close()


def main() -> None:
    """Work until the process that started this one closes the pipe, also by its end."""
    task = _TASKS.validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(_BEGUN)
    sys.stdout.buffer.flush()
    for round_ in itertools.count():
        for _ in measure(replace(task, seed=task.seed + round_)):
            pass


def end_with_parent() -> None:
    """End this process when the input ends, which the one that started it holds."""
    while os.read(0, 1 << 16):  # sys.stdin must not be in use when this process ends by itself
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
