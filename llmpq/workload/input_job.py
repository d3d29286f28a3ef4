"""Batches and jobs of the prompts in files, and what is done about rows that are too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.schedule.heads import repeated_tokens
from llmpq.jobs.inputs import JobInput
from llmpq.keywords import PromptingKeywords
from llmpq.model_check import checked_shape
from llmpq.tokenizing.prompting import Prompting, PromptingOptions
from llmpq.workload import DEFAULT_WORKLOAD, ERROR, LEAVE, SEPARATE
from llmpq.workload.long_rows import (
    LongRowRule,
    NamedRows,
    RowCut,
    best_cut,
    cut_at,
    longest_row,
    named_rows,
    tokens_at,
)
from llmpq.workload.measured_lengths import MeasuredLengths, read_measured
from llmpq.workload.measuring import InputMeasure, MeasuredRows
from planner.lengths import (
    MOST_UNSEEN,
    NO_HEADS,
    BoolArray,
    IntArray,
    Lengths,
    PlannedHeads,
    RequestLengths,
    ended_together,
    expected_outputs,
    observed_lengths,
)
from planner.model.shape import ModelShape
from planner.workload import MAX_TOKENS, Job, Workload
from quant.common.errors import InputError, SpecError

if TYPE_CHECKING:
    from typing import Unpack


PLANNED, CONTEXT = "what is planned for", "the model's context"


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
    """The job of an input: the answers of its `ordinary` `rows`, and the long ones, if it has any.

    `beyond`: rows with more tokens than the model has positions, which are in neither. `done`: as
    many rows have results of a job that goes on, and are in neither. `left_out`: long rows that
    are not planned for. `longest`: a sentence on the longest row that is, where it makes slots
    long.
    """

    ordinary: Job
    long_rows: LongRows | None = None
    beyond: NamedRows | None = None
    done: int = 0
    left_out: NamedRows | None = None
    longest: str | None = None
    requests: RequestLengths | None = None
    rows: int | None = None

    @property
    def prompts(self) -> int:
        """Number of answers that are planned, those of long rows too."""
        return self.ordinary.prompts + (self.long_rows.job.prompts if self.long_rows else 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on rows that are not planned as the others are."""
        notes = []
        if self.rows not in (None, self.ordinary.prompts):
            notes.append(
                f"{self.rows:,} rows ask for {self.ordinary.prompts:,} answers, each of which "
                "counts as a prompt"
            )
        if heads := self.ordinary.heads.kept_tokens:
            each = self.ordinary.lengths.mean_prompt - self.ordinary.computed_tokens
            notes.append(
                f"prompts share {each:,.0f} tokens in the mean, of heads of {heads:,} tokens that "
                "are computed once"
            )
        if self.done:
            done = NamedRows(self.done, "")
            notes.append(f"{done.are} done already; planned for those that are left")
        if self.long_rows is not None:
            long, slot = self.long_rows, self.ordinary.in_flight(1).total_length
            notes.append(
                f"{long.rows.are} much longer than the others ({long.rows.shown}); "
                f"planned separately, so that other slots have {slot} tokens instead of "
                f"{long.job.in_flight(1).total_length}"
            )
        if self.left_out is not None:
            notes.append(self.left_out.longer_than(PLANNED))
        if self.beyond is not None:
            notes.append(self.beyond.longer_than(CONTEXT))
        return tuple(notes)


def job_of_input(
    paths: str | Path | Sequence[str | Path],
    model: str | Path,
    new_tokens: int | None = None,
    prompt_length: int | None = None,
    long_rows: str | LongRowRule = SEPARATE,
    lengths: str | Path | None = None,
    **prompting: Unpack[PromptingKeywords],
) -> InputJob:
    """The job of the prompts behind `paths` (files, folders, globs), to be given to `Cluster.plan`.

    - `new_tokens`: the limit of rows without `max_new_tokens` (100), which the plan keeps for runs.
    - `prompt_length`: tokens that every prompt counts as; the tokenizer of `model` (folder or hub
      id) is not needed then.
    - `long_rows`: plan rows that are much longer than the others separately (`separate`), raise
      `InputError` that names them (`error`), or plan without them (`leave`): they become error rows
      of a run. A `LongRowRule` says at which percentile of the rows they begin, too.
    - `lengths`: measured lengths, from which outputs are expected to be shorter than their limits:
      a CSV `prompt_tokens,output_tokens`, or an output of `llmpq run` over these prompts. If it is
      not finished, the rows that it has no result for are planned.
    - `prompting`: how prompts become tokens, as of `Plan.run`: `chat_template` (a file),
      `chat_template_kwargs`, `add_special_tokens`, `tool_parser`.

    Bad rows are left out. Raises `InputError` where no row can be used, SpecError for options.
    """
    _check_given(prompt_length, new_tokens)
    how = PromptingOptions(**prompting).prompting
    rule = long_rows if isinstance(long_rows, LongRowRule) else LongRowRule(long_rows)
    shape = checked_shape(model)
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    source = JobInput.find(given)
    measured = MeasuredLengths("limits") if lengths is None else read_measured(lengths)
    limit = DEFAULT_WORKLOAD["new_tokens"] if new_tokens is None else new_tokens
    finished = measured.outputs or {}
    measure = InputMeasure(source, str(model), limit, prompt_length, finished, measured.done, how)
    rows = measure.measure()
    observed = None if lengths is None else _observed(measured, rows, source)
    return _InputRows(source, rows, limit, observed).job(most_tokens(shape), rule)


def most_tokens(shape: ModelShape) -> int:
    """The most tokens that a row may have of prompt and answer together."""
    return MAX_TOKENS if shape.alibi else min(shape.max_positions, MAX_TOKENS)


