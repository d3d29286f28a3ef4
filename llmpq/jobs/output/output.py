"""Output of a job: files, or a pipe or device, where nothing can be kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.output.job_output import JobOutput
from llmpq.jobs.output.options import JournalPlace, OutputOptions
from llmpq.jobs.output.result_stream import ResultStream
from llmpq.jobs.records.completion_record import InputRecord, ReadInputAgain
from llmpq.jobs.records.input_changes import InputChanges
from llmpq.jobs.records.manifest import JobIdentity, OutputForm
from llmpq.jobs.records.row_database import RowDatabase
from llmpq.rows.results import Result
from quant.common.errors import InputError


class Output(Protocol):
    """The place that a job writes to; entering it as a context manager opens it."""

    @property
    def path(self) -> Path:
        """The place as the user named it."""

    @property
    def output_format(self) -> OutputForm:
        """What a line of the results is."""

    @property
    def journal(self) -> JournalPlace | None:
        """The place for a journal; None where nothing is kept."""

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """The record of `source` if it is done and unchanged; no row is looked at for it."""

    def load(
        self, identity: JobIdentity, database: RowDatabase, retry_errors: bool = False
    ) -> None:
        """Note the results that are there already in `database`."""

    def changes(self, extend: bool = False) -> InputChanges:
        """Compare the rows of the database with those that the job was begun with.

        With `extend`, only rows that a result stands in the way of count.
        """

    def check_columns(self, names: Collection[str]) -> None:
        """Raise `InputError` where results with these own columns of rows cannot be written."""

    def results_without_row(self) -> Iterator[str]:
        """Ids of results whose rows are not in the database."""

    def write(self, result: Result, is_chat: bool = False) -> bool:
        """Add a result; False if its row has one already. `is_chat`: its prompt was messages."""

    def commit(self) -> None:
        """Bring everything that was written to disk."""

    def finish(self, read_input: ReadInputAgain = lambda: None) -> None:
        """Complete the output: all rows are done, those of the files that `read_input` reads."""

    def resume_hint(self) -> str:
        """A message's words for where to go on; empty where nothing is kept."""

    def committed_message(self) -> str:
        """A message's words for how much is kept and where to go on."""

    def __enter__(self) -> Self:
        """Open the output."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep what can be kept."""


def open_output(name: str, options: OutputOptions, inputs: Sequence[Path]) -> Output:
    """A stream for pipes and devices, else the files of a job."""
    path = Path(name)
    try:
        exists = path.exists() and not path.is_dir()
        if exists and (not path.is_file() or path.absolute().parent == Path("/dev")):
            return ResultStream(path, options.output_format or options.default_format)
        return JobOutput(name, options, inputs)
    except OSError as error:  # too long a name, a folder that may not be searched
        raise InputError(f"cannot write output {name}: {error.strerror}") from error
