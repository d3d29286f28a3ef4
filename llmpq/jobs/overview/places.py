"""Places of jobs, by the output that a command was given or by records in folders, and whether one
runs: without taking its lock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.job_files import shards_in
from llmpq.jobs.sessions import Journal
from llmpq.jobs.store import JOURNAL, LOCK, MANIFEST, Manifest
from quant.common.errors import InputError
from quant.common.url_files import is_url
from quant.common.url_mirror import local_place

MOST_FOLDERS = 20_000
"""Folders that are looked into at most, so that a whole disk ends in seconds."""

SUFFIX = ".job"

BEAT_WITHIN_S = 30.0
"""Seconds within which a job on another machine gives a sign of life, six times over."""

_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class JobPlace:
    """A job's `output`, a file or a folder, and the folder of its records, which may be itself."""

    output: Path
    folder: Path

    @property
    def in_folder(self) -> bool:
        return self.output == self.folder


def find_job(named: str | Path) -> JobPlace:
    """The job whose output is `named`; raises `InputError` where there is none."""
    path = local_place(str(named)) if is_url(str(named)) else Path(named)
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.is_dir():
            return _of_folder(path)
        place = JobPlace(path, path.with_name(path.name + SUFFIX))
        if path.name and place.folder.is_dir() and _has_records(place):
            return place
        is_there = path.exists()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot look at output {path}: {why}") from error
    if is_there:
        raise InputError(
            f"{path} is no output of a job: the records of one, {place.folder.name}, do not lie "
            "beside it; name the --output of a `llmpq run`"
        )
    raise InputError(
        f"there is no output {path}, and no job that would write it; `llmpq jobs list FOLDER` "
        "shows the jobs in and below a folder"
    )


def _of_folder(path: Path) -> JobPlace:
    """The job of a folder: of records, which are named after the output beside it, or of shards."""
    beside = path.with_name(path.name.removesuffix(SUFFIX))
    is_beside = path.name.endswith(SUFFIX) and path.name != SUFFIX and not _is_finished(path)
    place = JobPlace(beside if is_beside else path, path)
    if not _has_records(place):
        raise InputError(
            f"folder {path} is no output of a job; `llmpq jobs list {path}` shows the jobs in and "
            "below it"
        )
    return place


def _is_finished(folder: Path) -> bool:
    """Whether it is the output of a job that is done: one beside a file has no shards then."""
    try:
        manifest = Manifest.read(folder / MANIFEST)
    except InputError:
        return False
    return manifest is not None and manifest.complete and bool(shards_in(folder))


def _has_records(place: JobPlace) -> bool:
    folder = place.folder
    if (folder / MANIFEST).is_file() or (folder / JOURNAL).is_file() or shards_in(folder):
        return True
    return not place.in_folder and (folder / LOCK).is_file()


def jobs_in(folder: str | Path, depth: int) -> Iterator[JobPlace]:
    """The jobs at most `depth` below `folder`, by name, without hidden folders and links."""
    top = Path(folder)
    if not os.path.isdir(top):  # false of too long a name, for which pathlib raises
        raise InputError(f"{top} is no folder; `llmpq jobs show` takes the output of one job")
    left = MOST_FOLDERS
    for path, below, files in os.walk(top):
        here = Path(path)
        left -= 1
        is_deepest = len(here.relative_to(top).parts) >= depth
        below[:] = [] if left <= 0 else sorted(_worth_a_look(below, is_deepest))
        if here.name.endswith(SUFFIX) or _is_output(files):
            try:
                yield find_job(here)
            except InputError:
                continue
            below[:] = []


def _is_output(files: Sequence[str]) -> bool:
    has_shards = any(name.startswith("part-") for name in files)
    return JOURNAL in files or (MANIFEST in files and (has_shards or LOCK in files))


def _worth_a_look(names: list[str], records_only: bool) -> Iterator[str]:
    """Folders to look into: at the deepest only those that lie beside an output."""
    for name in names:
        is_record = name.endswith(SUFFIX)
        if is_record or not (records_only or name.startswith(".") or name == "node_modules"):
            yield name


def is_running(place: JobPlace, journal: Journal, now: float) -> bool:
    """Whether a process works at the job.

    The lock of a process that was killed is no lock any more. Locks of other machines, and of other
    containers, do not show here: their jobs run while the journal has signs of life.
    """
    lock = place.folder / LOCK
    if not lock.exists():
        return False
    last = next((each.start for each in journal.sessions[-1:] if each.end is None), None)
    has_beat = journal.beat_at is not None and now - journal.beat_at < BEAT_WITHIN_S
    if last is not None and last.host != platform.node():
        return has_beat
    held = is_locked(lock, None if last is None else last.pid)
    return last is not None and has_beat if held is None else held


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
