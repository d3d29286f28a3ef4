"""The wire that stress runs play between two machines, and, where namespaces may be made, a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stress.emulated_link import QUEUE_S, Wire
from tests.paths import ROOT

_TRIED = ["unshare", "--net", "--mount", "--uts", "true"]


def why_not() -> str | None:
    """Why no namespaces can be made here."""
    programs = [name for name in ("ip", "nsenter", "unshare", "openssl") if not shutil.which(name)]
    if programs:
        return f"no {' '.join(programs)} here"
    if os.geteuid() != 0 or subprocess.run(_TRIED, capture_output=True, check=False).returncode:
        return "network namespaces are not allowed here"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    return None


def arrivals(wire: Wire, times: list[float]) -> list[bytes]:
    """What has arrived at each of `times`."""
    reading, wire.to = os.pipe()
    os.set_blocking(reading, False)
    found = []
    for now in times:
        wire.give(now)
        try:
            found.append(os.read(reading, 1 << 16))
        except BlockingIOError:
            found.append(b"")
    os.close(reading)
    os.close(wire.to)
    return found


def test_packets_come_after_their_bytes_and_the_delay() -> None:
    """At 100 bytes a second 4 bytes take 40 ms, and a delay of a second follows."""
    wire = Wire(-1, 1.0, 100.0, 0.0)
    wire.take(b"abcd", 5.0)
    wire.take(b"efgh", 5.0)
    assert arrivals(wire, [6.039, 6.041, 6.079, 6.081]) == [b"", b"abcd", b"", b"efgh"]


def test_what_would_wait_too_long_is_lost() -> None:
    wire = Wire(-1, 0.0, 100.0, 0.0)
    for _ in range(100):
        wire.take(b"x", 0.0)
    assert len(wire.packets) == QUEUE_S * 100 + 1


def test_a_share_is_lost() -> None:
    wire = Wire(-1, 0.0, 1e9, 0.5)
    for _ in range(1000):
        wire.take(b"x", 0.0)
    assert 350 < len(wire.packets) < 650
    assert not Wire(-1, 0.0, 1e9, 1.0).packets


@pytest.mark.rare
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.parametrize("part", ["jobs", "tls"])
def test_jobs_over_two_machines_have_their_tokens(part: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.stress.two_machines", "--only", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rows as on one machine") == 2
