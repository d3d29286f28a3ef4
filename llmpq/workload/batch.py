"""Deriving a batch from files of prompts, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.inputs import JobInput
from llmpq.model_check import checked_shape
from llmpq.tokenizing.prompting import Prompting
from llmpq.workload.defaults import DEFAULT_WORKLOAD
from llmpq.workload.input_job import beyond_note, fitting, left_out_note, most_tokens
from llmpq.workload.measuring import InputMeasure
from llmpq.workload.named_rows import longest_row, named_rows, tokens_at
from planner.workload import Workload


@dataclass(frozen=True)
class InputBatch:
    """The batch of an input; `notes` on rows that it has no room for, and as of an `InputJob` a
    sentence on the `longest` of the others.
    """

    workload: Workload
    notes: tuple[str, ...] = ()
    longest: str | None = None


def batch_of_input(
    paths: Sequence[str | Path],
    model: str,
    given: Mapping[str, int],
    percentile: float | None = None,
    prompting: Prompting | None = None,
) -> InputBatch:
    """The batch, longest prompt and most new tokens of the prompts behind paths, folders and globs;
    `given` values win.

    Rows that the model has no positions for are left out, and those beyond `percentile` of the rows
    by their tokens. `prompting`: how prompts become tokens where rows do not say. `model` must be a
    local folder or hub id when prompts are text, for its tokenizer. Raises `InputError` when no
    prompt can be used.
    """
    source = JobInput.find(paths)
    new_tokens = given.get("new_tokens", DEFAULT_WORKLOAD["new_tokens"])
    length = given.get("prompt_length")
    rows = InputMeasure(source, model, new_tokens, length, prompting=prompting).measure()
    fits = fitting(source, rows, most_tokens(checked_shape(model)))
    notes = [] if fits.all() else [beyond_note(named_rows(source, rows, ~fits))]
    within = fits
    if percentile is not None:
        within = fits & (rows.total <= tokens_at(percentile, rows, fits))
    if (fits & ~within).any():
        notes.append(left_out_note(named_rows(source, rows, fits & ~within)))
    kept = rows.where(within)
    derived = {
        "global_batch": min(len(kept), DEFAULT_WORKLOAD["global_batch"]),
        "prompt_length": int(kept.prompts.max()),
        "new_tokens": int(kept.limits.max()),
    }
    workload = Workload(**(derived | dict(given)))
    return InputBatch(workload, tuple(notes), longest_row(source, rows, within))
