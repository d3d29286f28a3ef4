"""Settings of the cache of packed layers, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quant.common.errors import SpecError
from quant.common.files import user_cache_folder

DEFAULT_LIMIT_BYTES = 100 << 30
"""The default limit, or half of the free space if that is less: several 70B models at 4 bit."""


@dataclass(frozen=True)
class CacheSettings:
    """None: the user's `folder` on each node, or the default limit; SpecError if not above 0."""

    folder: str | None = None
    limit_gib: float | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.limit_gib is not None and not 0 < self.limit_gib < math.inf:
            raise SpecError(
                f"the cache limit is {self.limit_gib:g} GiB; give a positive number, or switch the "
                "cache off (no_cache)"
            )

    @property
    def path(self) -> Path:
        return default_folder() if self.folder is None else _expanded(self.folder)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit_gib is None else int(self.limit_gib * (1 << 30))


def cache_settings(
    folder: str | Path | None, limit_gib: float | None, no_cache: bool
) -> CacheSettings:
    """Make settings of a user's; the folder is made absolute here, for others too."""
    absolute = None if folder is None else str(_expanded(folder).absolute())
    return CacheSettings(absolute, limit_gib, not no_cache)


NO_CACHE = CacheSettings(enabled=False)


def default_folder() -> Path:
    try:
        return user_cache_folder() / "shards"
    except RuntimeError as error:
        raise _no_home("~/.cache") from error


def _expanded(folder: str | Path) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise _no_home(folder) from error


def _no_home(folder: str | Path) -> SpecError:
    return SpecError(
        f"cache folder {folder}: no home folder is known for ~; give another cache_dir, or "
        "switch the cache off (no_cache)"
    )
