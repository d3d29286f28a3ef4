"""Entries of a job's journal: what each of its lines says. Times are seconds of `time.time`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from actors.latency_counts import BUCKETS

JOURNAL_VERSION = 1

At = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Figure = Annotated[float, Field(ge=0, le=1e18)]
Words = Annotated[str, Field(max_length=4000)]


@dataclass(frozen=True)
class PlannedStage:
    """A stage as planned: its half-open span of `layers`, the bits of these as words, and the
    seconds of a full micro-batch, None where the run follows no plan.
    """

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
    """Another plan, which is run from now on."""

    at: At
    plan: PlanNote


@dataclass(frozen=True)
class Loaded:
    """The moment from which the stages generate."""

    at: At


@dataclass(frozen=True)
class ProgressPoint:
    """How far the session is: rows and errors of its own, generated tokens, those per second just
    now, and the seconds it takes to go, where they are known.
    """

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

    `latencies` of all requests of the session, as `actors.latency_counts.LatencyCounts.buckets`;
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
        ((name, content),) = json.loads(line).items()
        if name == "start" and content.get("journal") != JOURNAL_VERSION:
            raise UnreadableEntryError(content.get("journal", "none"))
        if name == "point":
            content = dict(zip(_POINT_FIELDS, content, strict=True))
        found: Entry = _adapter(name).validate_python(content)
        return found
    except UnreadableEntryError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UnreadableEntryError from error


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[name])
