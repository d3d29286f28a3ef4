"""How the results of a job are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.option_rules import flag, option

OutputForm = Literal["rows", "openai"]
"""Lines of results: rows of llmpq's own fields, or answers to lines of OpenAI's batches."""

OUTPUT_FORMS: tuple[OutputForm, ...] = ("rows", "openai")


@dataclass(frozen=True)
class OutputOptions:
    """`resume` demands that there is something to go on from. A shard is closed after `shard_rows`
    rows or `shard_s` seconds (None: after rows alone). `output_format`: None for that of the job
    that is there, and of a new one `default_format`.
    """

    overwrite: bool = flag("start anew, replace the output")
    resume: bool = flag("go on; refused where there is nothing to go on with")
    shard_rows: int = option("COUNT", "results that are committed together", 1000)
    shard_s: float | None = option(
        "SECONDS",
        "time after which results are committed at the latest",
        10.0,
        names=("--shard_seconds",),
    )
    output_format: OutputForm | None = option(
        OUTPUT_FORMS,
        "lines of results: rows, or answers of OpenAI's batches (default: openai where the first "
        "row is a Batch line and the output no table)",
    )
    default_format: OutputForm = "rows"
