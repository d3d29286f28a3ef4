"""Measured parts of layers, loading, hops and sums as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from llmpq.report.layout import new_table
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec
from planner.profiles.layer_fit import row_length
from planner.profiles.links import (
    PLACES,
    LinkRow,
    LoadRow,
    SumRow,
    fit_links,
    fit_sums,
    loading_path,
    loading_s,
)
from planner.profiles.rows import ProfileRow, read_table
from planner.scheduling import PHASES


def parts_table(rows: Sequence[ProfileRow]) -> Table:
    """Attention and the rest of a layer, and of this its experts, for the smallest and the largest
    workloads measured of each bitwidth and phase; no rows where they were not measured apart.
    """
    experts = ("of it experts",) if any(row.experts_s for row in rows) else ()
    table = _table(
        "attention, and the rest of a layer",
        (
            *("bits", "phase", "requests", "tokens each", "attention", "rest", *experts),
            "attention's share",
        ),
        left=("phase",),
    )
    for row in _outermost([row for row in rows if row.attention_s is not None]):
        attention_s = row.attention_s or 0.0
        table.add_row(
            str(row.bits),
            row.phase,
            str(row.batch_size),
            str(row_length(row)),
            f"{attention_s * 1e3:.3g} ms",
            f"{(row.seconds - attention_s) * 1e3:.3g} ms",
            *(f"{(row.experts_s or 0.0) * 1e3:.3g} ms" for _ in experts),
            f"{attention_s / row.seconds:.0%}",
        )
    return table


def _outermost(rows: Sequence[ProfileRow]) -> Iterator[ProfileRow]:
    """Yield, by bitwidth and phase, one and most requests with fewest and most tokens."""
    for bits in sorted({row.bits for row in rows}):
        for phase in PHASES:
            own = [row for row in rows if (row.bits, row.phase) == (bits, phase)]
            sizes = [row.batch_size for row in own]
            for size in sorted({min(sizes), max(sizes)}) if own else ():
                of_size = sorted((row for row in own if row.batch_size == size), key=row_length)
                yield of_size[0]
                if len(of_size) > 1:
                    yield of_size[-1]


def loading_table(rows: Iterable[LoadRow]) -> Table:
    """Seconds of a layer, and what that is a GB of 16-bit weights."""
    table = _table(
        "loading a layer, its files in the system's cache",
        ("device", "bits", "from", "s a layer", "s a GB of 16 bit", "becomes"),
        left=("device", "from"),
    )
    for row in rows:
        table.add_row(
            row.device,
            str(row.bits),
            row.origin,
            f"{row.seconds:.4g}",
            f"{row.seconds / row.checkpoint_bytes * 1e9:.2f}",
            f"{row.held_bytes / row.checkpoint_bytes:.2f} GB",
        )
    return table


def loading_note(plan: PlanSpec, profile: str | Path) -> str | None:
    """A note on how long the plan's stages load, where that was measured with the profile."""
    path = loading_path(profile)
    if not path.exists():
        return None
    rows = read_table(path, LoadRow)
    layer_bytes = 2 * model_shape(plan.model.source).layer_parameters
    from_files = loading_s(rows, plan, layer_bytes, "checkpoint")
    from_cache = loading_s(rows, plan, layer_bytes, "cache")
    if from_files is None or from_cache is None:
        return None
    return (
        f"loading: {from_files:.3g} s of layers from the checkpoint, {from_cache:.3g} s from the "
        f"cache, on the slowest stage and with files in memory ({path.name})"
    )


def hop_table(rows: Sequence[LinkRow]) -> Table:
    """Latency and rate of each link and way, and how far the line lies from the medians."""
    table = _table(
        "hops between stages",
        ("between", "where", "way", "latency", "rate", "error of the line", "spread"),
        left=("between", "where", "way"),
    )
    for link in sorted({row.link for row in rows}):
        for way in sorted({row.way for row in rows if row.link == link}):
            own = [row for row in rows if (row.link, row.way) == (link, way)]
            for fit in fit_links(own):
                fitted_s = [fit.latency_s + row.payload_bytes / fit.bytes_per_s for row in own]
                line = _line(fit.latency_s, fit.bytes_per_s, own, fitted_s)
                table.add_row(" and ".join(link[:2]), PLACES[fit.place], way, *line)
    return table


def sum_table(rows: Sequence[SumRow]) -> Table:
    """Latency and rate of each kind of group, and how far the line lies from the medians."""
    table = _table(
        "sums of tensor-parallel groups",
        ("of", "latency", "rate", "error of the line", "spread"),
        left=("of",),
    )
    for fit in fit_sums(rows):
        own = [row for row in rows if row.group == (fit.accelerator, fit.degree)]
        fitted_s = [fit.seconds(row.summed_bytes) for row in own]
        line = _line(fit.latency_s, 1 / max(fit.s_per_byte, 1e-15), own, fitted_s)
        table.add_row(f"{fit.degree} {fit.accelerator}", *line)
    return table


def _line(
    latency_s: float,
    bytes_per_s: float,
    rows: Sequence[LinkRow | SumRow],
    fitted_s: Sequence[float],
) -> tuple[str, ...]:
    """The last four columns of a line that is fitted to `rows`."""
    errors = [abs(s - row.seconds) / row.seconds for s, row in zip(fitted_s, rows, strict=True)]
    return (
        f"{latency_s * 1e6:.0f} us",
        f"{bytes_per_s / 1e9:.2f} GB/s",
        f"{sum(errors) / len(errors):.0%} mean",
        f"{max(row.spread for row in rows):.0%} at most",
    )


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    table = new_table(columns, [at for at, name in enumerate(columns) if name in left])
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    return table
