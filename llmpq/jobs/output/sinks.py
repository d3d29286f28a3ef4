"""Where results go: to a job's files, or to a pipe or device, where nothing can be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.output.output import JobOutput, OutputOptions
from llmpq.jobs.records.changes import Changes
from llmpq.jobs.records.ledger import Done, Ledger
from llmpq.jobs.records.manifest import JobIdentity
from llmpq.jobs.records.record import InputRecord, TellInput
from llmpq.rows.results import Result
from quant.common.errors import InputError


class Output(Protocol):
    """What a job writes to; as a context manager it is open."""

    @property
    def path(self) -> Path:
        """As the user named it."""

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """What is known of `source` if it is done and unchanged, without a look at its rows."""

    def load(self, identity: JobIdentity, ledger: Ledger, retry_errors: bool = False) -> None:
        """Take up what is done already into `ledger`."""

    def changes(self, extend: bool = False) -> Changes:
        """What is different about the rows of the ledger since the job was begun; where it may be
        extended, only whether a result is in their way.
        """

    def gone(self) -> Iterator[str]:
        """Ids of results whose rows are not among those of the ledger."""

    def write(self, result: Result) -> bool:
        """Take a result in; False if its row has one already."""

    def commit(self) -> None:
        """Bring everything that was written to disk."""

    def finish(self, given: TellInput = lambda: None) -> None:
        """All rows are done, those of the files that were `given`."""

    def kept(self) -> str:
        """Where to go on, for a message."""

    def told(self) -> str:
        """How much is kept and where to go on, as a message."""

    def __enter__(self) -> Self:
        """Open it."""

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
            return ResultStream(path)
        return JobOutput(name, options, inputs)
    except OSError as error:  # too long a name, a folder that may not be searched
        raise InputError(f"cannot write output {name}: {error.strerror}") from error


class ResultStream:
    """Writes results line by line, each at once. Raises `InputError` when that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ledger = Ledger()

    def recorded(
        self, identity: JobIdentity, source: JobInput, retry_errors: bool = False
    ) -> InputRecord | None:
        """Nothing."""
        return None

    def load(self, identity: JobIdentity, ledger: Ledger, retry_errors: bool = False) -> None:
        """Nothing is done yet."""
        self._ledger = ledger

    def changes(self, extend: bool = False) -> Changes:
        """None: nothing is done yet."""
        return Changes()

    def gone(self) -> Iterator[str]:
        """None."""
        return iter(())

    def write(self, result: Result) -> bool:
        """Write one line and hand it on."""
        done = Done("", result.error is not None, 0, 0)
        if not self._ledger.record(result.custom_id, done):
            return False
        try:
            self._file.write(result.to_json() + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._unwritable(error) from error
        return True

    def commit(self) -> None:
        """Everything has been handed on."""

    def finish(self, given: TellInput = lambda: None) -> None:
        """Everything has been handed on."""

    def kept(self) -> str:
        """Nowhere."""
        return ""

    def told(self) -> str:
        """Whoever reads the stream has it."""
        return "what was finished has been handed on"

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write output {self.path}: {error.strerror}")

    def __enter__(self) -> Self:
        """The open stream."""
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
        """Close it; a full disk was reported by the write that met it."""
        with suppress(OSError):
            self._file.close()
