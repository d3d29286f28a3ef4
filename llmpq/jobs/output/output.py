"""The results of a job on disk: committed shard by shard, joined in the end, each id once.

Beside `results.jsonl` lies the folder `results.jsonl.job` with the manifest and, while the job
runs, its shards; an output that is a folder holds them itself. The rename of a shard commits it.
Whatever is cut off then leaves a file that is written over, or one that is read twice: of two
lines of one id the ledger counts one, so that joining again gives the same rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.output.finished import Join, check_writable, line_of
from llmpq.jobs.output.folder import LOCK, JobFolder
from llmpq.jobs.output.taken import Takes
from llmpq.jobs.records.changes import Changes
from llmpq.jobs.records.files import Files
from llmpq.jobs.records.ledger import Done, Ledger
from llmpq.jobs.records.lock import OutputLock
from llmpq.jobs.records.manifest import JobIdentity, Manifest
from llmpq.jobs.records.record import (
    FileRecord,
    FolderRecord,
    InputRecord,
    JobRecord,
    TellInput,
    settled_identities,
)
from llmpq.jobs.records.row_list import RowList, rows_digest
from llmpq.jobs.records.shards import Shard, shards_in, write_shard
from llmpq.rows.results import Result
from quant.common.errors import InputError
from quant.common.file_identity import FileIdentity

SHARD_ROWS = 1000
SHARD_S = 10.0
SHARD_BYTES = 2**24
"""Of a shard's lines, which wait in memory."""


@dataclass(frozen=True)
class OutputOptions:
    """`overwrite` starts anew, `resume` demands that there is something; a shard is closed after
    `shard_rows` rows or `shard_s` seconds (None: rows alone).
    """

    overwrite: bool = False
    resume: bool = False
    shard_rows: int = SHARD_ROWS
    shard_s: float | None = SHARD_S


