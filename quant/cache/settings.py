"""Where stages keep their packed layers for the next start, without torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from quant.errors import SpecError

DEFAULT_LIMIT_BYTES = 100 << 30
"""Several 70B models at 4 bit; half of the free space where that is less."""


@dataclass(frozen=True)
class CacheSettings:
    """`folder`: None for the user's own on each node; `limit_gib`: None for the default.

    Raises `SpecError` for a limit that is no positive number.
    """

    folder: str | None = None
    limit_gib: float | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.limit_gib is not None and not 0 < self.limit_gib < math.inf:
            raise SpecError(
                f"the cache limit is {self.limit_gib:g} GiB; give a positive number, or switch the "
                "cache off (no_cache)"
            )

    @property
    def path(self) -> Path:
        """The folder on this node."""
        return default_folder() if self.folder is None else Path(self.folder).expanduser()

    @property
    def limit_bytes(self) -> int | None:
        """The limit; None for the default one."""
        return None if self.limit_gib is None else int(self.limit_gib * (1 << 30))


def cache_settings(
    folder: str | Path | None, limit_gib: float | None, no_cache: bool
) -> CacheSettings:
    """Settings as users give them: a folder is that of the machine where it is given, made absolute
    for the others. Raises `SpecError` as `CacheSettings`.
    """
    absolute = None if folder is None else str(Path(folder).expanduser().absolute())
    return CacheSettings(absolute, limit_gib, not no_cache)


NO_CACHE = CacheSettings(enabled=False)


def default_folder() -> Path:
    """`llmpq/shards` in the user's cache folder (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / (
        "llmpq/shards"
    )
