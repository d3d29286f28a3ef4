"""Output of a job: its files, or a pipe or device, where nothing can be kept or resumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job_files import JobIdentity
from llmpq.jobs.job_output import JobOutput, NamesAt, ReadInputAgain
from llmpq.jobs.output_options import OutputForm, OutputOptions
from llmpq.jobs.result_lines import openai_line
from llmpq.jobs.row_database import Done, RowDatabase
from llmpq.jobs.store import InputRecord
from llmpq.rows.results import Result
from quant.common.errors import InputError


class ResultStream:
    """Writes results line by line, each at once, and knows of nothing that was done before.

    It has the methods that a job calls of a `JobOutput`, and raises `InputError` where its reader
    or disk fails.
    """

    def __init__(self, path: Path, output_format: OutputForm = "rows") -> None:
        self.path = path
        self.output_format = output_format
        self._model_name = ""
        self.journal = None
        self._database = RowDatabase()

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        return None

    def load(
        self, identity: JobIdentity, database: RowDatabase, retry_errors: bool = False
    ) -> None:
        self._database = database
        self._model_name = identity.model_name

    def check_rows(self, names_at: NamesAt, extend: bool = False) -> None:
        pass

    def check_columns(self, names: Collection[str]) -> None:
        pass

    def write(self, result: Result, is_chat: bool = False) -> bool:
        done = Done("", result.error is not None, 0, 0)
        if not self._database.record(result.custom_id, done):
            return False
        try:
            self._file.write(self._line_of(result, is_chat))
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def _line_of(self, result: Result, is_chat: bool) -> str:
        if self.output_format == "rows":
            return result.to_json() + "\n"
        fingerprint = self._database.wanted(result.custom_id) or ""
        return openai_line(result, fingerprint, self._model_name, is_chat).decode()

    def commit(self) -> None:
        pass

    def finish(self, read_input: ReadInputAgain = lambda: None) -> None:
        pass

    def resume_hint(self) -> str:
        return ""

    def committed_message(self) -> str:
        """Words for a stream, whose reader has the results."""
        return "what was finished has been handed on"

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write output {self.path}: {error.strerror}")

    def __enter__(self) -> Self:
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
        with suppress(OSError):  # a full disk was reported by the write that met it
            self._file.close()


Output = JobOutput | ResultStream


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
