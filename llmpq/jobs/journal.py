"""Entries of a job's journal: what each of its lines says. Times are seconds of `time.time`."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from actors.stage_figures import BUCKETS
from quant.common.files import write_whole
from quant.common.json_text import loads

JOURNAL_VERSION = 1

At = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Figure = Annotated[float, Field(ge=0, le=1e18)]
Words = Annotated[str, Field(max_length=4000)]


@dataclass(frozen=True)
class PlannedStage:
    """A stage as planned: half-open `layers`, bits in words, seconds of full micro-batches."""

    device: Words
    layers: tuple[Count, Count]
    bits: Words
    prefill_s: Figure | None
    decode_s: Figure | None


@dataclass(frozen=True)
class PlanNote:
    """A plan as the journal keeps it.

    `seconds` are predicted for a job of `prompts` prompts, `tokens_per_s` for full slots; None for
    a plan of one batch, and where the run follows no plan. `quantile` of all requests are to take
    `latency_s` at most, and no more than `bound_s`; None where none of these was planned.
    """

    fingerprint: Words
    model: Words
    cluster: Words
    in_flight: Count
    prompts: Count | None
    seconds: Figure | None
    tokens_per_s: Figure | None
    stages: Annotated[tuple[PlannedStage, ...], Field(max_length=4096)]
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    latency_s: Figure | None = None
    bound_s: Figure | None = None


@dataclass(frozen=True)
class SessionStart:
    """The start of a session: a run of the job's command.

    `resumed` of its `rows` were done already, `resumed_errors` of these in error. `anew`: what was
    done before does not count (`--overwrite`). `after`: generation and number of the newest shard
    that was there.
    """

    journal: Count
    at: At
    llmpq: Words
    host: Words
    pid: Count
    command: Annotated[str, Field(max_length=20_000)]
    rows: Count
    resumed: Count
    resumed_errors: Count
    anew: bool
    after: tuple[Count, Count] | None
    plan_file: Words
    plan: PlanNote


@dataclass(frozen=True)
class PlanChange:
    at: At
    plan: PlanNote


@dataclass(frozen=True)
class Loaded:
    at: At


@dataclass(frozen=True)
class ProgressPoint:
    """How far the session is: its rows and errors, tokens, tokens/s just now, seconds to go."""

    at: At
    rows: Count
    errors: Count
    tokens: Count
    tokens_per_s: Figure
    left_s: Figure | None


@dataclass(frozen=True)
class StageRecord:
    """What a stage has done since the plan began: seconds that it computed, and the mean seconds of
    its micro-batches of each phase, by the full ones where `*_full`.
    """

    busy_s: Figure
    busy_share: Figure
    prefill_s: Figure | None
    prefill_full: bool
    decode_s: Figure | None
    decode_full: bool
    micro_batches: Count


@dataclass(frozen=True)
class WorkDone:
    """What all stages of the present plan have done, in pipeline order.

    `latencies` of all requests of the session, as `actors.stage_figures.LatencyCounts.buckets`;
    none where no latency was planned.
    """

    at: At
    stages: Annotated[tuple[StageRecord, ...], Field(max_length=4096)]
    latencies: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=BUCKETS)] = ()


@dataclass(frozen=True)
class EventNote:
    """A fault, or what was done about it; it cost `lost_s` seconds."""

    at: At
    event: Words
    stage: Count | None
    lost_s: Figure
    text: Words


@dataclass(frozen=True)
class MoreEvents:
    """Number of events of the session that the journal has no room for."""

    at: At
    count: Count


@dataclass(frozen=True)
class ErrorNote:
    """Rows of the session that ended in one kind of error so far, and the first of them."""

    at: At
    what: Words
    count: Count
    custom_id: Words
    error: Words


@dataclass(frozen=True)
class SessionEnd:
    """The end of a session: `how` is done, interrupted, stopped (at a row) or failed."""

    at: At
    how: Words
    text: Words


Entry = (
    SessionStart
    | PlanChange
    | Loaded
    | ProgressPoint
    | WorkDone
    | EventNote
    | MoreEvents
    | ErrorNote
    | SessionEnd
)

_KINDS: Mapping[str, type[Entry]] = {
    "start": SessionStart,
    "plan": PlanChange,
    "loaded": Loaded,
    "point": ProgressPoint,
    "work": WorkDone,
    "event": EventNote,
    "more_events": MoreEvents,
    "error": ErrorNote,
    "end": SessionEnd,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_POINT_FIELDS = tuple(ProgressPoint.__dataclass_fields__)


class UnreadableEntryError(ValueError):
    """A line that is no entry of a journal; `version` is that of another version's start."""

    def __init__(self, version: object = None) -> None:
        super().__init__("no entry of a journal")
        self.version = version


