"""What is known of files and batches, on disk and on the wire: each record is a file of its own,
which is there whole or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmpq.jobs.job_files import DAMAGED_SUFFIX, Disk, commit_file
from quant.common.json_text import loads

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINISHED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

WINDOW_S = 24 * 3600
KEPT_S = 30 * 24 * 3600
"""Seconds that files for batches, and finished batches, are kept: OpenAI's 30 days for files."""

PART = ".part"
"""Ending of a file that is not whole yet and counts for nothing."""

_LOG = logging.getLogger(__name__)

_DIGITS = "[0-9a-f]{32}"
FILE_ID = re.compile(f"file-{_DIGITS}")
BATCH_ID = re.compile(f"batch_{_DIGITS}")


@dataclass(frozen=True)
class StoredFile:
    """A file; `number` tells the order in which they came, times are in seconds.

    `digest`: of the content that was sent, None where it is not known. `problem`: what is wrong
    with the file.
    """

    id: str
    number: int
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    expires_at: int | None
    digest: str | None = None
    problem: str | None = None

    @property
    def content(self) -> Mapping[str, object]:
        shown = asdict(self)
        for name in ("number", "digest", "problem"):
            del shown[name]
        status = "error" if self.problem else "processed"
        return shown | {"object": "file", "status": status, "status_details": self.problem}


@dataclass(frozen=True)
class LineCounts:
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Problem:
    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class Batch:
    """A batch; times are in seconds, None for what has not happened.

    `number` tells the order in which they came, `output_s` how long its output is kept. One that
    has `problems` fails as soon as it is looked at.
    """

    id: str
    number: int
    endpoint: Endpoint
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    completion_window: str = "24h"
    metadata: Mapping[str, str] | None = None
    output_s: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[Problem, ...] = ()
    request_counts: LineCounts = field(default_factory=LineCounts)

    def turned(self, status: Status, now_s: int) -> Batch:
        at = f"{status}_at"
        times = {at: now_s} if hasattr(self, at) else {}
        return replace(self, status=status, **times)  # type: ignore[arg-type]

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def finished_at(self) -> int | None:
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((time for time in times if time is not None), None)

    @property
    def content(self) -> Mapping[str, object]:
        shown = asdict(self)
        problems = shown.pop("problems")
        for name in ("number", "output_s"):
            del shown[name]
        errors = {"object": "list", "data": list(problems)} if problems else None
        return {"object": "batch", **shown, "errors": errors}


_BATCH = TypeAdapter(Batch)

RecordT = TypeVar("RecordT", Batch, StoredFile)


class Index(Generic[RecordT]):
    """The records in `folder`, in the order in which they were made; `names` are their ids.

    `damaged`: what is wrong with records that hold no such thing, by their ids. All methods raise
    OSError as the disk does, and change nothing then.
    """

    def __init__(
        self, folder: Path, names: re.Pattern[str], kind: type[RecordT], disk: Disk
    ) -> None:
        self.folder = folder
        self._disk = disk
        disk.make_folder(folder)
        self.damaged: dict[str, str] = {}
        read = TypeAdapter(kind)
        paths = (path for path in folder.glob("*.json") if names.fullmatch(path.stem))
        found = (self._read(path, read) for path in paths)
        ordered = sorted((each for each in found if each), key=lambda each: each.number)
        self._records: dict[str, RecordT] = {each.id: each for each in ordered}

    def _read(self, path: Path, read: TypeAdapter[RecordT]) -> RecordT | None:
        try:
            found = read.validate_json(path.read_bytes())
        except (IsADirectoryError, ValidationError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            self.damaged[path.stem] = f"its record cannot be read: {cause}"
            return None
        if found.id != path.stem:
            self.damaged[path.stem] = f"its record is that of {found.id!r:.80}"
            return None
        return found

    def __iter__(self) -> Iterator[RecordT]:
        return iter(tuple(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> RecordT | None:
        return self._records.get(name)

    @property
    def next_number(self) -> int:
        return max((each.number for each in self._records.values()), default=0) + 1

    def put(self, record: RecordT) -> None:
        data = json.dumps(asdict(record)).encode()
        path = self.path(record.id)
        try:
            commit_file(self._disk, path, path.with_suffix(PART), lambda sink: sink.write(data))
        except OSError:
            if record.id not in self._records:
                with suppress(OSError):
                    self._disk.unlink(path)
            raise
        self._records[record.id] = record

    def remake(self, record: RecordT, why: str) -> None:
        """Keep a record in place of one that is damaged or lost, whose bytes stay beside it."""
        path = self.path(record.id)
        _LOG.error("%s: %s; what there is of it is kept beside it", path, why)
        set_aside(self._disk, path)
        self.put(record)

    def remove(self, name: str) -> None:
        self._disk.unlink(self.path(name))
        self._disk.sync_folder(self.folder)
        self._records.pop(name, None)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def set_aside(disk: Disk, path: Path) -> None:
    """Keep what is damaged, if there is anything, under a name that counts for nothing."""
    if os.path.lexists(path):
        names = (f"{path.name}.{number}{DAMAGED_SUFFIX}" for number in count(1))
        free = (path.with_name(name) for name in names)
        disk.rename(path, next(each for each in free if not os.path.lexists(each)))


def remade_file(content: Path, number: int, why: str) -> StoredFile:
    """The record of the file with this `content`, as far as that tells."""
    found = content.stat()
    arrived_s = int(found.st_mtime)
    return StoredFile(
        id=content.stem,
        number=number,
        bytes=found.st_size,
        created_at=arrived_s,
        filename=content.name,
        purpose="batch",
        expires_at=arrived_s + KEPT_S,
        problem=f"{why}; its content is here",
    )


def remade_batch(name: str, number: int, why: str, left: Path) -> Batch:
    """A batch that is to fail, with what can be read of its record in the path that is `left`."""
    begun_s = int(left.stat().st_mtime)
    base = Batch(name, number, "/v1/chat/completions", "", begun_s, begun_s + WINDOW_S)
    found = _readable(left, base)
    told = f"{why}; what was answered is in the files of output and errors: send the rest again"
    problem = Problem("damaged_record", told)
    return replace(found, status="in_progress", problems=(problem,))


def _readable(record: Path, base: Batch) -> Batch:
    """`base` with those fields of a record that are as they should be."""
    try:
        given = loads(record.read_bytes())
    except (OSError, ValueError):
        return base
    if not isinstance(given, Mapping) or given.get("id") != base.id:
        return base
    try:
        return _BATCH.validate_python({**asdict(base), **given})
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        kept = {name: value for name, value in given.items() if name not in wrong}
        return _BATCH.validate_python({**asdict(base), **kept})
