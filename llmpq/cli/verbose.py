"""What commands say of faults, and `--verbose`, which has them say all."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llmpq.remote.words import LOGGER, is_verbose
from quant.common.text import printable, without_secrets

FAULT_CHARACTERS = 300

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables by which libraries keep their advice to themselves, unless the user has set them."""

_LIBRARIES = ("torch", "transformers", "ray", "huggingface_hub", "numba", "numpy", "google")
"""Packages whose warnings are for their callers."""

_OF_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that are no fault of the code that meets them."""


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add `--verbose`, which holds until the command has ended."""
    parser.add_argument(
        "--verbose",
        action=_Verbose,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the words of Ray, torch and transformers, and whole tracebacks",
    )


class _Verbose(argparse.Action):
    """Sets the level of our logger, by which all rooms know."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Note that all is to be shown."""
        setattr(namespace, self.dest, True)
        show_all()


def show_all() -> None:
    """Have all that is said shown from now on."""
    logging.getLogger(LOGGER).setLevel(logging.DEBUG)


@contextmanager
def told_as_asked() -> Iterator[None]:
    """Have libraries keep their advice to themselves unless all is to be shown, and forget
    afterwards that it was.
    """
    if not is_verbose():
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
    try:
        yield
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)


def is_for_users(category: type[Warning], filename: str) -> bool:
    """Whether a warning from a line of `filename` tells users of commands anything."""
    if is_verbose():
        return True
    parts = filename.replace("\\", "/").split("/")
    if "site-packages" in parts or "dist-packages" in parts:
        return not any(name in parts for name in _LIBRARIES)
    developers = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)
    return not issubclass(category, developers)


def details(error: BaseException) -> str:
    """What follows the one line of an `error` that users can mend: Ray's own words, or how to see
    them; the traceback too if all is to be shown.
    """
    if is_verbose():
        return f"\n{_trace(error).rstrip()}"
    return " (--verbose shows Ray's own words)" if getattr(error, "__notes__", None) else ""


def fault_text(error: Exception) -> str:
    """One line on an error that nothing had foreseen, whose traceback goes to a file that the line
    names; or the whole traceback if all is to be shown.
    """
    what = _what(error)
    if is_verbose():
        return f"{_trace(error)}{what}; please report it with the lines above"
    path = _kept(_trace(error))
    where = "" if path is None else f" (its traceback is in {path})"
    return f"{what}{where}; run again with --verbose to see all, and please report it"


def _what(error: Exception) -> str:
    """The kind of fault, and the last thing that is said of it."""
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if kind.startswith("RayTaskError"):  # the traceback of the process, whose last line says it
        return f"a fault of llmpq in a process of Ray: {_short(lines[-1] if lines else kind)}"
    said = _short(f"{kind}: {lines[0]}" if lines else kind)
    if type(error).__module__.partition(".")[0] == "ray":
        return f"failed: Ray: {said}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_MACHINE:
        return f"failed: {said}"
    return f"a fault of llmpq: {said}"


def _short(text: str) -> str:
    return printable(text if len(text) <= FAULT_CHARACTERS else f"{text[:FAULT_CHARACTERS]}…")


def _trace(error: BaseException) -> str:
    return without_secrets("".join(traceback.format_exception(error)))


def _kept(text: str) -> str | None:
    """The file, readable by this user alone, that keeps `text`; None where none can be written."""
    with suppress(OSError):
        number, path = tempfile.mkstemp(prefix="llmpq-fault-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path
    return None
