"""Files that one process of a run of tests makes, and the others take."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = "LLMPQ_FOLDER_OF_TESTS"
"""Variable of the folder that all processes share, where there are several."""


def made_once(what: str, ending: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` wrote in some process; `what` tells all that its content depends on."""
    folder = Path(os.environ.get(FOLDER) or _own_folder().name)
    path = folder / f"{sha256(what.encode()).hexdigest()}{ending}"
    with open(path.with_suffix(".lock"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # whoever comes meanwhile waits, and has it
        if not path.exists():
            part = path.with_name(f"{os.getpid()}-{path.name}")
            make(part)
            os.replace(part, path)
    return path


@functools.cache
def _own_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="llmpq-")
