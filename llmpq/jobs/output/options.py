"""Options of a job's output, and the place that it has for a journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.records.manifest import OutputForm

SHARD_ROWS = 1000
SHARD_S = 10.0


@dataclass(frozen=True)
class OutputOptions:
    """`overwrite` starts anew, `resume` demands that there is something to go on from.

    A shard is closed after `shard_rows` rows or `shard_s` seconds (None: after rows alone).
    `output_format`: None for that of the job that is there, and of a new one `default_format`.
    """

    overwrite: bool = False
    resume: bool = False
    shard_rows: int = SHARD_ROWS
    shard_s: float | None = SHARD_S
    output_format: OutputForm | None = None
    default_format: OutputForm = "rows"


@dataclass(frozen=True)
class JournalPlace:
    """Path of a job's journal; `anew`: what was done before does not count. `after`: generation and
    number of the newest shard.
    """

    path: Path
    anew: bool
    after: tuple[int, int] | None
