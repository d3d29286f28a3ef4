"""The lengths of a job's rows as a sample small enough for a plan's file, and as distributions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
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
class PlannedHeads:
    """Heads that prompts share: the first `shared_tokens` of each prompt, all but one of a shorter
    one, are restored from a copy and not computed; `head_tokens` of all heads together are computed
    once and kept (None: of one head). SpecError unless whole numbers from 0.
    """

    shared_tokens: int = 0
    head_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("shared_tokens", "head_tokens"):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= 0):
                raise SpecError(f"{name} is {value!r}; it must be a whole number of at least 0")

    @property
    def kept_tokens(self) -> int:
        """Tokens of all heads together; 0 where prompts share none."""
        if not self.shared_tokens or self.head_tokens is None:
            return self.shared_tokens
        return self.head_tokens

    def check(self, longest_prompt: int) -> None:
        """Raise SpecError where no prompt would have any tokens of its own."""
        if self.shared_tokens >= longest_prompt:
            raise SpecError(
                f"shared_tokens is {self.shared_tokens}, but prompts have at most {longest_prompt} "
                "tokens, one of which is computed at least; lower it, or give longer prompts (--s)"
            )

    def within(self, longest_prompt: int) -> PlannedHeads:
        """These heads, or none where no prompt would have any tokens of its own."""
        return self if self.shared_tokens < longest_prompt else NO_HEADS

    def computed(self, prompt_tokens: float) -> float:
        """Tokens that are computed of a prompt of so many."""
        return max(1.0, prompt_tokens - self.shared_tokens)


NO_HEADS = PlannedHeads()


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
        """The lengths of `rows`; of more than `MOST_SAMPLED` evenly spaced ones and the longest."""
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
    def are_alike(self) -> bool:
        return len(set(self.prompt_tokens)) == 1 and not self.outputs_vary

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
        """Mean of `reserved` over rows in flight: each for as many iterations as output tokens."""
        prompts, outputs = np.array(self.prompt_tokens), np.array(self.output_tokens)
        return float((self.reserved(prompts, outputs) * outputs).sum() / outputs.sum())

    def mean_grown(self, growth: int) -> float:
        """As `mean_reserved`, where rows begin with room for their prompt and `growth` tokens, and
        take as many more when these are full.
        """
        prompts, outputs = np.array(self.prompt_tokens), np.array(self.output_tokens)
        most = self.reserved(prompts, outputs)
        size, held = np.minimum(prompts + growth, most), np.zeros(len(prompts))
        begun = np.zeros(len(prompts), dtype=np.int64)
        while (begun < outputs).any():
            # the last token needs no room, as it is not computed with
            until = np.clip(size - prompts + 1, begun, outputs)
            held += (until - begun) * size
            begun, size = until, np.minimum(size + growth, most)
        return float(held.sum() / outputs.sum())

    def rows(self, count: int) -> tuple[IntArray, IntArray]:
        """Prompt and output tokens [count] of evenly spaced rows, or of the sample repeated."""
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


SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LengthDistribution:
    """Probabilities of `lengths` [n] in tokens, from 1 up; SpecError unless above 0, in all 1."""

    lengths: tuple[int, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.probabilities):
            raise SpecError(
                f"a distribution of {len(self.lengths)} lengths has {len(self.probabilities)} "
                "probabilities; give one for each of at least one length"
            )
        if any(a >= b for a, b in zip((0, *self.lengths), self.lengths, strict=False)):
            raise SpecError("lengths of a distribution must ascend from at least 1, each once")
        total = sum(self.probabilities)
        if not (isfinite(total) and abs(total - 1) < SUM_TOLERANCE and min(self.probabilities) > 0):
            raise SpecError(
                f"probabilities of lengths sum to {total:g}; give ones above 0, in all 1"
            )

    def __hash__(self) -> int:
        """Found once, as what is known of a distribution is looked up often."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.probabilities))

    @classmethod
    def of_sample(cls, tokens: Sequence[int] | IntArray) -> LengthDistribution:
        lengths, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
        return cls(tuple(lengths.tolist()), tuple((counts / counts.sum()).tolist()))

    @classmethod
    def truncated_normal(cls, mean: float, deviation: float, longest: int) -> LengthDistribution:
        """A normal distribution cut to 1 to `longest` tokens and rounded (ExeGPT section 7.1)."""
        if not (deviation > 0 and longest >= 1 and isfinite(mean)):
            raise SpecError(
                f"a truncated normal of mean {mean:g}, deviation {deviation:g} and longest "
                f"{longest}; give a deviation above 0 and a longest of at least 1"
            )
        normal = NormalDist(mean, deviation)
        chances = np.diff([normal.cdf(length + 0.5) for length in range(longest + 1)])
        kept = np.flatnonzero(chances > 0)
        if not len(kept):
            raise SpecError(f"no length of 1 to {longest} is likely at mean {mean:g}")
        chances = chances[kept] / chances[kept].sum()
        return cls(tuple((kept + 1).tolist()), tuple(chances.tolist()))

    @cached_property
    def mean(self) -> float:
        return float(np.dot(self.lengths, self.probabilities))

    @cached_property
    def variance(self) -> float:
        squares = np.square(np.array(self.lengths, dtype=np.float64))
        return float(np.dot(squares, self.probabilities)) - self.mean**2

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @cached_property
    def _at_most_chances(self) -> FloatArray:
        """The chance of at most each of the lengths [n]; searches ask for it thousands of times."""
        return np.cumsum(self.probabilities)

    def quantile(self, share: float) -> int:
        """The least length that at least this `share` of all does not exceed."""
        reached = np.searchsorted(self._at_most_chances, share - SUM_TOLERANCE)
        return self.lengths[min(int(reached), len(self.lengths) - 1)]

    def at_most(self, longest: int) -> LengthDistribution:
        """The distribution of these lengths, where longer ones are cut to `longest`."""
        cut = np.minimum(self.lengths, longest)
        lengths, where = np.unique(cut, return_inverse=True)
        chances = np.bincount(where, self.probabilities)
        return LengthDistribution(tuple(lengths.tolist()), tuple(chances.tolist()))

    def strata(self, count: int) -> tuple[IntArray, FloatArray]:
        """The class of each length [n] of so many with nearly equal shares, and these [count]."""
        above = self._at_most_chances - np.array(self.probabilities) / 2
        which = np.minimum((above * count).astype(np.int64), count - 1)
        return which, np.asarray(np.bincount(which, self.probabilities, count), dtype=np.float64)

    def classes(self, count: int) -> tuple[tuple[float, float], ...]:
        """At most `count` mean lengths with nearly equal shares, which stand for all in a mean."""
        which, shares = self.strata(count)
        sums = np.bincount(which, np.multiply(self.lengths, self.probabilities), count)
        kept = np.flatnonzero(shares)
        return tuple(zip((sums[kept] / shares[kept]).tolist(), shares[kept].tolist(), strict=True))

    def drawn(self, count: int, generator: np.random.Generator) -> IntArray:
        chosen = generator.choice(self.lengths, size=count, p=np.array(self.probabilities))
        return np.asarray(chosen, dtype=np.int64)

    def spread(self, count: int, generator: np.random.Generator) -> IntArray:
        """Lengths [count] in random order, each as often as its probability says, to one."""
        shares = (generator.permutation(count) + generator.random(count)) / count
        places = np.searchsorted(self._at_most_chances, shares, "right")
        chosen = np.array(self.lengths)[np.minimum(places, len(self.lengths) - 1)]
        return np.asarray(chosen, dtype=np.int64)


