"""The costs of tensor-parallel groups beside measured ones: LLaMA-2-70B and BLOOM on A100 and H100.

    python -m benchmarks.planning.scale groups --data ../shared/data
                                              [--update docs/measurements/scale.md]

From the datasheet alone; fitted on every second row of a setup and judged on the others, both ways
round; and fitted at 2 or 8 GPUs and judged at the other degree. Nothing is measured here, so the
tables are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.lab import header, table_row, update_page
from benchmarks.planning.scale.measured_groups import (
    DATASHEET,
    Factors,
    FloatArray,
    Row,
    Setup,
    measured_s,
    predicted_s,
    read_rows,
    relative_errors,
)

KNOWN = Factors(arithmetic=0.1, bandwidth=0.1, layer=0.5, sum=0.5, link=0.5, large_sums=1.0)
"""Standard deviations of the factors' logarithms before anything is measured."""
_USUAL_ERROR = 0.1


def fitted(rows: Sequence[Row], looseness: float = 1.0) -> Factors:
    """The factors that fit `rows`, which may be off by `looseness` times `KNOWN`."""
    measured = measured_s(rows)
    spreads = looseness * np.exp(KNOWN.logarithms)

    def residuals(logarithms: FloatArray) -> FloatArray:
        predicted = predicted_s(rows, Factors.from_logarithms(logarithms))
        errors = np.log(predicted / measured).ravel() / _USUAL_ERROR
        return np.concatenate([_huber(errors), logarithms / spreads])

    found = least_squares(residuals, np.zeros(len(spreads)))
    return Factors.from_logarithms(found.x)


def _huber(errors: FloatArray) -> FloatArray:
    """Values whose squares grow as those of `errors` up to 1, and as their sizes beyond."""
    squares: FloatArray = 2 * (np.sqrt(1 + errors**2) - 1)
    return np.sign(errors) * np.sqrt(squares)


