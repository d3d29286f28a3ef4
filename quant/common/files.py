"""Whole files, JSON files within limits, files that changed, folders of caches and of state."""

from __future__ import annotations

import math
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import sleep, time
from typing import Any

from quant.common.errors import InputError, LlmpqError
from quant.common.json_text import loads


def names_a_file(path: Path) -> bool:
    try:
        return bool(path.name) and not path.is_dir() and path.parent.is_dir()
    except OSError:  # too long a name, no access
        return False


def write_whole(path: Path, content: str | bytes) -> None:
    """Write to a new temporary file of a random name, and rename it when complete; OSError, or
    ValueError for an impossible path, leaves nothing behind.
    """
    if not path.name:
        raise ValueError("no file name; name a file")
    aside = path.with_name(f".llmpq-{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(aside, flags, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(aside, path)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            aside.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as `write_whole` does; InputError where that is not possible."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


MAX_BYTES = 1 << 26
"""Largest file. An index of shards has 110 bytes a tensor, for instance 80 layers of 512 experts.
"""

MAX_DEPTH = 64
"""Deepest nesting of lists and objects; deeper values break code that prints or compares them."""


def read_json_object(
    path: Path, remedy: str, refuse: type[LlmpqError], what: str = "JSON object"
) -> dict[str, Any]:
    """Read a JSON object; raises `refuse` for what is unreadable, larger than `MAX_BYTES`, deeper
    than `MAX_DEPTH`, has NaN or Infinity, or is no `what`.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError("it is no ordinary file")
        if size > MAX_BYTES:
            raise ValueError(f"it has {size} bytes; {MAX_BYTES} at most can be")
        values = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refuse(f"{path} cannot be read as JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise refuse(f"{path} is no {what}; {remedy}")
    return values


def parsed_json(text: str) -> Any:
    values = loads(text, MAX_DEPTH)
    level: list[tuple[str, Any]] = [("", values)]
    while level:
        level = [each for name, outer in level for each in _inside(name, outer)]
    return values


def _inside(name: str, outer: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(outer, dict | list):
        return
    for key, value in outer.items() if isinstance(outer, dict) else enumerate(outer):
        if isinstance(value, dict | list):
            yield f"{name}{str(key)[:40]}.", value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}{str(key)[:40]} is {value}, which is no number of JSON")


_CLOCK_TICK_S = 0.02
"""Changes of a file within one tick of the kernel's clock, at most 10 ms, get the same time."""

_COARSE_TICK_S = 2.0
"""The tick of file systems that store times in whole seconds, or every other second."""


@dataclass(frozen=True)
class FileIdentity:
    """A file in one state. No program can set `changed_ns`."""

    path: str
    inode: int
    file_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        found = os.stat(path)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(str(path.resolve()), found.st_ino, found.st_size, *times)

    @property
    def is_settled(self) -> bool:
        """Whether the last change is a clock tick ago, so that a later one gets another time."""
        return self._unsettled_s() <= 0

    def settle(self) -> None:
        """Wait until `is_settled`, milliseconds; one tick where the file's time lies ahead of the
        clock.
        """
        sleep(min(self._tick_s, max(0.0, self._unsettled_s())))

    @property
    def _tick_s(self) -> float:
        return _CLOCK_TICK_S if self.changed_ns % 1_000_000_000 else _COARSE_TICK_S

    def _unsettled_s(self) -> float:
        return self.changed_ns / 1e9 + self._tick_s - time()


def user_cache_folder() -> Path:
    """That of XDG_CACHE_HOME, else of the user's home; where that cannot be written, as in many a
    container, one among temporary files, with a warning. RuntimeError where there is none either.
    """
    named = _named_folder("XDG_CACHE_HOME")
    if named is not None:
        return named
    with suppress(RuntimeError):  # no home is known
        usual = Path("~/.cache").expanduser() / "llmpq"
        if _can_be_made(usual):
            return usual
    return _temporary_cache()


def user_state_folder() -> Path:
    """The folder of what a cache may not lose."""
    named = _named_folder("XDG_STATE_HOME")
    return named or Path("~/.local/state").expanduser() / "llmpq"


def _named_folder(variable: str) -> Path | None:
    base = Path(os.environ.get(variable, ""))
    return base / "llmpq" if base.is_absolute() else None


def _can_be_made(folder: Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return os.access(there, os.W_OK | os.X_OK)


@cache
def _temporary_cache() -> Path:
    """One that this user's processes share, and nobody else can write: code of caches is run."""
    try:
        folder = Path(tempfile.gettempdir()) / f"llmpq-cache-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            folder = Path(tempfile.mkdtemp(prefix="llmpq-cache-"))
    except OSError as error:
        raise RuntimeError("no folder can be written, neither of a home nor a temporary") from error
    warnings.warn(
        f"there is no home folder that can be written; caches are kept in {folder}, and are gone "
        "with it: name another in XDG_CACHE_HOME",
        stacklevel=3,
    )
    return folder
