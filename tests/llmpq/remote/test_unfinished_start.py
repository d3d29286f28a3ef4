"""A start of Ray that is ended in its middle leaves no process behind, and ends no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmpq.remote import session

SLEEPING = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_what_was_started_ends_with_a_start_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(target: str) -> None:
        assert target == "local"
        started.append(subprocess.Popen(SLEEPING))
        raise SystemExit(15)

    monkeypatch.setattr(session, "_start", start)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = subprocess.Popen(SLEEPING)
    try:
        with pytest.raises(SystemExit), session.ray_session():
            pass
        assert started[0].wait(120) < 0
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
