"""Why Ray was not started or joined, in one line with the remedy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import environ

from llmpq.remote.token import unreadable_token
from quant.common.errors import DeviceError
from quant.common.text import without_secrets


class SlowStartError(DeviceError):
    """A local Ray that did not come up in time, and may do so if it is started once more."""


@dataclass(frozen=True)
class _Cause:
    """What Ray's error or words match, in letters of either case, and the sentence that is said
    then, or that is made of the match; `again`: a second start may help.
    """

    pattern: str
    say: str | Callable[[re.Match[str]], str]
    again: bool = False


LEAST_FREE_BYTES = 50 * 2**20
"""Free space of its folder below which a Ray that does not come up is taken to lack it: its logs
and sockets alone take some MB, and it says nothing of a full disk."""

_FOLDER = "set RAY_TMPDIR to another folder"
_FULL = (
    f"no space is left where it keeps its files (/tmp/ray or RAY_TMPDIR); free some, or {_FOLDER}"
)

_TOKEN = _Cause(
    r"AuthenticationError|authentication token|RAY_AUTH_TOKEN",
    lambda _: (
        unreadable_token()
        or "the token is not accepted; make one by `ray get-auth-token --generate`, or unset "
        "RAY_AUTH_MODE and RAY_AUTH_TOKEN"
    ),
)

_LOCAL = (
    _TOKEN,
    _Cause(
        r"AF_UNIX path length cannot exceed (\d+) bytes",
        lambda found: (
            f"the path of its folder is too long for sockets (at most {found[1]} bytes "
            "with what Ray adds, some 60); set RAY_TMPDIR to a short one, such as /tmp"
        ),
    ),
    _Cause(r"No space left on device|Disk quota exceeded", _FULL),
    _Cause(
        r"(Permission denied|Read-only file system|No such file or directory|Not a directory|"
        r"File exists): '?([^'\n]+)",
        lambda found: (
            f"{found[2]}, where it keeps its files: {found[1].lower()}; {_FOLDER} that "
            "can be written"
        ),
    ),
    _Cause(
        r"address already in use|failed to bind|port \d+ .*(?:in use|occupied)",
        "a port that it wants is taken; end what holds it, or unset the variables that fix ports "
        "(RAY_GCS_SERVER_PORT and the like)",
        again=True,
    ),
    _Cause(
        r"object store memory.*(?:minimum|less than|at least)|Cannot allocate memory",
        "memory is short; end what takes it, or choose a machine with more",
    ),
    _Cause(
        r"timed? ?out|timeout|overloaded|Failed to (?:get|connect)|unable to (?:connect|register)|"
        r"did not find|process has (?:died|exited)|exited unexpectedly",
        "it was not up in time, twice: the machine is too busy or short of memory; run the same "
        "command when there is less load",
        again=True,
    ),
)
"""Causes of a local Ray that does not start; the first that matches counts."""

_JOINED = (
    _TOKEN,
    _Cause(
        r"Version mismatch[\s\S]*?started with[\s\S]*?Ray: ([\w.]+)[\s\S]*?Python: ([\w.]+)"
        r"[\s\S]*?Ray: ([\w.]+)[\s\S]*?Python: ([\w.]+)",
        lambda found: (
            f"it runs Ray {found[1]} on Python {found[2]}, here are {found[3]} and "
            f"{found[4]}; install the same versions here"
        ),
    ),
    _Cause(
        r"multiple active Ray instances: \{([^}]+)\}",
        lambda found: f"several run on this machine; name one of {found[1]} by --address",
    ),
)
"""Causes of a cluster that is not joined."""


def not_started(error: BaseException, words: str) -> DeviceError:
    """The error for a local Ray that `error` kept from starting, after it said `words`.

    It is a `SlowStartError` where a second start may help, and has Ray's own words as a note.
    """
    found = _find(_LOCAL, error, words)
    if (found is None or found[1]) and _is_full(environ.get("RAY_TMPDIR") or "/tmp"):
        found = (_FULL, False)
    if found is None:
        return _with_words(DeviceError(f"Ray did not start: {_reason(error)}"), error, words)
    kind = SlowStartError if found[1] else DeviceError
    return _with_words(kind(f"Ray did not start: {found[0]}"), error, words)


def not_joined(target: str, error: BaseException, words: str) -> DeviceError:
    """The error for a cluster at `target` that `error` kept from being joined."""
    found = _find(_JOINED, error, words)
    text = f"no Ray cluster answers at {target!r}: {_reason(error)}; start one with `ray start "
    text += "--head` or leave --address out for a local one"
    if found is not None:
        text = f"the Ray cluster at {target!r} cannot be joined: {found[0]}"
    return _with_words(DeviceError(text), error, words)


def _find(causes: tuple[_Cause, ...], error: BaseException, words: str) -> tuple[str, bool] | None:
    """What to say and whether to start again: by the error, else by what Ray said beside it."""
    for text in (f"{type(error).__name__}: {error}", words):
        for cause in causes:
            match = re.search(cause.pattern, text, re.IGNORECASE)
            if match is not None:
                said = cause.say if isinstance(cause.say, str) else cause.say(match)
                return said, cause.again
    return None


def error_reason(error: BaseException) -> str:
    """An error's part for a message: the system's word, a traceback's last line, or a sentence."""
    text = str(error)
    system = re.search(r"\[Errno -?\d+\] [\w ]+", text)
    if system is not None:
        return system[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    is_trace = any(line.startswith("Traceback") for line in lines)
    return (lines[-1] if is_trace else lines[0].partition(". ")[0])[:300]


def _is_full(folder: str) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(folder).free < LEAST_FREE_BYTES
    return False


def _reason(error: BaseException) -> str:
    return error_reason(error).rstrip(".")


def _with_words(raised: DeviceError, error: BaseException, words: str) -> DeviceError:
    said = "\n".join(part for part in (str(error), words) if part)
    raised.add_note(f"Ray's own words:\n{without_secrets(said)}")
    return raised
