"""A job: its rows that are left to do, its options, its output, and the signals that stop it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Self, TextIO

from llmpq.jobs.inputs import JobInput, no_prompts
from llmpq.jobs.job_output import JobOutput, NamesAt, ReadInputAgain
from llmpq.jobs.parquet import MOST_COLUMNS
from llmpq.jobs.result_lines import OutputForm, OutputOptions, openai_line
from llmpq.jobs.row_database import Done, RowDatabase, RowKind, Tally, WantedRow, shown_id
from llmpq.jobs.same_rows import SameShare, SharedResults, is_greedy
from llmpq.jobs.store import InputRecord, JobIdentity
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from quant.common.errors import InputError
from quant.common.files import FileIdentity
from quant.common.url_files import AnyFile, is_url


class ResultStream:
    """Writes results line by line, each at once, and knows of nothing that was done before.

    It has the methods that a job calls of a `JobOutput`, and raises `InputError` where its reader
    or disk fails.
    """

    def __init__(self, path: Path, output_format: OutputForm = "rows") -> None:
        self.path = path
        self.output_format = output_format
        self._model_name = ""
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

    def finished(self) -> Iterator[object]:
        return iter(())

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
        return "what was finished has been handed on"

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(f"cannot write output {self.path}: {error.strerror}")

    def __enter__(self) -> Self:
        try:
            self._file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(OSError):  # a full disk was reported by the write that met it
            self._file.close()


Output = JobOutput | ResultStream


def open_output(name: str, options: OutputOptions, inputs: Sequence[AnyFile]) -> Output:
    """A stream for pipes and devices, else the files of a job."""
    if is_url(name):
        return JobOutput(name, options, inputs)
    path = Path(name)
    try:
        exists = path.exists() and not path.is_dir()
        if exists and (not path.is_file() or path.absolute().parent == Path("/dev")):
            return ResultStream(path, options.output_format or options.default_format)
        return JobOutput(name, options, inputs)
    except OSError as error:  # too long a name, a folder that may not be searched
        raise InputError(f"cannot write output {name}: {error.strerror}") from error


STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a command in good order."""

STOPS_OF_JOBS = (*STOPS, signal.SIGUSR1, signal.SIGHUP)
"""Those that a job goes on after: also a scheduler's warning, and a terminal that is closed."""


