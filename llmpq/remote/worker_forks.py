"""Processes of a local Ray as forks of one that has imported torch and transformers already.

One that starts by itself imports them for seconds, and every stage is a process. Ray starts our own
program in Python's place (its `py_executable`), which asks the prepared process for a fork and
stays as long as that lives; where there is none, it becomes Python.

The file is run by its path, without this project, by the prepared process and by those who ask.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
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
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20
"""Most bytes of a worker's arguments and environment."""

_PREPARED = (
    *("asyncio", "google.protobuf.internal.builder", "jsonschema", "requests"),
    *("transformers.models.llama.modeling_llama", "actors.importance", "actors.stage.emulation"),
)

_PR_SET_PDEATHSIG = 1
"""Of Linux, <sys/prctl.h>."""

_OOM_SCORE = Path("/proc/self/oom_score_adj")


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
                [sys.executable, "-P", __file__, "serve", str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | path | environment,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def runtime_env(self) -> dict[str, str]:
        """What a Ray has to be told for its workers to be forks."""
        program = [sys.executable, "-I", "-S", __file__, "call", str(self._address)]
        return {"py_executable": shlex.join(program)}

    def close(self) -> None:
        """End the prepared process, and with it all its forks."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def serve(listener: socket.socket) -> None:
    """Fork a worker for every connection; end with all of them when stdin is closed."""
    prepare()
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
            become_worker(connection)
        connection.close()


def prepare() -> None:
    """Import what stages and Ray's workers do, but for Ray: that cannot be before a fork."""
    for name in _PREPARED:
        importlib.import_module(name)
    from quant.numba_loops import has_numba

    if has_numba():
        importlib.import_module("numba")
    assert "ray" not in sys.modules


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its `parent` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_worker(connection: socket.socket) -> None:
    """Run the program that the other side was asked for, in its folder, with all that it has."""
    message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
    connection.send(b"forked")  # it stays open as long as this process lives
    folder, nice, score, count, *words = [os.fsdecode(word) for word in message.split(b"\0")]
    sys.argv[:] = words[: int(count)]
    os.environ.clear()
    os.environ.update(word.partition("=")[::2] for word in words[int(count) :])
    os.chdir(folder)
    os.setpriority(os.PRIO_PROCESS, 0, int(nice))
    with suppress(OSError):
        _OOM_SCORE.write_text(score)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _read_variables_again()
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _read_variables_again() -> None:
    """Have libraries go by this process's variables: they have read those of another one."""
    torch: Any = sys.modules["torch"]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else os.cpu_count() or 1)
    if "numba" in sys.modules:
        settings: Any = sys.modules["numba"].config
        layer = settings.THREADING_LAYER
        settings.reload_config()
        settings.THREADING_LAYER = layer  # OpenMP's would set torch's threads too
        pool: Any = sys.modules["numba.np.ufunc.parallel"]  # has noted them by its own names
        pool.NUM_THREADS, pool.snt_check = pool.get_thread_count(), pool.gen_snt_check()


def call(address: str, arguments: list[str]) -> None:
    """Have a worker forked, and stay as long as it lives; become one where that fails."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        own = [os.getcwd(), str(os.nice(0)), _OOM_SCORE.read_text().strip(), str(len(arguments))]
        variables = [f"{name}={value}" for name, value in os.environ.items()]
        message = os.fsencode("\0".join([*own, *arguments, *variables]))
        socket.send_fds(connection, [message], [0, 1, 2])
        if connection.recv(16):
            connection.recv(1)  # nothing comes but its end
            return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "serve":
        serve(socket.socket(fileno=int(where)))
    else:
        call(where, rest)