CORRELATED = 0.3
"""Correlation of prompts' with answers' lengths from which on it counts: the paper calls 0.08 to
0.21 low, and has 0.57 to 0.94 in translation (section 7.1)."""


@dataclass(frozen=True)
class RequestLengths:
    """Lengths of prompts and answers, counted as independent. Correlated requests are to come in
    random order, so that those in flight are alike (ExeGPT section 6); 0 where not known. Prompts
    may share `heads`.
    """

    prompts: LengthDistribution
    outputs: LengthDistribution
    correlation: float = 0.0
    heads: PlannedHeads = NO_HEADS

    def __post_init__(self) -> None:
        self.heads.check(self.prompts.longest)

    @property
    def computed_tokens(self) -> float:
        """Mean tokens of a prompt that are computed."""
        each = [self.heads.computed(length) for length in self.prompts.lengths]
        return float(np.dot(each, self.prompts.probabilities))

    @classmethod
    def of_pairs(
        cls, prompts: Sequence[int] | IntArray, outputs: Sequence[int] | IntArray
    ) -> RequestLengths:
        """The lengths of requests [n] that were seen, with their correlation."""
        tokens = np.array([prompts, outputs], dtype=np.float64)
        varied = bool((tokens.min(axis=1) < tokens.max(axis=1)).all())
        correlation = float(np.corrcoef(*tokens).min()) if varied else 0.0
        of_sample = LengthDistribution.of_sample
        return cls(of_sample(prompts), of_sample(outputs), correlation)

    @property
    def are_correlated(self) -> bool:
        return abs(self.correlation) >= CORRELATED
