"""Distributions of lengths in tokens: of a sample, or truncated normal (ExeGPT section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from planner.lengths import IntArray
from quant.common.errors import SpecError

FloatArray = npt.NDArray[np.float64]

SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LengthDistribution:
    """Probabilities of `lengths` [n] in tokens, ascending from 1; SpecError unless above 0 and 1 in
    all.
    """

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
        """The distribution of lengths that were seen."""
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

    def classes(self, count: int) -> tuple[tuple[float, float], ...]:
        """At most `count` mean lengths with nearly equal shares, which stand for all in a mean."""
        above = np.cumsum(self.probabilities) - np.array(self.probabilities) / 2
        which = np.minimum((above * count).astype(np.int64), count - 1)
        shares = np.bincount(which, self.probabilities, count)
        sums = np.bincount(which, np.multiply(self.lengths, self.probabilities), count)
        kept = np.flatnonzero(shares)
        return tuple(zip((sums[kept] / shares[kept]).tolist(), shares[kept].tolist(), strict=True))

    def drawn(self, count: int, generator: np.random.Generator) -> IntArray:
        chosen = generator.choice(self.lengths, size=count, p=np.array(self.probabilities))
        return np.asarray(chosen, dtype=np.int64)


CORRELATED = 0.3
"""Correlation of prompts' with answers' lengths from which on it counts: the paper calls 0.08 to
0.21 low, and has 0.57 to 0.94 in translation (section 7.1)."""


@dataclass(frozen=True)
class RequestLengths:
    """Lengths of prompts and answers, counted as independent. Correlated requests are to come in
    random order, so that those in flight are alike (ExeGPT section 6); 0 where not known.
    """

    prompts: LengthDistribution
    outputs: LengthDistribution
    correlation: float = 0.0

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
