"""Tables of the bits that indicators choose at equal memory, for `quality`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import t as student

from benchmarks.lab import header
from llmpq.quality.perplexity import Perplexity, error_of_mean
from planner.model.shape import ModelShape

Bits = tuple[int, ...]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean (Student's t)."""
    quantile = float(student.ppf(0.975, len(values) - 1))
    return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class Row:
    """One budget: what each indicator and each random seed came to."""

    share: float
    budget_bytes: float
    chosen: Mapping[str, Perplexity]
    drawn: tuple[Perplexity, ...]

    @property
    def random(self) -> list[float]:
        """Perplexities by seed."""
        return [result.perplexity for result in self.drawn]

    @property
    def text_error(self) -> float:
        """Standard error, over windows of the text, of variance's perplexity less random's."""
        nats = np.mean([result.window_nll for result in self.drawn], axis=0)
        typical = replace(self.drawn[0], window_nll=tuple(nats.tolist()))
        return self.chosen["variance"].above(typical)[1] or math.nan


def print_rows(rows: Sequence[Row], shape: ModelShape) -> None:
    """Perplexity and divergence of each indicator's choice, and of the random ones."""
    weights = shape.layers * sum(linear.parameters for linear in shape.layer_linears)
    names, drawn = list(rows[0].chosen), len(rows[0].drawn)
    more = f", {drawn} random seeds" if drawn else ""
    columns = [*names, "random", "best seed"] if drawn else names
    for title, digits, figure in (
        ("Perplexity", 3, lambda result: result.perplexity),
        ("Divergence, 0.001 nats a token,", 2, lambda result: 1000 * (result.divergence or 0)),
    ):
        print(f"\n{title} of the bits chosen at equal memory{more}:\n")
        print(header(f"share | bits a weight | {' | '.join(columns)}"))
        for row in rows:
            cells = [f"{figure(result):.{digits}f}" for result in row.chosen.values()]
            if drawn:
                random = [figure(result) for result in row.drawn]
                cells += [
                    f"{np.mean(random):.{digits}f} ± {half_width(random):.{digits}f}",
                    f"{min(random):.{digits}f}",
                ]
            bits = 8 * row.budget_bytes / weights
            print(f"| {row.share:.2f} | {bits:.2f} | {' | '.join(cells)} |")


def divergence_above(own: Perplexity, other: Perplexity) -> tuple[float, float | None]:
    """Excess of `own` divergence over that of `other`, nats a token, and its standard error.

    Windows are compared one by one; both are measured from the same predictions, and where these
    are one of the two its divergence is 0.
    """
    pair = (each.window_divergence or (0.0,) * each.windows for each in (own, other))
    apart = [a - b for a, b in zip(*pair, strict=True)]
    return math.fsum(apart) / own.tokens, error_of_mean(apart, own.window_tokens)


def print_pairs(rows: Sequence[Row]) -> None:
    """How much less than each other choice the one by `error` diverges, paired over windows."""
    names = [name for name in rows[0].chosen if name != "error"]
    print("\nDivergence of each choice less that of error's, 0.001 nats a token (± 1 σ):\n")
    print(header(f"share | {' | '.join(names)}"))
    for row in rows:
        cells = []
        for name in names:
            if row.chosen[name].bitwidths == row.chosen["error"].bitwidths:
                cells.append("the same bits")
                continue
            less, error = divergence_above(row.chosen[name], row.chosen["error"])
            cells.append(f"{1000 * less:+.2f} ± {1000 * (error or 0):.2f}")
        print(f"| {row.share:.2f} | {' | '.join(cells)} |")


def print_goals(rows: Sequence[Row]) -> None:
    """Variance against random and Hessian at each budget."""
    print("\nVariance beside random (mean of the seeds; 1 σ of the text) and beside Hessian:\n")
    print(header("share | variance - random | 1 σ | beyond the 95 % | seeds beaten | over Hessian"))
    for row in rows:
        own, hessian = row.chosen["variance"].perplexity, row.chosen["hessian"].perplexity
        difference = own - float(np.mean(row.random))
        beaten = sum(own < other for other in row.random)
        beyond = "yes" if difference < -half_width(row.random) else "no"
        print(
            f"| {row.share:.2f} | {difference:+.3f} | {row.text_error:.3f} | {beyond} "
            f"| {beaten} of {len(row.drawn)} | {own / hessian - 1:+.2%} |"
        )


def print_choices(rows: Sequence[Row]) -> None:
    """The bits that were chosen, first layer first."""
    letters = {3: "3", 4: "4", 5: "5", 6: "6", 8: "8", 16: "F"}
    print("\nBits of each layer (F: 16):\n")
    print(header("share | by | bits"))
    for row in rows:
        by_bits: dict[Bits, list[str]] = {}
        for name, result in row.chosen.items():
            by_bits.setdefault(result.bitwidths, []).append(name)
        for bits, names in by_bits.items():
            told = "".join(letters[each] for each in bits)
            print(f"| {row.share:.2f} | {', '.join(names)} | `{told}` |")
