"""Writing a text file atomically: it is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def names_a_file(path: Path) -> bool:
    """Whether `path` is no folder itself but in a folder that exists, with a valid name."""
    try:
        return bool(path.name) and not path.is_dir() and path.parent.is_dir()
    except OSError:  # too long a name, no access
        return False


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a temporary file in the same folder, and rename it once it is complete.

    The temporary name is random and must be new, so that nobody can have put a file or link there.
    Permissions follow the user's umask. Raises OSError where the file cannot be written and
    ValueError for an impossible path; nothing is left behind then.
    """
    if not path.name:
        raise ValueError("no file name; name a file")
    aside = path.with_name(f".llmpq-{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(aside, flags, 0o666), "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(aside, path)
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            aside.unlink()
        raise