class JobOutput:
    """Context manager that holds the output's lock; a job reads with `load`, then calls `write` for
    each result and `finish` once all are there. Leaving it commits what there is.

    Raises `InputError` when the output cannot be written, is one of `inputs`, is being written by
    another process, or holds what llmpq did not write.
    """

    def __init__(
        self,
        named: str | Path,
        options: OutputOptions | None = None,
        inputs: Sequence[Path] = (),
        files: Files | None = None,
    ) -> None:
        path = self._named = Path(named)
        path = path.resolve() if path.is_symlink() else path
        self.path = path
        self.committed = self._resumed = 0
        self._options = options or OutputOptions()
        self._inputs = inputs
        self._files = files or Files()
        self._in_folder = str(named).endswith(os.sep) or path.is_dir()
        self.folder = path if self._in_folder else path.with_name(path.name + ".job")
        self._job = JobFolder(self.folder, self._files)
        self._lines: list[bytes] = []
        self._bytes = 0
        self._number = 0
        self._begun = False
        self._failure: InputError | None = None
        self._mutex = threading.Lock()
        self._left = threading.Event()
        self._ledger: Ledger | None = None
        self._manifest: Manifest | None = None
        self._before: FileIdentity | None = None

    def __enter__(self) -> JobOutput:
        """Lock the output; nothing else changes before the first result is committed."""
        try:
            self._check_target()
            self._is_new = not self.folder.exists()
            self._files.make_folder(self.folder)
            self._lock = OutputLock(self.folder / LOCK, self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._read_manifest()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit what there is, unless that has failed already, and unlock."""
        self._left.set()
        try:
            if self._failure is None and (kind is None or issubclass(kind, _MAY_COMMIT)):
                self.commit()
        finally:
            self._release()

    def _check_target(self) -> None:
        if not self._in_folder:
            check_writable(self._named, self.path)
        if self.path.exists() and any(self.path.samefile(source) for source in self._inputs):
            raise InputError(f"output {self.path} is the input too; name another file")
        if not self._in_folder or not self.path.is_dir() or self._options.overwrite:
            return
        foreign = self._job.foreign()
        if foreign is not None:
            raise InputError(
                f"output {self.path} is a folder with other files in it ({foreign}); name an "
                "empty one, or a file in it"
            )

    def _read_manifest(self) -> None:
        found = None if self._options.overwrite else self._job.manifest()
        self._manifest = found
        try:
            shards = shards_in(self.folder)
            self.exists = found is not None or bool(shards) or self._has_finished_file()
        except OSError as error:
            raise self._unwritable(error) from error
        if self._options.resume and not self.exists:
            raise InputError(f"there is nothing to resume at output {self.path}")
        newest = max((shard.generation for shard in shards), default=1)
        self._generation = newest if found is None else found.generation
        if self._options.overwrite:
            self._generation = newest + 1
        self._number = max((s.number for s in self._shards()), default=-1) + 1

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """What is known of `source` if it has been done and neither it nor the output has changed
        since; None where rows must be looked at. Reads none.

        Raises `InputError` if the output belongs to another job.
        """
        manifest = self._manifest
        if manifest is None:
            return None
        manifest.check_same_job(identity, self.path)
        record = manifest.record
        if not manifest.complete or record is None or manifest.input_digest is None:
            return None
        if retry_errors and manifest.errors:
            return None
        with suppress(OSError):  # those who read it say what is the matter
            if source.matches(record.input) and self._is_as_left(record.output):
                return record.input
        return None

    def _is_as_left(self, record: FileRecord | FolderRecord) -> bool:
        shards = shards_in(self.folder)
        if self._job.holds_leftovers():
            return False
        if isinstance(record, FileRecord):
            return not self._in_folder and not shards and record.matches(self.path)
        return self._in_folder and record.matches(shards)

    def load(self, identity: JobIdentity, ledger: Ledger, retry_errors: bool = False) -> None:
        """Take up what is done already into `ledger`, and begin.

        Raises `InputError` if that belongs to another job.
        """
        self._ledger = ledger
        if self._manifest is not None:
            self._manifest.check_same_job(identity, self.path)
        replaces = self._options.overwrite or bool(self._manifest and self._manifest.replaces)
        self._finished = not replaces and self._has_finished_file()
        self._next_manifest = Manifest.of(identity, self._generation, replaces)
        takes = Takes(ledger, self.path, identity.model, identity.model_name, retry_errors)
        try:
            if self._finished:
                (self._before,) = settled_identities([self.path])
                takes.finished(self.path)
            for shard in self._shards():
                takes.shard(shard, self._files)
        except OSError as error:
            raise InputError(f"cannot read output {self.path}: {error.strerror}") from error
        self._resumed, _ = ledger.done_counts()
        if self._options.shard_s is not None:
            threading.Thread(target=self._commit_in_time, daemon=True).start()

    def changes(self, extend: bool = False) -> Changes:
        """What is different about the rows of the ledger since the job was begun; where it may be
        extended, only whether a result is in their way. From then on they are its rows.

        Raises `InputError` where it is not known with which rows it was begun.
        """
        assert self._ledger is not None
        digest = rows_digest(self._ledger.row_blocks())
        self._next_manifest = replace(self._next_manifest, input_digest=digest)
        blocked = self._ledger.other_result() is not None
        earlier = None if extend or not self._resumed else self._earlier_rows(digest)
        if earlier is None and not blocked:
            return Changes()
        found = replace(self._ledger.compare(earlier or ()), blocked=blocked)
        return found if earlier is not None else Changes(another=found.another, blocked=blocked)

    def _earlier_rows(self, digest: str) -> Iterator[bytes] | None:
        """Records of the rows that the job was begun with, as far as the results do not tell them;
        None if these are the rows of that `digest`, or unknown.
        """
        if self._manifest is None:
            return iter(()) if self._finished else None
        known = self._manifest.input_digest
        if known is None or known == digest:
            return None
        return iter(()) if self._manifest.complete else RowList(self.folder, known).blocks()

    def gone(self) -> Iterator[str]:
        """Ids of results whose rows are not among those of the ledger."""
        return self._join().gone()

    def _join(self) -> Join:
        assert self._ledger is not None
        finished = self.path if self._finished else None
        return Join(finished, tuple(self._shards()), self._ledger)

    def write(self, result: Result) -> bool:
        """Take a result in; False if its id has one already, which stays.

        Raises `InputError` when earlier ones could not be committed.
        """
        assert self._ledger is not None
        with self._mutex:
            self._raise_failure()
            fingerprint = self._ledger.wanted(result.custom_id)
            if fingerprint is None:
                raise InputError(f"row {result.custom_id!r:.80} was not there when the job began")
            failed = result.error is not None
            done = Done(fingerprint, failed, self._number + 1, len(self._lines))
            if not self._ledger.record(result.custom_id, done):
                return False
            line = line_of(result, fingerprint)
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

    def finish(self, given: TellInput = lambda: None) -> None:
        """All rows are done: leave one line for each id, and the manifest, by which the input that
        was `given` and the output are known again.
        """
        assert self._ledger is not None
        self._left.set()
        self.commit()
        with self._mutex:
            try:
                self._finish(self._ledger, given())
            except OSError as error:
                self._failure = self._unwritable(error)
                raise self._failure from error

    def _finish(self, ledger: Ledger, given: InputRecord | None) -> None:
        join = self._join()
        written = None
        if self._in_folder and ledger.replaced:
            join.compact(self._files, self.folder, self._generation)
        elif not self._in_folder and (join.shards or ledger.replaced):
            written = join.write(self._files, self.path, self._job.joined)
        rows, errors = ledger.done_counts()
        output = self._record(written) if given else None
        manifest = replace(
            self._next_manifest,
            replaces=False,
            complete=True,
            rows=rows,
            errors=errors,
            record=JobRecord.of(given, output) if given and output else None,
        )
        if manifest != self._manifest:
            self._job.write_manifest(manifest)
        self._job.clean_up(self._generation if self._in_folder else None)

    def _record(self, written: str | None) -> FileRecord | FolderRecord | None:
        """What is told of the output; None if somebody else has changed it since it was read, or
        since this digest of it was `written`.
        """
        if self._in_folder:
            return FolderRecord.of(self._shards())
        record = FileRecord.of(self.path, self.path.name)
        if record is None or written is not None:
            return record if record and record.digest == written else None
        return record if FileIdentity.of(self.path) == self._before else None

    def _commit(self) -> None:
        if not self._lines:
            return
        try:
            if not self._begun:
                self._begin()
            write_shard(self._files, self.folder, self._generation, self._number, self._lines)
        except OSError as error:
            self._failure = self._unwritable(error)
            raise self._failure from error
        self.committed += len(self._lines)
        self._lines = []
        self._bytes = 0
        self._number += 1

    def _begin(self) -> None:
        """The manifest first: shards of an older job count no more from then on."""
        assert self._ledger is not None
        self._job.begin(self._next_manifest, self._ledger)
        self._manifest = self._next_manifest
        self._begun = True

    def _commit_in_time(self) -> None:
        """The thread that commits rows while none come; what fails is told to the next caller."""
        while not self._left.wait(self._options.shard_s):
            with self._mutex, suppress(InputError):
                if self._failure is None:
                    self._commit()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _shards(self) -> list[Shard]:
        return self._job.shards(self._generation)

    def _has_finished_file(self) -> bool:
        return not self._in_folder and self.path.exists() and self.path.stat().st_size > 0

    def kept(self) -> str:
        """Where to go on, for a message."""
        there = self._begun or self._manifest is not None
        return f" in {self.folder}; {self._again()} goes on from there" if there else ""

    def told(self) -> str:
        """Rows that are committed, of earlier runs too, and where to go on."""
        return f"{self._resumed + self.committed} rows are committed{self.kept()}"

    def _again(self) -> str:
        return "the same command" + " without --overwrite" * self._options.overwrite

    def _unwritable(self, error: OSError) -> InputError:
        kept = ""
        if self.committed:
            kept = (
                f"; {self.committed} rows of this run are committed in {self.folder}, and "
                f"{self._again()} goes on from there"
            )
        return InputError(f"cannot write output {self.path}: {error.strerror}{kept}")

    def _release(self) -> None:
        self._lock.release()
        if self._is_new and not self._begun:
            with suppress(OSError):  # somebody else has put something there
                self.folder.rmdir()


_MAY_COMMIT = (Exception, KeyboardInterrupt, SystemExit)
