"""Small random models and pipelines of them, shared by the tests."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import signal
import tempfile
from contextlib import ExitStack, closing
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from llmpq.remote.worker_forks import WorkerForks
from tests.made_once import FOLDER

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Workers that Ray starts before anyone asks are of no use: those of tests are forks.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Plans must not depend on the machine.
os.environ.setdefault("LLMPQ_NO_MEASURING", "1")
# Ray gives workers the last place, behind the other process of tests that does not wait for them.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell that starts tests in the background has them ignore SIGINT, and so all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

OWN_FOLDER: str | None = None
"""What this process made for temporary files, its own and those of all processes that it starts."""


def _has_room(folder: Path) -> bool:
    """Whether `folder` has ten times the 0.4 GB that tests were seen to write."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 4 << 30


# A disk takes 3 ms for each file that is made safe, memory nothing.
if "TMPDIR" not in os.environ and _has_room(MEMORY := Path("/dev/shm")):
    OWN_FOLDER = tempfile.mkdtemp(prefix="llmpq-", dir=MEMORY)
    os.environ["TMPDIR"] = OWN_FOLDER
    tempfile.tempdir = None  # it may have been asked for already
    # At the end of the process, behind multiprocessing, which has a folder of its own there.
    Finalize(None, shutil.rmtree, (OWN_FOLDER, True), exitpriority=-200)

USER_CACHE = tempfile.mkdtemp(prefix="llmpq-test-cache-")
"""What this process and those it starts take for the user's cache folder."""
os.environ["XDG_CACHE_HOME"] = USER_CACHE


settings.register_profile("llmpq", deadline=None)  # a slow machine is no fault of an example
settings.load_profile("llmpq")

gc.disable()  # next to nothing of what is imported and collected is garbage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The wheel comes first: at the end of all, one process would build it and the others wait."""
    items.sort(key=lambda item: item.path.name != "test_wheel.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: no search for garbage need look through it."""
    given = getattr(session.config, "workerinput", {})
    if "shared_folder" in given:
        os.environ[FOLDER] = given["shared_folder"]
        os.environ["NUMBA_CACHE_DIR"] = str(Path(given["shared_folder"], "loops"))
    gc.freeze()
    gc.enable()


SHARED = ExitStack()
"""What processes of tests that run beside each other share."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: Any, specs: list[Any]) -> None:
    """Have all processes of pytest-xdist, and Ray's workers of theirs, be forks of one."""
    folder = SHARED.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
    forks = SHARED.enter_context(closing(WorkerForks({})))
    config.shared = {"shared_folder": folder, "worker_environment": forks.runtime_env}
    program = Path(__file__).with_name("forked_process.py")
    for spec in specs:
        spec.python = f"{forks.runtime_env['py_executable']} {shlex.quote(str(program))}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist what all of them share, compiled loops too."""
    node.workerinput.update(node.config.shared)


def pytest_unconfigure(config: pytest.Config) -> None:
    SHARED.close()
    shutil.rmtree(USER_CACHE, ignore_errors=True)
    if OWN_FOLDER is not None and hasattr(config, "workerinput"):  # which ends without finalizers
        shutil.rmtree(OWN_FOLDER, ignore_errors=True)
