"""Perplexity of a model on a text, and its divergence from another, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ReportProgress = Callable[[int, int], None]
"""Called with the number of layers done and of all layers."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model on a text, window by window.

    `window_nll`: summed negative log-likelihood (nats) of each window's scored tokens, of which it
    has `window_tokens`. `window_divergence`: summed Kullback-Leibler divergence (nats) of the same
    predictions from the reference's (`llmpq.quality.scoring`), None for itself. `dtypes` computed;
    `represented` names kernel backends that do not run here and the layers in which plain products
    with their rounded weights stood for them.
    """

    name: str
    bitwidths: tuple[int, ...]
    window_nll: tuple[float, ...] = field(repr=False)
    window_tokens: tuple[int, ...] = field(repr=False)
    dtypes: tuple[str, ...]
    represented: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    window_divergence: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens scored: all but the first of each window."""
        return sum(self.window_tokens)

    @property
    def windows(self) -> int:
        return len(self.window_tokens)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats a token."""
        return math.fsum(self.window_nll) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the perplexity over windows, to first order; None for one window."""
        error = error_of_mean(self.window_nll, self.window_tokens)
        return None if error is None else self.perplexity * error

    def above(self, other: Perplexity) -> tuple[float, float | None]:
        """Excess of this perplexity over `other`'s, and its standard error to first order.

        Windows are compared one by one, so that how hard the text is does not count: the error is
        much smaller than those of the two perplexities. Raises ValueError for another text.
        """
        if self.window_tokens != other.window_tokens:
            raise ValueError("the perplexities are of different windows")
        own, its = self.perplexity, other.perplexity
        pairs = zip(self.window_nll, other.window_nll, strict=True)
        error = error_of_mean([own * a - its * b for a, b in pairs], self.window_tokens)
        return own - its, error

    @property
    def divergence(self) -> float | None:
        """Mean divergence from the reference's predictions, sum p log(p / q), in nats a token.

        It is not negative and does not depend on which tokens really came. None for the reference.
        """
        if self.window_divergence is None:
            return None
        return math.fsum(self.window_divergence) / self.tokens

    @property
    def divergence_error(self) -> float | None:
        """Standard error of the divergence over windows; None for one window."""
        if self.window_divergence is None:
            return None
        return error_of_mean(self.window_divergence, self.window_tokens)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bitwidths": list(self.bitwidths),
            "tokens": self.tokens,
            "windows": self.windows,
            "nll": self.nll,
            "perplexity": self.perplexity,
            "standard_error": self.standard_error,
            "divergence": self.divergence,
            "divergence_error": self.divergence_error,
            "dtypes": list(self.dtypes),
            "represented": {name: list(layers) for name, layers in self.represented.items()},
        }


def error_of_mean(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Standard error of sum(sums) / sum(counts) over windows, that of a ratio.

    Source: Cochran, Sampling Techniques, section 2.11.
    """
    windows = len(sums)
    if windows < 2:
        return None
    total = sum(counts)
    mean = math.fsum(sums) / total
    spread = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(spread * windows / (windows - 1)) / total
