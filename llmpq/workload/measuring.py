"""Measuring the rows of an input in tokens: all are counted, at most ten thousand tokenized.

A file of a million rows is read twice as a stream, and only numbers are kept of a row. Its bytes
are counted in the first reading. The second tokenizes rows that are evenly spaced, and those of the
most bytes, as slots have to hold the longest. What this can miss: a row of fewer bytes than all of
these, but of more tokens, as of digits or another script. `llmpq run` gives such a row as an error
row or to the plan of the long rows, and no slot is overrun.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from actors.messages import Request
from actors.schedule.heads import PromptHeads
from llmpq.jobs.inputs import JobInput, no_prompts
from llmpq.rows.row import BadRow, Row
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import load_tokenizer, requests_of_any_length
from llmpq.tokenizing.tokenizer_process import RowLimits, TokenizerProcess
from llmpq.workload.measured_lengths import IdNumbers, id_number
from planner.lengths import BoolArray, IntArray
from quant.common.errors import CheckpointError, InputError, SpecError

MOST_EVEN_ROWS = 5_000
"""Evenly spaced rows that are tokenized: ten times as many as a plan keeps the lengths of."""

MOST_LONGEST_ROWS = 5_000
"""Rows of the most bytes that are tokenized."""

MOST_HEAD_TOKENS = 2**13
"""Tokens of the heads that are found: prompts of more kinds count as whole."""

MOST_BYTES = 2**25
"""Bytes of either kind: some seconds of a tokenizer. A single row may have more."""


@dataclass(frozen=True)
class MeasuredRows:
    """The usable rows of an input [rows], in its order.

    `prompts`: tokens, estimated by bytes where `exact` is False. `limits`: the most new tokens.
    `even`: rows that stand for all. `finished`: output tokens of rows that have been generated
    already, else 0. `done`: rows that are not left of a job, as they have results. `places` are
    those of `JobInput`. `shared`: tokens of a head that an even row begins with, as others do;
    all heads together have `head_tokens`. `answers`: requests of a row, which share its prompt.
    """

    prompts: IntArray
    limits: IntArray
    places: IntArray
    exact: BoolArray
    even: BoolArray
    finished: IntArray
    done: BoolArray
    shared: IntArray
    answers: IntArray
    head_tokens: int = 0

    def where(self, chosen: BoolArray) -> MeasuredRows:
        kept: dict[str, Any] = {
            name: values[chosen]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray)
        }
        return replace(self, **kept)

    @property
    def total(self) -> IntArray:
        """Tokens of each row with all its new ones [rows]."""
        return self.prompts + self.limits

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class InputMeasure:
    """Measures the rows of `source` for `model`.

    `new_tokens` is the limit of rows without one. `prompt_length`: tokens that every prompt counts
    as, for which no tokenizer is needed. `finished`: output tokens by id of rows that have been
    generated, which are tokenized in any case. `done`: ids of rows that are not left of a job; if
    all are done, it is taken as one that begins. `prompting`: how prompts become tokens where rows
    do not say.
    """

    source: JobInput
    model: str
    new_tokens: int
    prompt_length: int | None = None
    finished: Mapping[str, int] = field(default_factory=dict)
    done: IdNumbers | None = None
    prompting: Prompting | None = None

    def measure(self) -> MeasuredRows:
        """The usable rows; `InputError` where there are none, SpecError without a tokenizer."""
        read = self._survey()
        even = read.even.copy()
        even[~read.done] = _even_rows(np.where(read.exact, 0, read.prompts)[~read.done])
        read = replace(read, even=even)
        if self.prompt_length is not None:
            prompts = np.full(len(read), self.prompt_length)
            read = replace(read, prompts=prompts, exact=np.ones(len(prompts), dtype=bool))
        else:
            chosen = ~read.exact & (even | _longest_rows(read) | (read.finished > 0))
            read = self._with_tokens(read, chosen)
        usable = read.where(read.prompts > 0)
        if usable.done.all():
            raise InputError(f"{self._named}: no prompt has tokens; give --s")
        return usable

    @property
    def _named(self) -> str:
        return ", ".join(map(str, self.source.files))

    def _survey(self) -> MeasuredRows:
        """The rows as read, none `even` yet; prompts in tokens if of token ids, else in bytes."""
        sizes, limits, places, answers = array("q"), array("q"), array("q"), array("q")
        is_exact, finished, ids = array("b"), array("q"), array("Q")
        read = False
        for row, place in self.source.rows():
            read = True
            if not isinstance(row, Row):
                continue
            sizes.append(_size(row))
            limits.append(row.sampling.get("max_new_tokens") or self.new_tokens)
            places.append(place)
            answers.append(1 if row.sampling.get("temperature") == 0 else row.answers)
            is_exact.append(row.token_ids is not None)
            finished.append(self.finished.get(row.custom_id, 0))
            if self.done is not None:
                ids.append(id_number(row.custom_id))
        if not read:
            raise no_prompts(self._named)
        if not sizes:
            raise InputError(
                f"{self._named}: no row can be used; llmpq run would write only errors"
            )
        return MeasuredRows(
            prompts=_numbers(sizes),
            limits=_numbers(limits),
            places=_numbers(places),
            exact=np.array(is_exact, dtype=bool),
            even=np.zeros(len(sizes), dtype=bool),
            finished=_numbers(finished),
            done=self._done(len(sizes), np.array(ids, dtype=np.uint64)),
            shared=np.zeros(len(sizes), dtype=np.int64),
            answers=_numbers(answers),
        )

    def _done(self, rows: int, ids: IdNumbers) -> BoolArray:
        """Which rows are done [rows]; none where no row is left."""
        if self.done is None:
            return np.zeros(rows, dtype=bool)
        done = np.isin(ids, self.done)
        return np.zeros(rows, dtype=bool) if done.all() else done

    def _with_tokens(self, read: MeasuredRows, chosen: BoolArray) -> MeasuredRows:
        """The rows with their tokens, 0 for none, estimated by bytes if not chosen, and heads."""
        looked_at, heads = chosen | (read.exact & read.even), PromptHeads(MOST_HEAD_TOKENS)
        if not looked_at.any():
            return read
        tokens, shared = read.prompts.copy(), read.shared.copy()
        with closing(self._tokenizer()) if chosen.any() else nullcontext() as tokenizer:
            found, why = self._looked_at(read.where(looked_at), tokenizer, heads)
        counted, shared[looked_at] = np.array(found).T
        tokens[chosen] = counted[chosen[looked_at]]
        known, unknown = chosen & (tokens > 0), ~read.exact & ~chosen
        if not known.any() and not read.exact.any():
            first = f"; the first: {why}" if why else ""
            raise InputError(f"{self._named}: no prompt could be tokenized; give --s{first}")
        if unknown.any() and known.any():
            share = tokens[known].sum() / read.prompts[known].sum()
            tokens[unknown] = np.ceil(read.prompts[unknown] * share)
        exact, counts = read.exact | chosen, heads.counts
        rows = replace(read, prompts=tokens, exact=exact, shared=shared)
        return replace(rows, head_tokens=counts.head_tokens)

    def _looked_at(
        self, read: MeasuredRows, tokenizer: TokenizerProcess | None, heads: PromptHeads
    ) -> tuple[list[tuple[int, int]], str]:
        """Tokens of the prompts of `read`, 0 if not tokenized, and how many even ones share [rows];
        why the first was not tokenized.
        """
        found, why = list[tuple[int, int]](), ""
        rows = self._rows_at(frozenset(read.places.tolist()))
        made = requests_of_any_length(rows, tokenizer)
        for request, is_even in zip(made, read.even.tolist(), strict=False):
            if isinstance(request, BadRow):
                found.append((0, 0))
                why = why or request.error
                continue
            shared = _shared_tokens(request, heads) if is_even else 0
            found.append((len(request.prompt_ids), shared))
        if len(found) != len(read):
            raise InputError(f"input {self._named} changed while it was read; plan again")
        return found, why

    def _rows_at(self, places: frozenset[int]) -> Iterator[Row]:
        found = (
            row for row, place in self.source.rows() if place in places and isinstance(row, Row)
        )
        return islice(found, len(places))

    def _tokenizer(self) -> TokenizerProcess:
        from quant.checkpoint.model_reference import resolve

        try:
            tokenizer = load_tokenizer(
                resolve(self.model, weights=False), RowLimits(), self.prompting
            )
        except CheckpointError as error:
            raise SpecError(f"the prompts cannot be measured: {error}; or give --s") from error
        if tokenizer is None:
            raise SpecError(f"{self.model} has no tokenizer to measure the prompts; give --s")
        return tokenizer


def _shared_tokens(request: Request, heads: PromptHeads) -> int:
    """Tokens of a head that a request begins with; where this one led to the head, those of the
    earlier request too that it was found by.
    """
    before = heads.counts
    heads.place([request])
    heads.end(request.custom_id)
    new, more = heads.counts.head_tokens - before.head_tokens, heads.counts.shared_tokens
    return new + more - before.shared_tokens


def _numbers(values: array[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _size(row: Row) -> int:
    """Tokens of token ids, bytes of a text, or of messages with tools; at least 1 of a text."""
    if row.token_ids is not None:
        return len(row.token_ids)
    given = (*(row.messages or ()), row.prompt_options)
    text = row.text if row.text is not None else json.dumps(given, ensure_ascii=False)
    return max(1, len(text.encode()))


def _even_rows(sizes: IntArray) -> BoolArray:
    """Which rows are evenly spaced [rows]: as many as may be tokenized together."""
    count = min(len(sizes), MOST_EVEN_ROWS)
    if sizes.sum() * (count / len(sizes)) > MOST_BYTES:
        count = max(1, int(MOST_BYTES / sizes.mean()))
    even = np.zeros(len(sizes), dtype=bool)
    even[np.linspace(0, len(sizes) - 1, count).astype(np.int64)] = True
    return even


def _longest_rows(read: MeasuredRows) -> BoolArray:
    """Which texts are those of the most bytes, of rows that are left [rows]."""
    texts = np.flatnonzero(~read.exact & ~read.done)
    by_size = texts[np.argsort(-read.prompts[texts], kind="stable")][:MOST_LONGEST_ROWS]
    fits = np.cumsum(read.prompts[by_size]) <= MOST_BYTES
    fits[:1] = True
    longest = np.zeros(len(read), dtype=bool)
    longest[by_size[fits]] = True
    return longest
