"""Processes of a local Ray as forks of one that has imported torch and transformers already.

One that starts by itself imports them for seconds, and every stage is a process. Ray starts our own
program, `llmpq/remote/setup_worker.py`, in place of each, which asks the prepared process for a
fork. That one runs this file by its path.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

from actors.processes.device import read_variables_again
from llmpq.remote.prepared_imports import prepare
from llmpq.remote.setup_worker import OOM_SCORE

_MOST_BYTES = 1 << 20
"""Most bytes of a worker's arguments and environment."""

_DONE = b"done"

_PR_SET_PDEATHSIG = 1
"""Of Linux, <sys/prctl.h>."""

SETUP_PROGRAM = str(Path(__file__).with_name("setup_worker.py"))
"""The program that has workers forked, in place of Ray's own."""

SET_UP = {"setup_worker_path": SETUP_PROGRAM}
"""Argument of a Ray node that is started by itself."""


class WorkerForks:
    """The prepared process, which takes seconds to be ready and answers then; until `close`.

    It has a session of its own, and ends with all its forks when this process does.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmpq-")  # the user's own, 0700
        self._address = Path(self._folder.name, "workers")
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._address))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | path | environment,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return str(self._address)

    @property
    def runtime_env(self) -> dict[str, str]:
        """What a Ray that was started otherwise has to be told for its workers to be forks."""
        program = [sys.executable, "-I", "-S", SETUP_PROGRAM, "call", self.address]
        return {"py_executable": shlex.join(program)}

    def ask(self, function: str, *arguments: object) -> Callable[[], bool]:
        """Have a fork call `function`, as "module:name", once all is imported. What is returned
        waits for that, and tells whether it came to its end without an error.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):
            connection.connect(str(self._address))
            connection.send(json.dumps([function, arguments]).encode())

        def is_done() -> bool:
            with connection, suppress(OSError):
                return connection.recv(16) == _DONE
            return False

        return is_done

    def close(self) -> None:
        """End the prepared process, and with it all its forks."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def serve(listener: socket.socket) -> None:
    """Fork a worker for every connection; end with all of them when stdin is closed."""
    gc.disable()  # while hundreds of modules are imported that all stay
    prepare()
    gc.enable()
    gc.freeze()  # a fork that searches for garbage would copy all pages of what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            return
        connection, _ = listener.accept()
        parent = os.getpid()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # Ray ends the whole group of a worker that has ended
            end_with(parent)
            do_what_is_asked(connection)
        connection.close()


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its `parent` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def do_what_is_asked(connection: socket.socket) -> None:
    """Call a function for `WorkerForks.ask`, or become a worker for `setup_worker.call`."""
    message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    if files:
        connection.send(b"forked")  # it stays open as long as this process lives
        become_worker(message, files)
    function, arguments = json.loads(message)
    resolve_name(function)(*arguments)
    connection.send(_DONE)
    sys.exit()


def become_worker(message: bytes, files: list[int]) -> None:
    """Run the program that a caller was asked for, in its folder, with all that it has."""
    folder, nice, score, count, *words = [os.fsdecode(word) for word in message.split(b"\0")]
    sys.argv[:] = words[: int(count)]
    os.environ.clear()
    os.environ.update(word.partition("=")[::2] for word in words[int(count) :])
    os.chdir(folder)
    os.setpriority(os.PRIO_PROCESS, 0, int(nice))
    with suppress(OSError):
        Path(OOM_SCORE).write_text(score)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    read_variables_again()
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
