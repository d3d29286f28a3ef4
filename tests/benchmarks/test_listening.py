"""A local run: nothing of it listens for other machines, and its token is the user's own."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.stress.listening import Listening
from tests.paths import ROOT


@pytest.mark.rare  # a run of its own, whose sockets answer nothing until time is up
def test_nothing_of_a_local_run_is_open_to_other_machines(tmp_path: Path) -> None:
    """Neither driver nor stages, which listen for each other, nor Ray."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.stress.listening"],
        env=variables | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        umask=0o022,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = re.findall(r"^\| (.+?) \| (\S+):(\d+) \| (.+?) \|$", done.stdout, re.MULTILINE)
    assert {address for _, address, _, _ in rows} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    ours = [(name, paths) for name, _, _, paths in rows if name in ("driver", "stage")]
    assert ours == [("driver", "-"), *[("stage", "-")] * 6], "of Ray and of gloo"
    token = tmp_path / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.2", False),
        ("::ffff:192.0.2.2", False),
    ],
)
def test_what_is_loopback(address: str, is_loopback: bool) -> None:
    assert Listening("x", address, 1, ()).on_loopback == is_loopback
