"""Results on their way to disk: they wait in memory until their shard is committed."""

from __future__ import annotations

import threading
from contextlib import suppress

from llmpq.jobs.job_files import write_shard
from llmpq.jobs.output_options import OutputOptions
from llmpq.jobs.result_lines import line_of, openai_line
from llmpq.jobs.row_database import Done, RowDatabase
from llmpq.jobs.store import JobStore, Manifest
from llmpq.rows.results import Result
from quant.common.errors import InputError

SHARD_BYTES = 2**24
"""Bytes of a shard's lines, which wait in memory."""


class ShardWriter:
    """Writes results in shards from `number` on, the `manifest` before the first of them.

    Methods raise the OSError that has kept a shard from being written, also of a commit by time,
    and may be called from several threads.
    """

    def __init__(
        self,
        store: JobStore,
        manifest: Manifest,
        database: RowDatabase,
        number: int,
        options: OutputOptions,
    ) -> None:
        self.manifest = manifest
        self.committed = 0
        self.begun = False
        self.failure: OSError | None = None
        self._store = store
        self._database = database
        self._number = number
        self._options = options
        self._lines: list[bytes] = []
        self._bytes = 0
        self._mutex = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Commit every `shard_s` seconds from now on, also while no rows come."""
        if self._options.shard_s is not None:
            threading.Thread(target=self._commit_by_time, daemon=True).start()

    def write(self, result: Result, is_chat: bool) -> bool:
        """Add a result; False if its id has one already, which stays.

        `is_chat`: its prompt was messages. Raises `InputError` for an id that is not in the
        database.
        """
        with self._mutex:
            self._raise_failure()
            fingerprint = self._database.wanted(result.custom_id)
            if fingerprint is None:
                raise InputError(f"row {result.custom_id!r:.80} was not there when the job began")
            failed = result.error is not None
            done = Done(fingerprint, failed, self._number + 1, len(self._lines))
            if not self._database.record(result.custom_id, done):
                return False
            if self.manifest.output_format == "rows":
                line = line_of(result, fingerprint)
            else:
                line = openai_line(result, fingerprint, self.manifest.model_name, is_chat)
            self._lines.append(line)
            self._bytes += len(line)
            if len(self._lines) >= self._options.shard_rows or self._bytes >= SHARD_BYTES:
                self._commit()
            return True

    def commit(self) -> None:
        """Bring everything that was written to disk."""
        with self._mutex:
            self._raise_failure()
            self._commit()

    def stop(self) -> None:
        self._closed.set()

    def _commit(self) -> None:
        if not self._lines:
            return
        store, lines = self._store, self._lines
        try:
            if not self.begun:
                store.begin(self.manifest, self._database.row_blocks())
                self.begun = True
            write_shard(store.disk, store.path, self.manifest.generation, self._number, lines)
        except OSError as error:
            self.failure = error
            raise
        self.committed += len(lines)
        self._lines, self._bytes = [], 0
        self._number += 1

    def _commit_by_time(self) -> None:
        while not self._closed.wait(self._options.shard_s):
            with self._mutex, suppress(OSError):  # the next call raises it
                if self.failure is None:
                    self._commit()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
