"""A job of the prompts in files: their lengths, and what is done about rows that are too long.

Ordinary rows are one job. Few that are much longer than the others are another, with a plan of its
own (`llmpq/workload/long_rows.py` has the rule). Rows that the model has no positions for are in
neither: `llmpq-dist` writes error rows for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.records.input_changes import shown_id
from llmpq.model_check import checked_shape
from llmpq.workload.defaults import DEFAULT_WORKLOAD, ERROR, LONG_ROWS, SEPARATE
from llmpq.workload.long_rows import best_cut
from llmpq.workload.measured_lengths import MeasuredLengths, read_measured
from llmpq.workload.measuring import InputMeasure, MeasuredRows
from planner.lengths import (
    MOST_UNSEEN,
    BoolArray,
    IntArray,
    Lengths,
    ended_together,
    expected_outputs,
    observed_lengths,
)
from planner.workload import MAX_TOKENS, Job
from quant.common.errors import InputError, SpecError

SHOWN_ROWS = 3


@dataclass(frozen=True)
class NamedRows:
    """`count` rows, of which `shown` names the first few with their lengths."""

    count: int
    shown: str


@dataclass(frozen=True)
class LongRows:
    """The few rows that are much longer than the others, a job by themselves.

    `saved`: share of the KV cache's tokens times time that parting them saves.
    """

    job: Job
    rows: NamedRows
    saved: float


@dataclass(frozen=True)
class InputJob:
    """The job of an input: its `ordinary` rows, and the long ones, if it has any.

    `beyond`: rows with more tokens than the model has positions, which are in neither. `done`: as
    many rows have results of a job that goes on, and are in neither.
    """

    ordinary: Job
    long_rows: LongRows | None = None
    beyond: NamedRows | None = None
    done: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on rows that are not planned as the others are."""
        notes = []
        if self.done:
            notes.append(f"{_rows(self.done)} done already; planned for those that are left")
        if self.long_rows is not None:
            long, slot = self.long_rows, self.ordinary.in_flight(1).total_length
            notes.append(
                f"{_rows(long.rows.count)} much longer than the others ({long.rows.shown}); "
                f"planned separately, so that other slots have {slot} tokens instead of "
                f"{long.job.in_flight(1).total_length}"
            )
        if self.beyond is not None:
            notes.append(
                f"{_rows(self.beyond.count)} longer than the model's context "
                f"({self.beyond.shown}); llmpq-dist gives error rows for such"
            )
        return tuple(notes)


def job_of_input(
    paths: str | Path | Sequence[str | Path],
    model: str | Path,
    new_tokens: int | None = None,
    prompt_length: int | None = None,
    long_rows: str = SEPARATE,
    lengths: str | Path | None = None,
) -> InputJob:
    """The job of the prompts behind `paths` (files, folders, globs), to be given to `Cluster.plan`.

    - `new_tokens`: the limit of rows without `max_new_tokens` (100), which the plan keeps for runs.
    - `prompt_length`: tokens that every prompt counts as; the tokenizer of `model` (folder or hub
      id) is not needed then.
    - `long_rows`: plan rows that are much longer than the others separately (`separate`), or raise
      `InputError` that names them (`error`).
    - `lengths`: measured lengths, from which outputs are expected to be shorter than their limits:
      a CSV `prompt_tokens,output_tokens`, or an output of `llmpq-dist` over these prompts. If it is
      not finished, the rows that it has no result for are planned.

    Bad rows are left out. Raises `InputError` where no row can be used, SpecError for options.
    """
    _check_given(prompt_length, new_tokens)
    if long_rows not in LONG_ROWS:
        raise SpecError(f"long_rows is {long_rows!r}; it must be one of {', '.join(LONG_ROWS)}")
    shape = checked_shape(model)
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    source = JobInput.find(given)
    measured = None if lengths is None else read_measured(lengths)
    limit = DEFAULT_WORKLOAD["new_tokens"] if new_tokens is None else new_tokens
    measured = measured or MeasuredLengths("limits")
    finished = measured.outputs or {}
    measure = InputMeasure(
        source, str(model), limit, prompt_length, finished=finished, done=measured.done
    )
    rows = measure.measure()
    observed = None if lengths is None else _observed(measured, rows, source)
    most = MAX_TOKENS if shape.alibi else min(shape.max_positions, MAX_TOKENS)
    return _InputRows(source, rows, limit, observed).job(most, long_rows)


def job_of_prompts(
    prompts: int,
    prompt_length: int | None = None,
    new_tokens: int | None = None,
    lengths: str | Path | None = None,
) -> Job:
    """A job of prompts that are not at hand: all of `prompt_length` (512) and `new_tokens` (100)
    tokens, or as in the CSV `lengths`, of which `new_tokens` limits outputs.
    """
    _check_given(prompt_length, new_tokens)
    default = DEFAULT_WORKLOAD
    if lengths is None:
        return Job.of(
            prompts,
            default["prompt_length"] if prompt_length is None else prompt_length,
            default["new_tokens"] if new_tokens is None else new_tokens,
        )
    found = read_measured(lengths).rows
    if found is None:
        raise SpecError(
            f"lengths {lengths}: results do not have their prompts' lengths; give --input"
        )
    if new_tokens is None:
        return Job(prompts, found)
    outputs = tuple(min(each, new_tokens) for each in found.output_tokens)
    return Job(prompts, replace(found, output_tokens=outputs, output_limit=new_tokens))


