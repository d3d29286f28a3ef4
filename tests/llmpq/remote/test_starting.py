"""A Ray that does not start is told in one line with the remedy, and started again if that helps.

The errors are those that Ray 2.60 raised when each was tried (`docs/reliability.md` has the list).
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import ray

from llmpq.remote import session
from llmpq.remote.starting import SlowStartError, not_joined, not_started
from quant.common.errors import DeviceError

TIMED_OUT = Exception(
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup or the GCS has become overloaded."
)
UNREADABLE = "RAY_AUTH_TOKEN_PATH is set but file cannot be opened or is empty: /nowhere. Ensure"
LONG = "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /x/ray"
VERSIONS = """Version mismatch: The cluster was started with:
    Ray: 2.51.0
    Python: 3.10.4
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


@pytest.mark.parametrize(
    ("error", "words", "wanted"),
    [
        (TIMED_OUT, "", "not up in time"),
        (TimeoutError("Timed out after 30 seconds while waiting for node"), "", "not up in time"),
        (RuntimeError("odd"), "[E] gcs: bind: Address already in use", "a port that it wants"),
        (OSError(28, "No space left on device"), "", "no space is left"),
        (PermissionError(13, "Permission denied", "/ray"), "", "/ray, where it keeps its files: p"),
        (OSError(LONG), "", "at most 107 bytes"),
        (ValueError("something new. And more of it"), "", "did not start: something new"),
    ],
)
def test_what_keeps_a_local_ray_from_starting(error: Exception, words: str, wanted: str) -> None:
    told = not_started(error, words)
    assert wanted in str(told)
    assert "\n" not in str(told)
    assert str(error) in told.__notes__[0]
    assert words in told.__notes__[0]
    slow = ("not up in time", "a port")
    assert isinstance(told, SlowStartError) == any(part in str(told) for part in slow)


def test_a_token_that_cannot_be_read_is_told_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    told = str(not_started(RuntimeError(UNREADABLE), ""))
    assert "/nowhere is missing or empty" in told
    assert "unset RAY_AUTH_TOKEN_PATH" in told


def test_a_full_disk_is_told_though_ray_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 4096

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    told = not_started(TIMED_OUT, "")
    assert "no space is left" in str(told)
    assert not isinstance(told, SlowStartError)


def test_a_cluster_of_another_version_is_told_with_both() -> None:
    told = str(not_joined("auto", RuntimeError(VERSIONS), ""))
    assert "it runs Ray 2.51.0 on Python 3.10.4, here are 2.60.0 and 3.11.7" in told


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """A session that would start Ray; collects what is done."""
    done: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shut down"))
    return done


def test_a_slow_start_is_ended_and_tried_once_more(
    alone: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        os.write(2, b"(raylet) a screen of advice")
        alone.append("started")
        if len(alone) == 1:
            children.append(subprocess.Popen([sys.executable, "-c", "input()"]))
            raise TIMED_OUT

    monkeypatch.setattr(ray, "init", init)
    with pytest.warns(UserWarning, match="started once more"), session.ray_session("local"):
        assert children[0].wait(120) < 0  # what the first start had begun
    assert alone == ["started", "shut down", "started", "shut down"]
    assert capfd.readouterr().err == ""


def test_a_second_failure_is_told_and_one_that_nothing_helps_is_not_repeated(
    alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [TIMED_OUT, TIMED_OUT, OSError(LONG)]

    def init(**options: Any) -> None:
        alone.append("started")
        raise errors.pop(0)

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.warns(UserWarning, match="started once more"),
        pytest.raises(DeviceError, match="twice"),
        session.ray_session("local"),
    ):
        pass
    assert alone == ["started", "shut down", "started"]
    with pytest.raises(DeviceError, match="RAY_TMPDIR"), session.ray_session("local"):
        pass
    assert alone[3:] == ["started"]


SLEEPING = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_what_was_started_ends_with_a_start_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(target: str, forks: object) -> None:
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
