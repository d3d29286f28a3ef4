"""Telling whether a job runs, without taking its lock: by the kernel's list of locks on this
machine, by signs of life on others.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from llmpq.jobs.journal.reader import Journal
from llmpq.jobs.overview.places import JobPlace

BEAT_WITHIN_S = 30.0
"""Seconds within which a job on another machine gives a sign of life, six times over."""

_LOCKS = Path("/proc/locks")


def is_running(place: JobPlace, journal: Journal, now: float) -> bool:
    """Whether a process works at the job.

    The lock of a process that was killed is no lock any more. Locks of other machines, and of other
    containers, do not show here: their jobs run while the journal has signs of life.
    """
    if not place.lock.exists():
        return False
    last = journal.sessions[-1] if journal.sessions else None
    is_open = last is not None and last.end is None
    has_beat = journal.beat_at is not None and now - journal.beat_at < BEAT_WITHIN_S
    if is_open and last is not None and last.start.host != platform.node():
        return has_beat
    held = is_locked(place.lock, last.start.pid if is_open and last is not None else None)
    return is_open and has_beat if held is None else held


def is_locked(path: Path, holder: int | None = None) -> bool | None:
    """Whether a process of this machine holds a lock on the whole of `path`; None where the kernel
    does not tell.

    Some file systems (overlays, btrfs) have other numbers of devices here and there: the lock of
    the process `holder` counts by the number of the file alone.
    """
    try:
        file = path.stat()
    except OSError:
        return False
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    device = (os.major(file.st_dev), os.minor(file.st_dev))
    for line in lines:
        match line.split():
            case [_, "FLOCK", _, _, pid, where, *_]:
                major, minor, inode = where.split(":")
                if int(inode) != file.st_ino:
                    continue
                if (int(major, 16), int(minor, 16)) == device or pid == str(holder):
                    return True
    return False
