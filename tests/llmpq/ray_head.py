"""A Ray head of a test's own, with its dashboard and a token, ended by its process id."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BIN = sysconfig.get_path("scripts")
RAY = str(Path(BIN) / "ray")
TOKEN = "0123456789abcdef" * 4
START_S = 90.0
STARTS = 3
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Head:
    """Address of its dashboard; variables for who talks to it; its files."""

    address: str
    environment: dict[str, str]
    folder: Path

    @property
    def cluster(self) -> str:
        """The address that `--address` takes."""
        return (self.folder / "ray" / "ray_current_cluster").read_text()

    def command(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """`llmpq run --submit` with `arguments`; both its streams are pipes."""
        command = [
            sys.executable,
            "-m",
            "llmpq.cli.run",
            "--submit",
            self.address,
            *arguments,
        ]
        return subprocess.Popen(
            command,
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, all of them different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextmanager
def ray_head() -> Iterator[Head]:
    """A head of two CPUs. Its temporary folder is its own, by Ray's variable for it: the jobs of a
    head join the Ray that was started last with the same one.
    """
    folder = Path(tempfile.mkdtemp(prefix="llmpq-ray-", dir="/tmp"))  # short: of sockets
    token = folder / "auth_token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    environment = os.environ | {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    try:
        address, process = _started(environment)
        try:
            yield Head(address, environment, folder)
        finally:
            _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(environment: dict[str, str]) -> tuple[str, subprocess.Popen[bytes]]:
    """The address of a head's dashboard, and the head. Somebody else may take a port that was free:
    then others are tried.
    """
    for _ in range(STARTS):
        port, dashboard, agent = free_ports(3)
        command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}"]
        command += ["--include-dashboard=true", f"--dashboard-port={dashboard}"]
        command += [f"--dashboard-agent-listen-port={agent}"]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # if we are killed
        )
        address = f"http://127.0.0.1:{dashboard}"
        if _answers(f"{address}/api/version", process):
            return address, process
        _end(process)
    raise AssertionError("no head of Ray starts")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    if not _ended_within(process, 60):
        process.kill()
        process.wait()


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Wait until something answers at `url`, be it that a token is missing; False where the head
    ends.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            _ended_within(process, 0.2)
    return False


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
