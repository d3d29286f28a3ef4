"""The folder of files and batches: what is in it is whole, also after the server was killed."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from llmpq.jobs.job_files import Disk, OutputLock, Sink, commit_file
from llmpq.serve.batches.records import (
    BATCH_ID,
    FILE_ID,
    KEPT_S,
    PART,
    Batch,
    Index,
    StoredFile,
    remade_batch,
    remade_file,
    set_aside,
)
from llmpq.serve.options import BatchOptions
from quant.common.errors import InputError, SpecError

MOST_RECORDS = 10_000
"""Files, and batches, that are kept at most: more would make lists and starts slow."""

_CONTENT = ".jsonl"


class BatchStore:
    """Files and batches in the folder of `options`, which one server at a time may use.

    Raises `SpecError` where the folder cannot be used. Changes are on disk when a method returns;
    where the disk fails they raise OSError and change nothing.
    """

    def __init__(self, options: BatchOptions, disk: Disk | None = None) -> None:
        self.options = options
        self.disk = disk or Disk()
        self.folder = options.batch_dir
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = OutputLock(self.folder / "lock", self.folder)
        except InputError as error:
            raise SpecError(
                f"the folder {self.folder} of files and batches is in use by another llmpq serve; "
                "end that, or pass another --batch_dir"
            ) from error
        except OSError as error:
            raise SpecError(
                f"the folder {self.folder} of files and batches cannot be used: {error.strerror}; "
                "pass another --batch_dir"
            ) from error
        self.arriving_bytes = 0
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            try:
                self.files = Index(self.folder / "files", FILE_ID, StoredFile, self.disk)
                self.batches = Index(self.folder / "batches", BATCH_ID, Batch, self.disk)
                self._clean_up_batches()
                self._clean_up_files()
            except OSError as error:
                raise SpecError(
                    f"{error.filename} cannot be used: {error.strerror}; give the user of the "
                    "server access to it, or pass another --batch_dir"
                ) from error
            undo.pop_all()

    def close(self) -> None:
        """Let others use the folder; it is removed where nothing is in it."""
        self._lock.release()
        for path in (self.files.folder, self.batches.folder, self.folder):
            with suppress(OSError):
                path.rmdir()

    def _clean_up_batches(self) -> None:
        """Remove what a kill has left, and make batches that fail of what is damaged."""
        left = {name: self.batches.path(name) for name in self.batches.damaged}
        for path in self.batches.folder.iterdir():
            batch = self.batches.get(path.stem)
            if not BATCH_ID.fullmatch(path.stem):
                continue
            if path.suffix == PART:
                self.disk.unlink(path)
            elif path.suffix:
                continue
            elif batch is None:
                left.setdefault(path.name, path)
            elif batch.status == "failed":
                set_aside(self.disk, path)
            elif batch.is_finished:
                self.remove_job(path.name)
        for name, path in left.items():
            why = self.batches.damaged.get(name, "its record is lost")
            batch = remade_batch(name, self.batches.next_number, why, path)
            self.batches.remake(batch, why)

    def _clean_up_files(self) -> None:
        """Remove files that are not whole, or that no record is of and no batch needs."""
        for file in self.files:
            if not self.path(file.id).exists():
                self.files.remove(file.id)
        lost = {each.input_file_id: "its record is lost" for each in self.unfinished()}
        lost = {name: why for name, why in lost.items() if self.files.get(name) is None}
        for name, why in (lost | self.files.damaged).items():
            if self.path(name).is_file():
                file = remade_file(self.path(name), self.files.next_number, why)
                self.files.remake(file, why)
        for path in self.files.folder.iterdir():
            is_left = path.suffix == PART or self.files.get(path.stem) is None
            if not is_left or not FILE_ID.fullmatch(path.stem):
                continue
            if path.stem in self.files.damaged or path.is_dir():
                set_aside(self.disk, path)
            else:
                self.disk.unlink(path)

    @property
    def stored_bytes(self) -> int:
        return sum(each.bytes for each in self.files) + self.arriving_bytes

    def path(self, file_id: str) -> Path:
        return self.files.folder / f"{file_id}{_CONTENT}"

    def job_path(self, batch_id: str) -> Path:
        """Folder of a batch that is not finished."""
        return self.batches.folder / batch_id

    def remove_job(self, batch_id: str) -> None:
        shutil.rmtree(self.job_path(batch_id), ignore_errors=True)

    def write_output(self, file: StoredFile, lines: Iterable[bytes]) -> None:
        """Write a file that a batch has made; one of that id that is there already is replaced."""

        def fill(sink: Sink) -> None:
            for line in lines:
                sink.write(line)

        path = self.path(file.id)
        commit_file(self.disk, path, path.with_suffix(PART), fill)
        self.files.put(replace(file, bytes=path.stat().st_size))

    def remove_file(self, file_id: str) -> None:
        self.files.remove(file_id)
        with suppress(OSError):  # at the next start it is removed, as no record is of it
            self.disk.unlink(self.path(file_id))

    def users(self, file_id: str) -> list[str]:
        """Ids of the batches that still need a file."""
        return [each.id for each in self.unfinished() if each.input_file_id == file_id]

    def batch(self, batch_id: str) -> Batch:
        found = self.batches.get(batch_id)
        assert found is not None, "a batch is removed long after its end"
        return found

    def unfinished(self) -> list[Batch]:
        """The batches that are not finished, in the order in which they came."""
        return [each for each in self.batches if not each.is_finished]

    def remove_expired(self, now_s: float) -> None:
        """Remove files whose time is over, unless a batch needs them, and old finished batches."""
        used = {each.input_file_id for each in self.unfinished()}
        for file in self.files:
            if file.expires_at is not None and file.expires_at <= now_s and file.id not in used:
                self.remove_file(file.id)
        for batch in self.batches:
            if batch.finished_at is not None and batch.finished_at + KEPT_S <= now_s:
                self.batches.remove(batch.id)


class Arrival:
    """A file that arrives in parts; at its end it is gone unless it is kept. Raises OSError."""

    def __init__(self, store: BatchStore) -> None:
        self.id = f"file-{secrets.token_hex(16)}"
        self.bytes = 0
        self._store = store
        self._path = store.path(self.id)
        self._aside = self._path.with_suffix(PART)
        self._descriptor: int | None = store.disk.open_new(self._aside)
        self._sink = Sink(store.disk, self._descriptor)
        self._mutex = threading.Lock()

    def count(self, more: int) -> None:
        self.bytes += more
        self._store.arriving_bytes += more

    def write(self, data: bytes) -> None:
        """Write the next part; may be called in a thread."""
        with self._mutex:
            if self._descriptor is not None:  # else whoever waited for it has gone
                self._sink.write(data)

    def keep(self, file: StoredFile) -> StoredFile:
        """Keep the whole file, as `file` says but for what the store knows."""
        store = self._store
        assert self._descriptor is not None, "a file is kept once"
        store.disk.fsync(self._descriptor)
        self._close_descriptor()
        store.disk.rename(self._aside, self._path)
        kept = replace(
            file,
            id=self.id,
            number=store.files.next_number,
            bytes=self.bytes,
            digest=self._sink.digest(),
        )
        try:
            store.files.put(kept)
        except OSError:
            with suppress(OSError):
                store.disk.unlink(self._path)
            raise
        return kept

    def close(self) -> None:
        self._store.arriving_bytes -= self.bytes
        with suppress(OSError):
            self._close_descriptor()
        with suppress(OSError):
            os.unlink(self._aside)

    def _close_descriptor(self) -> None:
        with self._mutex:
            if self._descriptor is not None:
                descriptor, self._descriptor = self._descriptor, None
                self._store.disk.close(descriptor)