SECTION = "groups"
LOOSE = (0.5, 1.0, 2.0, 4.0)
"""Multiples of what the factors may be off by."""
LARGE_SUM_TOKENS = 4096
"""Tokens of a prompt phase from which 8 GPUs take much longer than smaller ones foretell."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--data", type=Path, required=True, help="folder of the reference data")
    parser.add_argument("--update", type=Path, help="page whose section is replaced")


def run(options: argparse.Namespace) -> None:
    """Print the tables, or put them into a page."""
    rows = read_rows(options.data)
    sound = [row for row in rows if not row.is_artefact]
    lines = [
        *datasheet_table(rows, sound),
        "",
        *halves_table(sound),
        "",
        *degrees_table(sound),
        "",
        *looseness_table(sound),
    ]
    if options.update is None:
        print("\n".join(lines))
    else:
        update_page(options.update, SECTION, lines)


def datasheet_table(rows: Sequence[Row], sound: Sequence[Row]) -> Iterator[str]:
    """Errors without any measurement, without and with the rows that are artefacts."""
    yield "**From the datasheet.**\n"
    yield header("| rows | prompt phase | token | both | signed | with the artefacts")
    for setup, own in by_setup(sound).items():
        all_rows = by_setup(rows)[setup]
        yield _datasheet_line(setup.label, relative_errors(own), relative_errors(all_rows))
    yield _datasheet_line("all", relative_errors(sound), relative_errors(rows))


def _datasheet_line(label: str, errors: FloatArray, with_artefacts: FloatArray) -> str:
    signed = " and ".join(f"{each:+.0%}" for each in errors.mean(axis=0))
    more = len(with_artefacts) != len(errors)
    cells = [
        label,
        str(len(errors)),
        *_sizes(errors),
        signed,
        f"{np.abs(with_artefacts).mean():.1%}" if more else "",
    ]
    return table_row(cells)


def halves_table(rows: Sequence[Row]) -> Iterator[str]:
    """Errors on every second row of the factors that fit the others."""
    yield "**Fitted on every second row of a setup, judged on the others, both ways round.**\n"
    yield header(f"| prompt phase | token | both | {FACTORS}")
    found = []
    for setup, own in by_setup(rows).items():
        errors = halves_errors(own)
        found.append(errors)
        cells = [setup.label, *_sizes(errors), *_factors(fitted(own))]
        yield table_row(cells)
    yield f"| all | {' | '.join(_sizes(np.concatenate(found)))} | | | | | | |"


def halves_errors(rows: Sequence[Row], looseness: float = 1.0) -> FloatArray:
    """Errors of all rows, each by the factors that fit the other half [rows, 2]."""
    even, odd = rows[::2], rows[1::2]
    return np.concatenate(
        [
            relative_errors(odd, fitted(even, looseness)),
            relative_errors(even, fitted(odd, looseness)),
        ]
    )


def degrees_table(rows: Sequence[Row]) -> Iterator[str]:
    """Errors at one degree of the factors that fit another."""
    yield "**Fitted at one degree, judged at another** (LLaMA-2-70B).\n"
    yield header(
        "| prompt phase | token | both | by the datasheet | "
        f"both, prompts below {LARGE_SUM_TOKENS} tokens | {FACTORS}"
    )
    found, datasheet = [], []
    for known, asked in _pairs_of_degrees(rows):
        factors = fitted(known).at_other_degrees
        errors, before = relative_errors(asked, factors), relative_errors(asked)
        found.append(errors)
        datasheet.append(before)
        few = [row for row in asked if row.prompt_tokens * row.batch_size < LARGE_SUM_TOKENS]
        cells = [
            f"{known[0].setup.degree} → {asked[0].setup.label.split(', ')[1]}",
            *_sizes(errors),
            f"{np.abs(before).mean():.1%}",
            f"{np.abs(relative_errors(few, factors)).mean():.1%}",
            *_factors(factors),
        ]
        yield table_row(cells)
    together = np.abs(np.concatenate(datasheet)).mean()
    sizes = " | ".join(_sizes(np.concatenate(found)))
    yield f"| all | {sizes} | {together:.1%} | | | | | | | |"


def looseness_table(rows: Sequence[Row]) -> Iterator[str]:
    """Errors by how far the factors may be off the datasheet."""
    yield "**By how freely the factors are fitted**, means of both phases.\n"
    yield header("times the usual looseness | other half | 2 → 8 | 8 → 2")
    for looseness in LOOSE:
        half = np.concatenate([halves_errors(own, looseness) for own in by_setup(rows).values()])
        across: dict[int, list[FloatArray]] = {2: [], 8: []}
        for known, asked in _pairs_of_degrees(rows):
            errors = relative_errors(asked, fitted(known, looseness).at_other_degrees)
            across[known[0].setup.degree].append(errors)
        cells = [f"{np.abs(np.concatenate(each)).mean():.1%}" for each in across.values()]
        yield f"| {looseness:g} | {np.abs(half).mean():.1%} | {' | '.join(cells)} |"


def by_setup(rows: Sequence[Row]) -> dict[Setup, list[Row]]:
    """The rows of every model, hardware and degree."""
    found: dict[Setup, list[Row]] = {}
    for row in rows:
        found.setdefault(row.setup, []).append(row)
    return found


def _pairs_of_degrees(rows: Sequence[Row]) -> Iterator[tuple[list[Row], list[Row]]]:
    """Rows of the same model and hardware at two different degrees."""
    setups = by_setup(rows)
    for one, known in setups.items():
        for other, asked in setups.items():
            alike = (one.model, one.hardware) == (other.model, other.hardware)
            if alike and one.degree != other.degree:
                yield known, asked


FACTORS = "arithmetic | bandwidth | layer's fixed | sum's fixed | link | large sums"


def _factors(factors: Factors) -> list[str]:
    assert len(astuple(DATASHEET)) == FACTORS.count("|") + 1
    return [f"{each:.2f}" for each in astuple(factors)]


def _sizes(errors: FloatArray) -> list[str]:
    """Mean sizes of the errors of the prompt phase, of a token, and of both."""
    sizes = np.abs(errors)
    return [f"{each:.1%}" for each in (*sizes.mean(axis=0), sizes.mean())]
