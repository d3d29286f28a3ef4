"""Words of Ray are caught whoever writes them, and only while they are meant to be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

from llmpq.remote.words import LOGGER, caught_words

CAUGHT = """
import os, subprocess, sys, threading
from llmpq.remote.words import caught_words

print("before", file=sys.stderr)
with caught_words() as words:
    os.write(2, b"C++ to stderr\\n")
    os.write(1, b"C++ to stdout\\n")
    print("Python to stderr", file=sys.stderr)
    print("Python to stdout", flush=True)
    subprocess.run(["sh", "-c", "echo a child >&2"], check=True)
    other = threading.Thread(target=lambda: print("another thread", file=sys.stderr, flush=True))
    other.start()
    other.join()
    inside = words.text.splitlines()
    kept = sys.stderr
assert sys.stderr is not kept
print("kept", file=kept)
print("after", file=sys.stderr)
print(sorted(words.text.splitlines()))
assert set(inside) <= set(words.text.splitlines())
"""


def test_one_threads_words_are_caught_and_others_are_shown() -> None:
    """As a process, whose standard streams are those of a command."""
    done = subprocess.run([sys.executable, "-c", CAUGHT], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["before", "another thread", "kept", "after"]
    assert done.stdout.splitlines() == [
        "['C++ to stderr', 'C++ to stdout', 'Python to stderr', 'Python to stdout', 'a child']"
    ]


def test_nothing_is_caught_where_all_is_to_be_shown(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger(LOGGER).setLevel(logging.DEBUG)
    try:
        with caught_words() as words:
            os.write(2, b"shown\n")
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)
    assert words.text == ""
    assert capfd.readouterr().err == "shown\n"


def test_streams_are_whole_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with caught_words():
            os.write(2, b"hidden\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"


def test_it_can_be_asked_while_another_thread_still_writes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended = threading.Event()

    def chatter() -> None:
        while not ended.wait(0.001):
            os.write(2, b"x\n")

    thread = threading.Thread(target=chatter)
    with caught_words() as words:
        thread.start()
        while len(words.text) < 20:
            pass
        ended.set()
        thread.join()
    assert set(words.text.split()) == {"x"}
    assert capfd.readouterr().err == ""


def test_one_thread_catches_at_a_time(capfd: pytest.CaptureFixture[str]) -> None:
    """The second one ends later than the first."""
    with caught_words() as first:
        second = caught_words()
        within = second.__enter__()
        os.write(2, b"hidden\n")
    second.__exit__(None, None, None)
    os.write(2, b"shown\n")
    assert (first.text, within.text) == ("hidden", "")
    assert capfd.readouterr().err == "shown\n"
