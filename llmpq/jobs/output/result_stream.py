"""Results as lines to a pipe or device, where nothing can be kept and nothing resumed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.output.openai_lines import openai_line
from llmpq.jobs.records.completion_record import InputRecord, ReadInputAgain
from llmpq.jobs.records.input_changes import InputChanges
from llmpq.jobs.records.manifest import JobIdentity, OutputForm
from llmpq.jobs.records.row_database import Done, RowDatabase
from llmpq.rows.results import Result
from quant.common.errors import InputError


class ResultStream:
    """Writes results line by line, each at once; raises `InputError` where that fails."""

    def __init__(self, path: Path, output_format: OutputForm = "rows") -> None:
        self.path = path
        self.output_format = output_format
        self._model_name = ""
        self.journal = None
        self._database = RowDatabase()

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """Return None: nobody can tell what a stream has taken."""
        return None

    def load(
        self, identity: JobIdentity, database: RowDatabase, retry_errors: bool = False
    ) -> None:
        """Keep the database, in which nothing is done yet."""
        self._database = database
        self._model_name = identity.model_name

    def changes(self, extend: bool = False) -> InputChanges:
        """No changes, as nothing is done yet."""
        return InputChanges()

    def check_columns(self, names: Collection[str]) -> None:
        """Accept any: each line names its own."""

    def results_without_row(self) -> Iterator[str]:
        """No ids, as nothing is done yet."""
        return iter(())

    def write(self, result: Result, is_chat: bool = False) -> bool:
        """Write one line at once; False if the row has a result already."""
        done = Done("", result.error is not None, 0, 0)
        if not self._database.record(result.custom_id, done):
            return False
        try:
            self._file.write(self._line_of(result, is_chat) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def _line_of(self, result: Result, is_chat: bool) -> str:
        if self.output_format == "rows":
            return result.to_json()
        fingerprint = self._database.wanted(result.custom_id) or ""
        return openai_line(result, fingerprint, self._model_name, is_chat)

    def commit(self) -> None:
        """Do nothing: each line was handed on at once."""

    def finish(self, read_input: ReadInputAgain = lambda: None) -> None:
        """Do nothing: each line was handed on at once."""

    def resume_hint(self) -> str:
        """No words: a stream keeps nothing."""
        return ""

    def committed_message(self) -> str:
        """Words for a stream, whose reader has the results."""
        return "what was finished has been handed on"

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write output {self.path}: {error.strerror}")

    def __enter__(self) -> Self:
        """Open the stream."""
        try:
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the stream; a full disk was reported by the write that met it."""
        with suppress(OSError):
            self._file.close()
