"""The results of a job on disk: committed shard by shard, joined in the end, each id once.

Beside `results.jsonl` lies the folder `results.jsonl.job` with the manifest and, while the job
runs, its shards; an output that is a folder holds them itself. The rename of a shard commits it.
Whatever is cut off then leaves a file that is written over, or one that is read twice: of two
lines of one id the database counts one, so that joining again gives the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmpq.jobs.file_format import output_format
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job_files import (
    Disk,
    FileRecord,
    FolderRecord,
    MirroredDisk,
    OutputLock,
    Shard,
    is_shard,
    settled_identities,
    shards_in,
)
from llmpq.jobs.parquet import MOST_COLUMNS
from llmpq.jobs.result_files import ResultFiles, ShardWriter
from llmpq.jobs.result_lines import OutputForm, OutputOptions, check_writable
from llmpq.jobs.row_database import InputChanges, RowDatabase
from llmpq.jobs.store import (
    LOCK,
    MANIFEST,
    CompletionRecord,
    InputRecord,
    JobIdentity,
    JobStore,
    Manifest,
)
from llmpq.rows.results import Result
from llmpq.version import llmpq_version
from quant.common.errors import InputError
from quant.common.files import FileIdentity
from quant.common.url_files import AnyFile, is_url
from quant.common.url_mirror import UrlMirror

_MAY_COMMIT = (Exception, KeyboardInterrupt, SystemExit)

ReadInputAgain = Callable[[], InputRecord | None]
"""Reads the files of the input once more; None where they cannot be recorded."""

NamesAt = Callable[[Sequence[int]], Mapping[int, str]]
"""Finds the ids of the rows at some places of the input."""


def is_mirrored(name: str) -> bool:
    """Whether a file in the folder of a job has a copy behind the URL of a folder."""
    return name == MANIFEST or is_shard(name)


class JobOutput:
    """Context manager that holds the output's lock, and commits what there is when it is left.

    A job calls `load`, then `write` for each result and `finish` once all are there. Raises
    `InputError` when the output cannot be written, is one of `inputs`, is being written by another
    process, or holds what llmpq did not write.
    """

    def __init__(
        self,
        named: str | Path,
        options: OutputOptions | None = None,
        inputs: Sequence[AnyFile] = (),
        disk: Disk | None = None,
    ) -> None:
        self._mirror = UrlMirror(str(named), is_mirrored) if is_url(str(named)) else None
        path = self._named = Path(named) if self._mirror is None else self._mirror.local
        path = path.resolve() if path.is_symlink() else path
        self.path = path
        self._shown = path if self._mirror is None else str(named)
        self._resumed = 0
        self.options = options or OutputOptions()
        self._inputs = inputs
        self._in_folder = str(named).endswith(os.sep) or path.is_dir()
        self.folder = path if self._in_folder else path.with_name(path.name + ".job")
        if self._mirror is not None and self._in_folder:
            disk = MirroredDisk(self._mirror)
        self._store = JobStore(self.folder, disk or Disk())
        self._writer: ShardWriter | None = None
        self._manifest: Manifest | None = None
        self._before: FileIdentity | None = None

    def __enter__(self) -> JobOutput:
        """Lock the output; nothing else changes before the first result is committed."""
        try:
            self._check_target()
            self._is_new = not self.folder.exists()
            self._store.disk.make_folder(self.folder)
            self._lock = OutputLock(self.folder / LOCK, self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if self._mirror is not None:
                self._try_there(partial(self._mirror.pull, self.options.overwrite))
            self._read_manifest()
        except BaseException:
            self._release()
            raise
        return self

    def _try_there(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            raise self._unwritable(error) from error

    def _push(self) -> None:
        if self._mirror is not None:
            self._mirror.push()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Commit what there is, unless that has failed already, and unlock."""
        try:
            if self._writer is not None:
                self._writer.stop()
                may_commit = kind is None or issubclass(kind, _MAY_COMMIT)
                if self._writer.failure is None and may_commit:
                    self.commit()
        finally:
            self._release()

    def _check_target(self) -> None:
        if not self._in_folder:
            check_writable(self._named, self.path)
        if self._is_table and self.options.output_format == "openai":
            raise InputError(
                f"output {self.path} would be a table, and OpenAI's lines are none; name an output "
                "that ends in .jsonl, or pass --output_format rows"
            )
        local = (source for source in self._inputs if isinstance(source, Path))
        if self.path.exists() and any(map(self.path.samefile, local)):
            raise InputError(f"output {self._shown} is the input too; name another file")
        if any(str(source) == self._shown for source in self._inputs):
            raise InputError(f"output {self._shown} is the input too; name another file")
        if not self._in_folder or not self.path.is_dir() or self.options.overwrite:
            return
        foreign = self._store.foreign()
        if foreign is not None:
            raise InputError(
                f"output {self.path} is a folder with other files in it ({foreign}); name an "
                "empty one, or a file in it"
            )

    def _read_manifest(self) -> None:
        found = None if self.options.overwrite else self._store.manifest()
        self._manifest = found
        try:
            shards = shards_in(self.folder)
            exists = found is not None or bool(shards) or self._has_finished_file()
        except OSError as error:
            raise self._unwritable(error) from error
        if self.options.resume and not exists:
            raise InputError(f"there is nothing to resume at output {self._shown}")
        self.output_format = self._settled_format(found)
        newest = max((shard.generation for shard in shards), default=1)
        self._generation = newest if found is None else found.generation
        if self.options.overwrite:
            self._generation = newest + 1

    def _settled_format(self, found: Manifest | None) -> OutputForm:
        """What lines are: as the job that is there has them, or as is asked."""
        options = self.options
        asked = options.output_format
        if found is None:
            return asked or ("rows" if self._is_table else options.default_format)
        if asked not in (None, found.output_format):
            raise InputError(
                f"output {self.path} was made with output_format {found.output_format!r}, this job "
                f"has {asked!r}; pass --output_format as then, name another output or pass "
                "--overwrite"
            )
        return found.output_format

    @property
    def _is_table(self) -> bool:
        return not self._in_folder and output_format(self.path).rows != "jsonl"

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """The record of `source` if it is done and neither it nor the output has changed since.

        Reads no rows; None where they must be looked at. Raises `InputError` if the output belongs
        to another job.
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
        with suppress(OSError):  # reading the rows will say what is wrong
            if source.matches(record.input) and self._is_unchanged(record.output):
                self._push()
                return record.input
        return None

    def _is_unchanged(self, record: FileRecord | FolderRecord) -> bool:
        shards = shards_in(self.folder)
        if self._store.holds_leftovers():
            return False
        if isinstance(record, FileRecord):
            return not self._in_folder and not shards and record.matches(self.path)
        return self._in_folder and record.matches(shards)

    def load(
        self, identity: JobIdentity, database: RowDatabase, retry_errors: bool = False
    ) -> None:
        """Note results that are in `database` and begin; InputError if of another job."""
        if self._manifest is not None:
            self._manifest.check_same_job(identity, self.path)
        replaces = self.options.overwrite or bool(self._manifest and self._manifest.replaces)
        self._finished = not replaces and self._has_finished_file()
        self._database = database
        manifest = Manifest.of(identity, self._generation, replaces)
        manifest = replace(manifest, output_format=self.output_format)
        number = max((shard.number for shard in self._shards()), default=-1) + 1
        self._writer = ShardWriter(self._store, manifest, database, number, self.options)
        if self._mirror is not None:
            self._try_there(self._mirror.check_writable)
        try:
            if self._finished:
                (self._before,) = settled_identities([self.path])
            self._results().note(manifest, retry_errors, self._store.disk)
        except OSError as error:
            raise InputError(f"cannot read output {self._shown}: {error.strerror}") from error
        self._resumed, _ = database.done_counts()
        self._writer.start()

    def check_rows(self, names_at: NamesAt, extend: bool = False) -> None:
        """Have the rows of the database be those of the job from now on.

        Raises `InputError` where they differ from those that it was begun with, with `extend` only
        for rows that a result stands in the way of, and where these are not known any more.
        """
        digest = self._database.rows_digest()
        writer = self._loaded()
        writer.manifest = replace(writer.manifest, input_digest=digest)
        blocked = self._database.has_other_result()
        earlier = None if extend or not self._resumed else self._earlier_rows(digest)
        if earlier is None and not blocked:
            return
        changes = self._database.compare(earlier or ())
        if earlier is None:
            changes = InputChanges(another=changes.another, another_places=changes.another_places)
        if blocked or changes != InputChanges():
            names = names_at((*changes.new_places, *changes.another_places))
            raise changes.error(self.path, blocked, names, self._results().without_row())

    def _earlier_rows(self, digest: str) -> Iterator[bytes] | None:
        """Rows that the job began with, as far as results do not tell them; None if unknown."""
        if self._manifest is None:
            return iter(()) if self._finished else None
        known = self._manifest.input_digest
        if known is None or known == digest:
            return None
        return iter(()) if self._manifest.complete else self._store.rows_begun_with(known)

    def check_columns(self, names: Collection[str]) -> None:
        """Raise `InputError` where a table would have too many own columns of rows."""
        if self._is_table and len(names) > MOST_COLUMNS:
            raise InputError(
                f"output {self.path} would be a table of more than {MOST_COLUMNS} own columns of "
                "the input's rows; name an output that ends in .jsonl, or have fewer columns"
            )

    def _results(self) -> ResultFiles:
        return ResultFiles(self.path, self._finished, tuple(self._shards()), self._database)

    def _loaded(self) -> ShardWriter:
        assert self._writer is not None, "`load` comes first"
        return self._writer

    def finished(self) -> Iterator[object]:
        """Lines and rows of all results that are there."""
        return self._results().all()

    def write(self, result: Result, is_chat: bool = False) -> bool:
        """Add a result; False if its id has one already, which stays.

        `is_chat`: its prompt was messages. Raises `InputError` when earlier results could not be
        committed.
        """
        try:
            return self._loaded().write(result, is_chat)
        except OSError as error:
            raise self._unwritable(error) from error

    def commit(self) -> None:
        try:
            self._loaded().commit()
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self, read_input: ReadInputAgain = lambda: None) -> None:
        """Leave one line for each id, the manifest of a finished job, and its identity."""
        writer = self._loaded()
        writer.stop()
        self.commit()
        try:
            self._finish(writer, read_input())
        except OSError as error:
            writer.failure = error
            raise self._unwritable(error) from error

    def _finish(self, writer: ShardWriter, source: InputRecord | None) -> None:
        store, results, written = self._store, self._results(), None
        if self._in_folder and self._database.replaced:
            results.compact(store.disk, self.folder, self._generation)
        elif not self._in_folder and (results.shards or self._database.replaced):
            written = results.write(store.disk, store.joined)
        rows, errors = self._database.done_counts()
        output = self._record(written) if source else None
        record = CompletionRecord(source, output, llmpq_version()) if source and output else None
        manifest = replace(
            writer.manifest, replaces=False, complete=True, rows=rows, errors=errors, record=record
        )
        if writer.begun or manifest != self._manifest:
            store.write_manifest(manifest)
        store.clean_up(self._generation if self._in_folder else None)
        self._push()

    def _record(self, written: str | None) -> FileRecord | FolderRecord | None:
        """The output's record, or None if it was changed since it was read or `written`."""
        if self._in_folder:
            return FolderRecord.of(self._shards())
        record = FileRecord.of(self.path, self.path.name)
        if record is None or written is not None:
            return record if record and record.digest == written else None
        return record if FileIdentity.of(self.path) == self._before else None

    def _shards(self) -> list[Shard]:
        return self._store.shards(self._generation)

    def _has_finished_file(self) -> bool:
        return not self._in_folder and self.path.exists() and self.path.stat().st_size > 0

    @property
    def journal(self) -> Path:
        return self._store.journal

    @property
    def newest_shard(self) -> tuple[int, int] | None:
        newest = max(shards_in(self.folder), default=None)
        return None if newest is None else (newest.generation, newest.number)

    @property
    def committed(self) -> int:
        return self._writer.committed if self._writer is not None else 0

    def resume_hint(self) -> str:
        begun = self._writer is not None and self._writer.begun
        if not begun and self._manifest is None:
            return ""
        return f" in {self.folder}; {self._same_command()} goes on from there"

    def committed_message(self) -> str:
        """A message's words for the rows on disk, of earlier runs too, and where to go on."""
        return f"{self._resumed + self.committed} rows are committed{self.resume_hint()}"

    def _same_command(self) -> str:
        return "the same command" + " without --overwrite" * self.options.overwrite

    def _unwritable(self, error: OSError) -> InputError:
        kept = ""
        if self.committed:
            kept = (
                f"; {self.committed} rows of this run are committed in {self.folder}, and "
                f"{self._same_command()} goes on from there"
            )
        return InputError(f"cannot write output {self._shown}: {error.strerror}{kept}")

    def _release(self) -> None:
        self._lock.release()
        if self._is_new and not (self._writer is not None and self._writer.begun):
            with suppress(OSError):  # somebody else has put something there
                self._store.journal.unlink(missing_ok=True)
                self.folder.rmdir()