def line_of(entry: Entry) -> bytes:
    """An entry as a line of JSON; points, which are the many, as a list."""
    content = list(astuple(entry)) if isinstance(entry, ProgressPoint) else asdict(entry)
    text = json.dumps({_NAMES[type(entry)]: content}, ensure_ascii=True, separators=(",", ":"))
    return text.encode() + b"\n"


def entry_of(line: bytes) -> Entry:
    """The entry that a line holds; raises `UnreadableEntryError`."""
    try:
        ((name, content),) = loads(line).items()
        if name == "start" and content.get("journal") != JOURNAL_VERSION:
            raise UnreadableEntryError(content.get("journal", "none"))
        if name == "point":
            content = dict(zip(_POINT_FIELDS, content, strict=True))
        found: Entry = _adapter(name).validate_python(content)
        return found
    except UnreadableEntryError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnreadableEntryError from error


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[name])


WRITE_S = 1.0
"""Seconds between looks for entries to write: what a kill costs of the journal."""

BEAT_S = 5.0
"""Seconds between signs of life, which are times of the file: who looks from another machine, where
the lock does not show, knows by them that the job runs."""

CLOSE_S = 5.0
"""Seconds that the end of a job waits for a disk that hangs."""

THIN_BYTES = 2**19
"""Bytes of a journal from which on a new session leaves out half the points of those before."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class JournalWriter:
    """Appends entries to the journal at `path`; its methods return at once and raise nothing.

    Where the disk refuses, entries are lost, with one warning: a job never fails for its journal.
    A line that was cut off stays as it is; the next one begins anew.
    """

    def __init__(self, path: Path, write: Callable[[int, bytes], int] = os.write) -> None:
        self._path = path
        self._write = write
        self._entries: deque[Entry] = deque()
        self._descriptor: int | None = None
        self._is_torn = self._has_warned = False
        self._begun, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-journal", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """Have an entry written soon; can be called from any thread."""
        self._entries.append(entry)
        self._begun.set()

    def close(self) -> None:
        self._closed.set()
        self._begun.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._begun.wait()  # a job may be killed within its first second: its start is there then
        waited_s = BEAT_S
        is_last = False
        while not is_last:
            is_last = self._closed.wait(WRITE_S if self._descriptor is not None else 0)
            waited_s += WRITE_S
            try:
                self._append()
                if waited_s >= BEAT_S and self._descriptor is not None:
                    os.utime(self._descriptor)
                    waited_s = 0.0
            except OSError as error:
                self._fail(error)
                is_last = is_last or self._closed.wait(BEAT_S)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _append(self) -> None:
        if self._descriptor is None:
            thin_out(self._path)
            self._descriptor, state = opened(self._path, _FLAGS)
            size = state.st_size
            self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        lines = [line_of(self._entries.popleft()) for _ in range(len(self._entries))]
        if not lines:
            return
        data = b"\n" * self._is_torn + b"".join(lines)
        self._is_torn = True
        while data:
            data = data[self._write(self._descriptor, data) :]
        self._is_torn = False

    def _fail(self, error: OSError) -> None:
        self._entries.clear()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._path}, the journal of the job, cannot be written: {error.strerror}; the "
                "job goes on without it",
                stacklevel=1,
            )


def opened(path: Path, flags: int) -> tuple[int, os.stat_result]:
    """Descriptor and state of a journal; a pipe in its place is not waited for. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file")
    return descriptor, state


@dataclass
class Cadence:
    """Tells when the next point is due: every `share` of the age, within `least_s` and `most_s`."""

    least_s: float
    most_s: float
    share: float
    began_s: float
    due_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        if now_s < self.due_s:
            return False
        age_s = now_s - self.began_s
        self.due_s = now_s + min(self.most_s, max(self.least_s, self.share * age_s))
        return True


def thin_out(path: Path) -> None:
    """Thin a large journal out, whole or not at all: every second point, and what is overtaken."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size < THIN_BYTES:
        return
    kept: list[bytes] = []
    points = 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = entry_of(line)
            except UnreadableEntryError:
                continue
            points += isinstance(entry, ProgressPoint)
            if isinstance(entry, WorkDone) or (isinstance(entry, ProgressPoint) and points % 2):
                continue
            kept.append(line)
    write_whole(path, b"".join(kept))
