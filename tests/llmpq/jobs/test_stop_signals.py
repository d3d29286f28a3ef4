"""Signals that stop a job: each is noted and raised; a closed terminal is written to no more."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llmpq.jobs.job import STOPS_OF_JOBS, stop_code, stop_signals
from tests.paths import ROOT

CHILD = """
import signal, sys, time
from llmpq.jobs.job import STOPS_OF_JOBS, stop_code, stop_signals
with stop_signals(STOPS_OF_JOBS) as seen:
    try:
        print("ready", flush=True)
        while True:  # `signal.pause` would miss one that comes before it waits
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("kept", file=sys.stderr, flush=True)  # an error where the terminal is gone
        print("kept", flush=True)
sys.exit(stop_code(seen))
"""


@pytest.fixture(autouse=True)
def nothing_ignored() -> Iterator[None]:
    """Also where `nohup` has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def waiting(**streams: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own that waits for a signal."""
    command = [sys.executable, "-c", CHILD]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)],
)
def test_each_signal_stops_once_and_has_its_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with stop_signals(STOPS_OF_JOBS) as seen:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert seen == [number]
    assert stop_code(seen) == code
    assert signal.getsignal(number) == before


def test_what_is_told_twice_does_not_stop_the_stopping() -> None:
    with stop_signals(STOPS_OF_JOBS) as seen:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # Ctrl-C always does
    assert stop_code(seen) == 129


def test_servers_take_two_signals() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGHUP)
    with stop_signals():
        assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGHUP)) == before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(STOPS_OF_JOBS) as seen:
            signal.raise_signal(signal.SIGHUP)
        assert seen == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_written_to_no_more() -> None:
    ours, theirs = pty.openpty()
    with waiting(stdin=theirs, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.close(ours)  # nobody has it as its terminal, so that no signal comes of this
        process.send_signal(signal.SIGHUP)
        told, _ = process.communicate(timeout=120)
    assert (process.returncode, told) == (129, b"kept\n")
