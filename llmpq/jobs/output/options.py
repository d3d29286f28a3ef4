"""Options of a job's output."""

from __future__ import annotations

from dataclasses import dataclass

SHARD_ROWS = 1000
SHARD_S = 10.0


@dataclass(frozen=True)
class OutputOptions:
    """`overwrite` starts anew, `resume` demands that there is something to go on from.

    A shard is closed after `shard_rows` rows or `shard_s` seconds (None: after rows alone).
    """

    overwrite: bool = False
    resume: bool = False
    shard_rows: int = SHARD_ROWS
    shard_s: float | None = SHARD_S