def fitting(source: JobInput, rows: MeasuredRows, most: int) -> BoolArray:
    """Which rows that are left have at most `most` tokens [rows]; SpecError where none has."""
    left = ~rows.done
    fits: BoolArray = left & (rows.total <= most)
    if not fits.any():
        beyond = named_rows(source, rows, left)
        rows_have = "the only row has" if left.sum() == 1 else f"all {left.sum()} rows have"
        raise SpecError(
            f"{rows_have} more tokens than the {most} positions of the model "
            f"({beyond.shown}); shorten the prompts, or their answers (--n, or max_new_tokens in "
            "the rows)"
        )
    return fits


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
    """The measured `rows` of `source`, their limits, and lengths to expect outputs by."""

    source: JobInput
    rows: MeasuredRows
    limit: int
    observed: Lengths | None

    def job(self, most: int, rule: LongRowRule) -> InputJob:
        rows, outputs, done = self.rows, self._outputs(), int(self.rows.done.sum())
        fits = fitting(self.source, rows, most)
        cut = self._cut(fits, outputs, rule)
        most_total, saved = (most, 0.0) if cut is None else cut
        above = fits & (rows.total > most_total)
        ordinary = fits & ~above
        planned_for = ordinary if rule.handling == LEAVE else fits
        planned = InputJob(
            self._job(ordinary, outputs),
            beyond=self._named(~rows.done & ~fits),
            done=done,
            longest=longest_row(self.source, rows, ordinary),
            requests=self._requests(planned_for, outputs),
            rows=int(ordinary.sum()),
        )
        named = self._named(above)
        if cut is None or named is None:
            return planned
        if rule.handling == ERROR:
            raise InputError(
                f"{named.are} much longer than the others ({named.shown}), of which all "
                f"but these have at most {most_total} tokens; shorten them, give them an input of "
                f"their own, or pass --long_rows {SEPARATE} or {LEAVE}"
            )
        if rule.handling == LEAVE:
            return replace(planned, left_out=named)
        long = LongRows(self._job(above, outputs), named, saved)
        return replace(planned, long_rows=long)

    def _cut(self, chosen: BoolArray, outputs: IntArray, rule: LongRowRule) -> RowCut | None:
        """Where long ones of the chosen rows [rows] begin."""
        lengths = self.rows.prompts[chosen], self.rows.limits[chosen], outputs[chosen]
        if rule.percentile is None:
            return best_cut(*lengths)
        return cut_at(tokens_at(rule.percentile, self.rows, chosen), *lengths)

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
        sampled = np.repeat(sampled, rows.answers[sampled])
        limit = None if self.observed is None else int(rows.limits[numbers].max())
        source = "limits" if self.observed is None else self.observed.outputs_from
        pairs = zip(rows.prompts[sampled].tolist(), outputs[sampled].tolist(), strict=True)
        lengths = Lengths.of(pairs, source, limit, int(rows.total[numbers].max()))
        # No row of the input, the done ones too, may get more: it stays while a job goes on.
        default_limit = min(self.limit, int(rows.limits.max()))
        heads = _heads(rows, chosen & rows.even).within(lengths.longest_prompt)
        return Job(int(rows.answers[numbers].sum()), lengths, default_limit, heads=heads)

    def _requests(self, chosen: BoolArray, outputs: IntArray) -> RequestLengths:
        """The lengths of the chosen rows [rows]."""
        pairs = self.rows.prompts[chosen], outputs[chosen]
        found = RequestLengths.of_pairs(*np.repeat(pairs, self.rows.answers[chosen], axis=1))
        heads = _heads(self.rows, chosen & self.rows.even)
        return replace(found, heads=heads.within(found.prompts.longest))

    def _named(self, chosen: BoolArray) -> NamedRows | None:
        return named_rows(self.source, self.rows, chosen) if chosen.any() else None


def _heads(rows: MeasuredRows, sampled: BoolArray) -> PlannedHeads:
    """Heads by which as many tokens are shared as those that were found in `sampled` rows [rows],
    where rows share different ones or none; further answers of a row share its prompt.
    """
    prompts, first, answers = (
        values[sampled] for values in (rows.prompts, rows.shared, rows.answers)
    )
    again = np.where(answers > 1, repeated_tokens(prompts), 0)
    shared = float((first + (answers - 1) * np.maximum(first, again)).sum())
    if not shared:
        return NO_HEADS
    most = prompts - 1
    each = bisect_left(
        range(int(most.max())), shared, key=lambda n: (answers * np.minimum(n, most)).sum()
    )
    return PlannedHeads(each, max(each, rows.head_tokens + int(again.max())))


@dataclass(frozen=True)
class InputBatch:
    """The batch of an input; `notes` on rows without room and on the `longest` of the others."""

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
    notes = [] if fits.all() else [named_rows(source, rows, ~fits).longer_than(CONTEXT)]
    within = fits
    if percentile is not None:
        within = fits & (rows.total <= tokens_at(percentile, rows, fits))
    if (fits & ~within).any():
        notes.append(named_rows(source, rows, fits & ~within).longer_than(PLANNED))
    kept = rows.where(within)
    derived: dict[str, Any] = {
        "global_batch": min(int(kept.answers.sum()), DEFAULT_WORKLOAD["global_batch"]),
        "prompt_length": int(kept.prompts.max()),
        "new_tokens": int(kept.limits.max()),
    }
    heads = _heads(kept, kept.even)
    workload = Workload(**(derived | dict(given)))
    workload = replace(workload, heads=heads.within(workload.prompt_length))
    return InputBatch(workload, tuple(notes), longest_row(source, rows, within))
