"""The memory that processes of this machine or container may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_memory_bytes() -> int:
    """The machine's memory, or what a container is given of it."""
    limit = memory_limit_bytes()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical if limit is None else min(limit, physical)


def memory_limit_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int | None:
    """The least limit of this process's control groups of either version; None without one."""
    return min(_limits(cgroups, own), default=None)


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = cgroups / "memory" if controllers else cgroups
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = top / path.lstrip("/")
        # A container may be told its path on the host, of which it sees the end alone.
        for each in (folder, *folder.parents[: len(folder.parts) - len(top.parts)]):
            found = _text(each / name).strip()
            if found.isdecimal():
                yield int(found)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
