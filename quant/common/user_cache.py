"""The folder where this user's caches of llmpq lie."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """The folder `llmpq` in the user's cache folder (XDG base directories); RuntimeError where the
    user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "llmpq"