def _check_given(prompt_length: int | None, new_tokens: int | None) -> None:
    """Raise SpecError where a length that is given has no tokens."""
    for name, tokens in (("new_tokens", new_tokens), ("prompt_length", prompt_length)):
        if tokens is not None and tokens < 1:
            raise SpecError(f"{name} is {tokens}; it must be a whole number of at least 1")


def _observed(measured: MeasuredLengths, rows: MeasuredRows, source: JobInput) -> Lengths:
    """Lengths that outputs are expected by; of finished rows the prompts are the input's."""
    if measured.rows is not None:
        return measured.rows
    done = rows.where(rows.exact & (rows.finished > 0))
    if not len(done):
        raise InputError(
            f"lengths {measured.source}: none of its {len(measured.outputs or ())} rows is one of "
            f"the input {source.names[0]}; give the output of this input"
        )
    if rows.done.any():
        done = rows.where(ended_together(rows.done) & rows.exact & (rows.finished > 0))
        if not len(done):
            raise SpecError(
                f"lengths {measured.source}: more than {MOST_UNSEEN:.0%} of its first rows have no "
                "result yet, and the others are those with short outputs; wait for more, or plan "
                "without"
            )
    pairs = zip(done.prompts.tolist(), done.finished.tolist(), strict=True)
    return observed_lengths(pairs, measured.source)


@dataclass(frozen=True, eq=False)
class _InputRows:
    """The measured `rows` of `source`, with the limit of those without one, and the lengths by
    which outputs are expected.
    """

    source: JobInput
    rows: MeasuredRows
    limit: int
    observed: Lengths | None

    def job(self, most: int, long_rows: str) -> InputJob:
        """The job of rows that are left and have at most `most` tokens."""
        rows, done = self.rows, int(self.rows.done.sum())
        left = ~rows.done
        fits = left & (rows.total <= most)
        beyond = self._named(left & ~fits) if (left & ~fits).any() else None
        if not fits.any():
            raise SpecError(
                f"all {left.sum()} rows have more tokens than the {most} positions of the model "
                f"({beyond and beyond.shown}); lower --n or shorten the prompts"
            )
        outputs = self._outputs()
        cut = best_cut(rows.prompts[fits], rows.limits[fits], outputs[fits])
        if cut is None:
            return InputJob(self._job(fits, outputs), beyond=beyond, done=done)
        above = fits & (rows.total > cut.total)
        named = self._named(above)
        if long_rows == ERROR:
            raise InputError(
                f"{_rows(named.count)} much longer than the others ({named.shown}), of which all "
                f"but these have at most {cut.total} tokens; shorten them, give them an input of "
                "their own, or pass --long_rows separate"
            )
        long = LongRows(self._job(above, outputs), named, cut.saved)
        return InputJob(self._job(fits & ~above, outputs), long, beyond, done)

    def _outputs(self) -> IntArray:
        """Expected output tokens of each row [rows]: its limit, where nothing was measured."""
        if self.observed is None:
            return self.rows.limits
        return expected_outputs(self.observed, self.rows.prompts, self.rows.limits)

    def _job(self, chosen: BoolArray, outputs: IntArray) -> Job:
        """The job of the chosen rows, by lengths of those that stand for all and of the longest."""
        rows = self.rows
        numbers = np.flatnonzero(chosen)
        longest = {int(numbers[values[numbers].argmax()]) for values in (rows.prompts, outputs)}
        sampled = np.flatnonzero(chosen & rows.even)
        sampled = np.array(sorted({*sampled.tolist(), *longest}))
        limit = None if self.observed is None else int(rows.limits[numbers].max())
        source = "limits" if self.observed is None else self.observed.outputs_from
        pairs = zip(rows.prompts[sampled].tolist(), outputs[sampled].tolist(), strict=True)
        lengths = Lengths.of(pairs, source, limit, int(rows.total[numbers].max()))
        return Job(len(numbers), lengths, self._default_limit)

    @property
    def _default_limit(self) -> int:
        """The limit for rows without one: none of the input, the done ones too, may get more, so
        that it stays the same while a job goes on.
        """
        return min(self.limit, int(self.rows.limits.max()))

    def _named(self, chosen: BoolArray) -> NamedRows:
        """The chosen rows: the first few by place, id and lengths."""
        rows = self.rows.where(chosen)
        first = dict(zip(rows.places.tolist(), range(SHOWN_ROWS), strict=False))
        found = (
            (placed.place, placed.row.custom_id)
            for placed in self.source.rows()
            if placed.place in first
        )
        shown = [
            f"{self.source.place_name(place)}: {shown_id(custom_id)} with "
            f"{rows.prompts[first[place]]} + {rows.limits[first[place]]} tokens"
            for place, custom_id in islice(found, len(first))
        ]
        return NamedRows(len(rows), "; ".join(shown) + ("; …" if len(rows) > len(shown) else ""))


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"
