"""The lengths of a job's rows: prompts and answers, as a sample small enough for a plan's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_SAMPLED = 512
"""Rows that stand for all: their mean is within 2 % of that of lengths as uneven as chat's."""

LEAST_OBSERVED = 16
"""Finished rows whose outputs say more than limits do."""

MOST_UNSEEN = 0.05
"""Share of rows that may be longer than all that have ended, where outputs of others are told."""

NEAR_ROWS = 32
"""Observed rows that count as of similar length."""


@dataclass(frozen=True)
class Lengths:
    """Prompt and output tokens of rows [rows], in the order of the file. `outputs_from` says where
    outputs come from. `output_limit`: the most new tokens of a row (None: the longest output);
    `longest_total`: of prompt and limit together (None: both). SpecError for other than equally
    many entries from 1 within these.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    outputs_from: str = "limits"
    output_limit: int | None = None
    longest_total: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_tokens or len(self.prompt_tokens) != len(self.output_tokens):
            raise SpecError(
                f"lengths of {len(self.prompt_tokens)} prompts and {len(self.output_tokens)} "
                "outputs; give one of both for each of at least one row"
            )
        least = min(*self.prompt_tokens, *self.output_tokens)
        if least < 1:
            raise SpecError(f"a length is {least} tokens; give at least 1")
        longest = max(self.output_tokens)
        if self.output_limit is not None and longest > self.output_limit:
            raise SpecError(
                f"an output has {longest} tokens, but no row may get more than "
                f"{self.output_limit}; raise the limit (--n)"
            )
        total = self.longest_total
        longest = max(map(sum, zip(self.prompt_tokens, self.output_tokens, strict=True)))
        if total is not None and not longest <= total <= self.longest_prompt + self.longest_output:
            raise SpecError(
                f"longest_total is {total}, but rows have up to {longest} tokens, with at most "
                f"{self.longest_prompt} of a prompt and {self.longest_output} of an output"
            )

    @classmethod
    def constant(cls, prompt_length: int, new_tokens: int) -> Lengths:
        return cls((prompt_length,), (new_tokens,), "--n")

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[int, int]],
        outputs_from: str = "limits",
        output_limit: int | None = None,
        longest_total: int | None = None,
    ) -> Lengths:
        """The lengths of `rows` (prompt, output); of more than `MOST_SAMPLED` evenly spaced ones
        and the longest.
        """
        pairs = np.array(list(rows), dtype=np.int64).reshape(-1, 2)
        if len(pairs) > MOST_SAMPLED:
            even = np.linspace(0, len(pairs) - 1, MOST_SAMPLED - 2).astype(np.int64)
            pairs = pairs[np.sort([*even, *pairs.argmax(axis=0)])]
        prompts, outputs = pairs.T.tolist() if len(pairs) else ([], [])
        return cls(tuple(prompts), tuple(outputs), outputs_from, output_limit, longest_total)

    @property
    def longest_prompt(self) -> int:
        return max(self.prompt_tokens)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest output that any row may get."""
        return self.output_limit or max(self.output_tokens)

    @cached_property
    def mean_output(self) -> float:
        return float(np.mean(self.output_tokens))

    @cached_property
    def mean_prompt(self) -> float:
        return float(np.mean(self.prompt_tokens))

    @cached_property
    def outputs_vary(self) -> bool:
        return len(set(self.output_tokens)) > 1

    @cached_property
    def mean_context(self) -> float:
        """Mean tokens before the new one, over all decode steps of all rows."""
        prompts, outputs = np.array(self.prompt_tokens), np.array(self.output_tokens)
        steps = outputs - 1
        if not steps.any():
            return self.mean_prompt
        return float((steps * (prompts + outputs / 2)).sum() / steps.sum())

    def reserved(self, prompts: IntArray, outputs: IntArray) -> IntArray:
        """Tokens for which rows of these lengths [rows] take room until they are done."""
        most = outputs if self.output_limit is None else self.output_limit
        total = np.asarray(prompts + most, dtype=np.int64)
        return total if self.longest_total is None else np.minimum(total, self.longest_total)

    @cached_property
    def mean_reserved(self) -> float:
        """Mean of `reserved` over rows in flight at a time, each for as many iterations as its
        output has tokens.
        """
        prompts, outputs = np.array(self.prompt_tokens), np.array(self.output_tokens)
        return float((self.reserved(prompts, outputs) * outputs).sum() / outputs.sum())

    def rows(self, count: int) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens [count] of evenly spaced rows of the sample, or of it over and
        over.
        """
        held = len(self.prompt_tokens)
        if count <= held:
            chosen = np.linspace(0, held - 1, count).round().astype(np.int64)
        else:
            chosen = np.arange(count) % held
        return np.array(self.prompt_tokens)[chosen], np.array(self.output_tokens)[chosen]


def observed_lengths(pairs: Iterable[tuple[int, int]], source: str) -> Lengths:
    """The lengths of rows (prompt, output) generated; SpecError for fewer than `LEAST_OBSERVED`.
    Rows that finish first are short: of a job that goes on, give those of `ended_together`.
    """
    rows = list(pairs)
    if len(rows) < LEAST_OBSERVED:
        raise SpecError(
            f"{source} has {len(rows)} finished rows to take output lengths from; wait for "
            f"{LEAST_OBSERVED}, or plan without"
        )
    return Lengths.of(rows, source)


def ended_together(ended: BoolArray) -> BoolArray:
    """Which rows [rows], in the order they began, tell the outputs of all: ended ones among the
    first of which at most `MOST_UNSEEN` have not ended, as of later ones only the short are known.
    """
    numbers = np.arange(len(ended))
    enough = np.flatnonzero(np.cumsum(ended) >= (1 - MOST_UNSEEN) * (numbers + 1))
    known = int(enough[-1]) + 1 if len(enough) else 0
    return np.asarray(ended & (numbers < known))


def expected_outputs(observed: Lengths, prompts: IntArray, limits: IntArray) -> IntArray:
    """Output tokens [rows] drawn from `observed` rows nearest in prompt length (`NEAR_ROWS`, and
    all of the same), at most the limit, so that outputs keep their spread and what they owe to the
    prompt.
    """
    order = np.argsort(observed.prompt_tokens, kind="stable")
    seen_prompts = np.array(observed.prompt_tokens)[order]
    seen_outputs = np.array(observed.output_tokens)[order]
    near = min(len(order), NEAR_ROWS)
    first = np.searchsorted(seen_prompts, prompts, "left")
    last = np.searchsorted(seen_prompts, prompts, "right")
    begin = np.clip((first + last - near) // 2, 0, len(order) - near)
    begin, end = np.minimum(begin, first), np.maximum(begin + near, last)
    drawn = begin + np.random.default_rng(0).integers(0, end - begin)
    return np.asarray(np.minimum(seen_outputs[drawn], limits), dtype=np.int64)


def quantile(values: Sequence[int], share: float) -> int:
    """The least of `values` that at least this `share` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, int(np.ceil(share * len(ordered))) - 1))]
