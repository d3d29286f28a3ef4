"""Records of one kind in a folder, each in a file of its own that is there whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmpq.jobs.disk import Disk, commit_file
from llmpq.jobs.job_files import DAMAGED_SUFFIX
from llmpq.serve.batches.storage.records import Batch, StoredFile

RecordT = TypeVar("RecordT", Batch, StoredFile)

PART = ".part"
"""Ending of a file that is not whole yet and counts for nothing."""

_LOG = logging.getLogger(__name__)


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
        """Records, the oldest first."""
        return iter(tuple(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    def get(self, name: str) -> RecordT | None:
        """The record of an id; None where there is none."""
        return self._records.get(name)

    @property
    def next_number(self) -> int:
        """Number of the next record."""
        return max((each.number for each in self._records.values()), default=0) + 1

    def put(self, record: RecordT) -> None:
        """Keep a record in place of the one of its id."""
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
        """Forget a record."""
        self._disk.unlink(self.path(name))
        self._disk.sync_folder(self.folder)
        self._records.pop(name, None)

    def path(self, name: str) -> Path:
        """Path of the record of an id."""
        return self.folder / f"{name}.json"


def set_aside(disk: Disk, path: Path) -> None:
    """Keep what is damaged, if there is anything, under a name that counts for nothing."""
    if os.path.lexists(path):
        names = (f"{path.name}.{number}{DAMAGED_SUFFIX}" for number in count(1))
        free = (path.with_name(name) for name in names)
        disk.rename(path, next(each for each in free if not os.path.lexists(each)))
