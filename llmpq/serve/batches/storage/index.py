"""Records of one kind in a folder, each in a file of its own that is there whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmpq.jobs.records.disk import Disk, commit_file
from llmpq.serve.batches.storage.records import Batch, StoredFile
from quant.common.errors import SpecError

RecordT = TypeVar("RecordT", Batch, StoredFile)

PART = ".part"
"""Ending of a file that is not whole yet and counts for nothing."""


class Index(Generic[RecordT]):
    """The records in `folder`, in the order in which they were made; `names` are their ids.

    Raises `SpecError` for one that cannot be read. Changes raise OSError as the disk does, and
    change nothing then.
    """

    def __init__(
        self, folder: Path, names: re.Pattern[str], kind: type[RecordT], disk: Disk
    ) -> None:
        self.folder = folder
        self._disk = disk
        self._names = names
        disk.make_folder(folder)
        read = TypeAdapter(kind)
        found = [
            self._read(path, read) for path in folder.glob("*.json") if names.fullmatch(path.stem)
        ]
        ordered = sorted(found, key=lambda each: each.number)
        self._records: dict[str, RecordT] = {each.id: each for each in ordered}

    @staticmethod
    def _read(path: Path, read: TypeAdapter[RecordT]) -> RecordT:
        try:
            found = read.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            cause = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            raise SpecError(f"{path} cannot be read as a record: {cause}; remove it") from error
        if found.id != path.stem:
            raise SpecError(f"{path} is the record of {found.id!r:.80}; remove it")
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
        path = self._path(record.id)
        try:
            commit_file(self._disk, path, path.with_suffix(PART), lambda sink: sink.write(data))
        except OSError:
            if record.id not in self._records:
                with suppress(OSError):
                    self._disk.unlink(path)
            raise
        self._records[record.id] = record

    def remove(self, name: str) -> None:
        """Forget a record."""
        self._disk.unlink(self._path(name))
        self._disk.sync_folder(self.folder)
        self._records.pop(name, None)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
