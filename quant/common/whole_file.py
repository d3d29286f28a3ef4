"""Writing a text file that is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def names_a_file(path: Path) -> bool:
    """Whether `path` can be a file: no folder itself, in one that exists, of a possible name."""
    try:
        return bool(path.name) and not path.is_dir() and path.parent.is_dir()
    except OSError:  # too long a name, no access
        return False


def write_whole(path: Path, text: str) -> None:
    """Write `text` aside, in the same folder, and give the file its name once it is complete.

    Nobody can guess the name aside or have put a file or link there; access is the user's umask.
    OSError where it cannot be written, ValueError for a path that cannot be; nothing is left then.
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
