"""The jobs below a folder, looked at again and again: each anew only where its records changed."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from llmpq.jobs.job_files import shards_in
from llmpq.jobs.overview.overview import JobOverview, overview_of
from llmpq.jobs.overview.places import SUFFIX, JobPlace, find_job, is_locked, jobs_in
from llmpq.jobs.store import JOURNAL, LOCK, MANIFEST
from quant.common.errors import InputError
from quant.common.text import printable


@dataclass(frozen=True)
class SeenJob:
    """A job by the `name` of its records' folder, below the one that was looked into.

    `job` is None of one that is `wrong`, and of one for which there was no time.
    """

    name: str
    place: JobPlace
    job: JobOverview | None = None
    wrong: str = ""

    @property
    def shown(self) -> str:
        """Its output, as the folder has it."""
        name = self.name if self.place.in_folder else self.name.removesuffix(SUFFIX)
        return printable(name)


@dataclass(frozen=True)
class _Records:
    """Whether a job's records are what they were: size, place and time of each."""

    states: tuple[tuple[int, int, int] | None, ...]
    is_locked: bool | None

    @property
    def changed_ns(self) -> int:
        return max((state[0] for state in self.states if state is not None), default=0)


class JobFolder:
    """The jobs at most `depth` folders below `top`; a `confined` one reads nothing outside of it,
    also not by links. Raises `InputError` where `top` is no folder. Threads may share it.
    """

    def __init__(self, top: str | Path, depth: int, confined: bool = False) -> None:
        self.top, self._depth, self._confined = Path(top), depth, confined
        self._kept: dict[str, tuple[_Records, JobOverview]] = {}
        self._lock = Lock()
        if not os.path.isdir(self.top):  # false of too long a name, for which pathlib raises
            raise InputError(f"{self.top} is no folder; name one with jobs in or below it")

    def look(self, within_s: float = math.inf, now: float | None = None) -> list[SeenJob]:
        """All jobs, those that run first and then the latest. What takes longer than `within_s`
        waits for the next look.
        """
        now = time.time() if now is None else now
        with self._lock:
            deadline_s = time.monotonic() + within_s
            found: list[tuple[_Records | None, SeenJob]] = []
            for place in jobs_in(self.top, self._depth):
                name = place.folder.relative_to(self.top).as_posix()
                try:
                    found.append((self._records(place), SeenJob(name, place)))
                except InputError as error:
                    found.append((None, SeenJob(name, place, wrong=str(error))))
            found.sort(key=lambda each: 0 if each[0] is None else -each[0].changed_ns)
            jobs = [
                seen if records is None else self._seen(seen, records, now, deadline_s)
                for records, seen in found
            ]
            names = {each.name for each in jobs}
            self._kept = {name: kept for name, kept in self._kept.items() if name in names}
        return by_activity(jobs)

    def _seen(self, seen: SeenJob, records: _Records, now: float, deadline_s: float) -> SeenJob:
        """The job as it is now; one that does not run is only read where its records changed."""
        known, kept = self._kept.get(seen.name, (None, None))
        if known == records and kept is not None:
            return replace(seen, job=replace(kept, at=now))
        if time.monotonic() > deadline_s:
            return seen
        try:
            job = overview_of(seen.place, now, look=False)
        except InputError as error:
            return replace(seen, wrong=str(error))
        if job.state != "running":  # what a list needs: a journal may have megabytes
            self._kept[seen.name] = (records, replace(job, sessions=(), series=(), events=()))
        return replace(seen, job=job)

    def job(self, name: str) -> JobOverview:
        """All of a job by its name; raises `InputError` where there is none, or a damaged one."""
        place = self._place(name)
        if place is None:
            raise InputError(f"there is no job {name!r:.200} in {self.top}")
        self._records(place)
        if self._confined:
            for shard in shards_in(place.folder):
                _refuse_link(shard.path)
        return overview_of(place)

    def _place(self, name: str) -> JobPlace | None:
        """The place of a job, whose folder must be in `top` as it stands there, without links."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            return None
        folder, real_top = self.top / path, os.path.realpath(self.top)
        if os.path.realpath(folder) != os.path.normpath(os.path.join(real_top, path)):
            return None
        try:
            return find_job(folder)
        except InputError:
            return None

    def _records(self, place: JobPlace) -> _Records:
        """The state of a job's records; raises `InputError` for what must not be read."""
        records = [place.folder / name for name in (MANIFEST, JOURNAL, LOCK)]
        paths = (place.folder, place.output, *records)
        if self._confined and not place.output.is_relative_to(self.top):
            raise InputError(f"{place.output} is not in {self.top}; show the folder around it")
        return _Records(tuple(_states(paths, self._confined)), is_locked(records[-1]))


def by_activity(jobs: Iterable[SeenJob]) -> list[SeenJob]:
    """Those that run, then the latest; what is damaged or was not read comes last."""
    return sorted(jobs, key=_rank)


def _rank(seen: SeenJob) -> tuple[int, float, str]:
    job = seen.job
    if job is None:
        return (2 if seen.wrong else 3, 0.0, seen.name)
    return (0 if job.state == "running" else 1, -(job.last_at or 0), seen.name)


def _states(paths: Iterable[Path], refuse_links: bool) -> Iterator[tuple[int, int, int] | None]:
    for path in paths:
        try:
            found = _refuse_link(path) if refuse_links else path.stat()
        except OSError:
            yield None
        else:
            yield (found.st_mtime_ns, found.st_size, found.st_ino)


def _refuse_link(path: Path) -> os.stat_result:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise InputError(f"{path} is a link, which is not followed here")
    return found