@contextmanager
def stop_signals(stops: Sequence[int] = STOPS) -> Iterator[list[int]]:
    """Have the signals `stops` raise `KeyboardInterrupt`; gives the numbers of signals seen.

    A destructor swallows the exception, so that only its number in the list tells.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    terminals = list(filter(os.isatty, range(3)))

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGHUP:
            _write_nowhere(terminals)
        if number in STOPS or seen.count(number) == 1:  # kernel and shell both tell of a hang-up
            signal.default_int_handler(number, frame)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    taken = [number for number in stops if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_code(seen: Sequence[int]) -> int:
    """The exit code of a command that signals have stopped: 128 and the number of the signal."""
    others = (number for number in seen if number != signal.SIGINT)
    return 128 + next(others, signal.SIGINT)


def _write_nowhere(numbers: Sequence[int]) -> None:
    """Lead streams of a terminal that is gone to nowhere: writing there would be an error."""
    with open(os.devnull, "r+b") as nowhere:
        for number in numbers:
            os.dup2(nowhere.fileno(), number)


@dataclass(frozen=True)
class JobOptions:
    """Options of a job.

    `retry_errors`: rows that ended in an error run again. `stop_at_error`: the first error ends the
    job. `extend`: a job that was begun with other rows keeps what is done and does these too.
    `dedupe`: of greedy rows that are the same one is computed for all.
    """

    retry_errors: bool = False
    stop_at_error: bool = False
    extend: bool = False
    dedupe: bool = False


def finished_tally(
    source: JobInput, output: Output, identity: JobIdentity, options: JobOptions
) -> Tally | None:
    """None where rows must be looked at; raises `InputError` for an output of another job."""
    found = output.recorded(identity, source, options.retry_errors)
    if found is None or (options.stop_at_error and found.errors):
        return None
    return Tally(found.rows, found.rows, found.errors, 0)


def check_ids(source: JobInput) -> None:
    """Raise `InputError` where an id comes twice, before an `OpenJob` is made."""
    database = RowDatabase()
    ids = (WantedRow(row.custom_id, "", place, 0) for row, place in source.rows())
    twice = database.want_all(ids)
    database.close()
    if twice is not None:
        raise _given_twice(source, *twice)


def _given_twice(source: JobInput, second: int, first: int) -> InputError:
    ids = (placed.row.custom_id for placed in source.rows() if placed.place == second)
    return InputError(
        f"custom_id {shown_id(next(ids))} of {source.place_name(second)} stands in "
        f"{source.place_name(first)} already; results could not be told apart"
    )


class OpenJob:
    """The rows of `source` and their results in `output`.

    The input is read once to check and count it, before anything is generated, and once more as it
    is generated; ids are kept on disk. Raises `InputError` for an input without rows or with an id
    twice, and for an output of another job or of other rows.
    """

    def __init__(
        self,
        source: JobInput,
        output: Output,
        identity: JobIdentity,
        options: JobOptions | None = None,
    ) -> None:
        self._source = source
        self._output = output
        self._identity = identity
        self._database = RowDatabase()
        self._written = self._errors = 0
        self._columns: set[str] = set()
        self._chats: set[str] = set()  # ids of rows in flight whose prompts are messages
        options = options or JobOptions()
        self._same = SameShare()
        self._shared: SharedResults | None = None
        self._before = source.identities()
        output.load(identity, self._database, options.retry_errors)
        self.tally = self._check(options)
        if options.dedupe:
            self._shared = SharedResults(self._database.repeated())
            if self.tally.resumed:
                self._shared.note_finished(output.finished())

    @property
    def errors(self) -> int:
        """Rows in error so far, of earlier runs too."""
        return self.tally.resumed_errors + self._errors

    @property
    def same_share(self) -> float:
        """Share of rows that are the same as another, nearly; of those that are drawn, none is."""
        return self._same.share

    def _check(self, options: JobOptions) -> Tally:
        twice = self._database.want_all(self._wanted(options))
        if twice is not None:
            raise _given_twice(self._source, *twice)
        self._output.check_columns(self._columns)
        self._output.check_rows(self._custom_ids, options.extend)
        tally = self._database.tally()
        if not tally.rows:
            raise no_prompts(", ".join(map(str, self._source.files)))
        return tally

    def _wanted(self, options: JobOptions) -> Iterator[WantedRow]:
        most = self._identity.sampling.max_new_tokens or 0
        for row, place in self._source.rows():
            tokens = 0
            if len(self._columns) <= MOST_COLUMNS:
                self._columns.update(row.columns)
            if isinstance(row, Row):
                tokens = row.sampling.get("max_new_tokens") or most
                if row.answers > 1 and not self._is_greedy(row):
                    tokens *= row.answers
            elif options.stop_at_error:
                name = self._source.place_name(place)
                raise InputError(f"{name}, row {shown_id(row.custom_id)}: {row.error}")
            fingerprint = self._identity.fingerprint(row)
            if isinstance(row, Row) and self._is_greedy(row):
                self._same.add(fingerprint)
            yield WantedRow(row.custom_id, fingerprint, place, tokens, self._kind(row, place))

    def _kind(self, row: Row | BadRow, place: int) -> RowKind:
        if isinstance(row, Row):
            return RowKind.GOOD
        is_nameless = row.custom_id == self._source.place_name(place)
        return RowKind.NAMELESS if is_nameless else RowKind.BAD

    def _custom_ids(self, places: Sequence[int]) -> dict[int, str]:
        """Ids of the rows at `places`, found in one more reading, for messages alone."""
        found = ((r.place, r.row.custom_id) for r in self._source.rows() if r.place in places)
        return dict(islice(found, len(places)))

    def _is_done(self, custom_id: str, fingerprint: str) -> bool:
        done = self._database.done(custom_id)
        if done is None or done.forgotten:
            return False
        if done.fingerprint != fingerprint and not done.failed:
            raise self._changed()
        return done.fingerprint == fingerprint

    def todo(self) -> Iterator[Row | BadRow]:
        """The rows without a result; raises `InputError` when the input has changed meanwhile."""
        for placed in self._source.rows():
            row = placed.row
            fingerprint = self._identity.fingerprint(row)
            if self._database.wanted(row.custom_id) != fingerprint:
                raise self._changed()
            if not self._is_done(row.custom_id, fingerprint):
                if isinstance(row, Row):
                    if self._is_shared(row, fingerprint):
                        continue
                    self._note_chat(row)
                yield row
        if _states(self._source.identities()) != _states(self._before):
            raise self._changed()

    def copies(self) -> Iterator[Result]:
        """Results of rows that are the same as those which `todo` gave, once these are written."""
        if self._shared is None:
            return
        for row, _ in self._source.rows():
            fingerprint = self._identity.fingerprint(row)
            if isinstance(row, Row) and not self._is_done(row.custom_id, fingerprint):
                found = self._shared.of(row, fingerprint)
                if found is None:  # as all that is the same has been written
                    raise self._changed()
                self._note_chat(row)
                yield found

    def _is_greedy(self, row: Row) -> bool:
        return is_greedy(row, self._identity.sampling)

    def _is_shared(self, row: Row, fingerprint: str) -> bool:
        """Whether the row gets the result of another one."""
        shared = self._shared
        return shared is not None and self._is_greedy(row) and not shared.take(fingerprint)

    def _note_chat(self, row: Row) -> None:
        if row.messages is not None:
            self._chats.add(row.custom_id)

    def write(self, result: Result) -> bool:
        if self._shared is not None:
            self._shared.keep(self._database.wanted(result.custom_id) or "", result)
        is_new = self._output.write(result, result.custom_id in self._chats)
        self._chats.discard(result.custom_id)
        self._written += is_new
        self._errors += is_new and result.error is not None
        return is_new

    def finish(self) -> None:
        self._output.finish(self._record)
        if self._shared is not None:
            self._shared.close()
        self._database.close()

    def _record(self) -> InputRecord | None:
        """Record of the input; None if not all of its rows are done after all."""
        tally = self.tally
        if self._written != tally.left:
            return None
        return self._source.record(self._before, tally.rows, self.errors)

    def _changed(self) -> InputError:
        return InputError(
            f"input {', '.join(map(str, self._source.files))} changed while it was read; what is "
            "done is kept, and the same command goes on with the present rows"
        )


def _states(identities: Sequence[FileIdentity]) -> list[tuple[int, int]]:
    # another name or access right is no other input
    return [(identity.file_bytes, identity.modified_ns) for identity in identities]
