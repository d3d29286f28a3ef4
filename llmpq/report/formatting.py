"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from quant.common.units import GIB, KIB, MIB

if TYPE_CHECKING:  # jobs are shown without the planner
    from planner.explanation.planned_assignment import Part

MINUS, SPACE = "−", "\N{NO-BREAK SPACE}"


class _Units(NamedTuple):
    """Two units of time: `ratio` small ones make a large one, which is used from `most` on."""

    large: str
    small: str
    ratio: int
    small_s: float
    most: float


_DURATIONS = (
    _Units("min", "s", 60, 1, 3600),
    _Units("h", "min", 60, 60, 24 * 60),
    _Units("d", "h", 24, 3600, math.inf),
)

MOST_S = 100.0  # seconds that are told as such
DIGITS = 9  # of a value that is worth writing; what follows is the rounding of sums


def size(count: float) -> str:
    """Bytes in the unit that keeps them short."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{_signed(count / unit, 2)}{SPACE}{name}"
    return f"{_signed(count, 0)}{SPACE}bytes"


def seconds(value: float) -> str:
    """Seconds, milliseconds or microseconds, with about four digits."""
    value = float(f"{value:.{DIGITS}g}")
    if value == 0:
        return f"0{SPACE}s"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= unit or name == "µs":
            scaled = value / unit
            digits = 1 if abs(scaled) >= 100 else 2
            return f"{_signed(scaled, digits)}{SPACE}{name}"
    return ""


def change(value: float, least: float = 0.0) -> str:
    """A difference in seconds with its sign; "none" up to `least`."""
    if abs(value) <= least:
        return "none"
    return ("+" if value > 0 else "") + seconds(value)


def size_change(count: float) -> str:
    return ("+" if count > 0 else "") + size(count)


def duration(value: float) -> str:
    """The time of a batch or a job, wherever it is told: "71.41 s", and from `MOST_S` on in two
    units at most, "16 min 20 s", "3 h 5 min", "2 d 1 h".
    """
    if round(value, 2) < MOST_S or math.isinf(value):  # of a plan whose figures were edited
        return seconds(value)
    return _in_two_units(value)


def _in_two_units(value: float) -> str:
    fits = (each for each in _DURATIONS if round(value / each.small_s) < each.most)
    unit = next(fits, _DURATIONS[-1])
    whole, rest = divmod(round(value / unit.small_s), unit.ratio)
    return f"{whole:,} {unit.large}" + (f" {rest} {unit.small}" if rest else "")


def moment(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def lasted(seconds: float) -> str:
    """Seconds of work that goes on, in two units at most: "2.5 s", "16 min 20 s", "2 d 1 h"."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return _in_two_units(seconds)


def age(at: float, now: float) -> str:
    """How long ago something was, in its largest unit: "5 s", "3 min", "2 d"."""
    return " ".join(lasted(max(1.0, now - at)).split()[:2])


def count(number_of: int) -> str:
    return f"{number_of:,}"


def per_second(value: float) -> str:
    """Tokens per second: whole ones from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share with one decimal, or none from 10 % on."""
    return f"{share * 100:.{0 if abs(share) >= 0.1 else 1}f}{SPACE}%"


def whole_percent(share: float) -> str:
    """A share with as many digits as it needs: "99.9 %"."""
    return f"{share * 100:.6g}{SPACE}%"


def gap(share: float) -> str:
    """The proven distance from the best plan."""
    return f"{share * 100:.2f}{SPACE}%"


def times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def share_change(share: float) -> str:
    """A difference as a share, in words: "the same", "1.2 % more"."""
    if abs(share) < 5e-5:
        return "the same"
    return f"{abs(share) * 100:.2f}{SPACE}% {'more' if share > 0 else 'less'}"


def mean_bits(bits: float) -> str:
    return f"{bits:.1f}"


def plain(text: str) -> str:
    """The text for a terminal, which may know no more than ASCII."""
    return text.replace(SPACE, " ").replace(MINUS, "-").replace("µ", "u").replace("–", "-")


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}".replace("-", MINUS)


def rate(bytes_per_s: float) -> str:
    """Bytes per second in the decimal units of data sheets."""
    return f"{bytes_per_s / 1e9:.4g}{SPACE}GB/s"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Join count and noun: "1 layer" and "3,000 layers"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def layer_span(layers: range) -> str:
    """Name a span of layers: "layer 7", or "layers 8 to 11"."""
    return f"{'layer' if len(layers) == 1 else 'layers'} {layer_numbers(layers)}"


def part_span(layers: range, part: Part) -> str:
    """Name a span of layers, or a part of them: "experts of layers 8 to 11"."""
    return _part_named(layer_span(layers), part, len(layers))


def part_runs(layers: Sequence[int], part: Part) -> str:
    """Name layers in their order, or a part of them, as `part_span` where they are one span."""
    span = range(layers[0], layers[-1] + 1)
    if len(layers) == len(span):
        return part_span(span, part)
    return _part_named(layer_runs(layers), part, len(layers))


def _part_named(layers: str, part: Part, count: int) -> str:
    if part == "rest":
        return f"{layers} without {'its' if count == 1 else 'their'} experts"
    return f"experts of {layers}" if part == "experts" else layers


def bits_named(bits: int, on_host: bool) -> str:
    """Name a choice: "4 bit on the host"."""
    return f"{bits} bit{' on the host' if on_host else ''}"


def bit_runs(bitwidths: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of equal bits in their order, each with its length."""
    return [(bits, len(list(alike))) for bits, alike in groupby(bitwidths)]


MOST_RUNS = 4  # of layers at equal distances that are all named


def layer_runs(layers: Iterable[int]) -> str:
    """Name layers by runs: "layers 0–10, 17"; at equal distances "layers 3, 7, 11, … 47"."""
    runs: list[range] = []
    for layer in layers:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    named = list[str]()
    while runs:
        alike = _equally_far(runs)
        head, runs = runs[:alike], runs[alike:]
        names = [f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in head]
        named += names if alike <= MOST_RUNS else [*names[:3], f"… {names[-1]}"]
    return "layers " + ", ".join(named)


def _equally_far(runs: Sequence[range]) -> int:
    """How many of the first runs are as long as the first, and as far apart as the first two."""
    for place, (before, run) in enumerate(pairwise(runs), 1):
        if len(run) != len(runs[0]) or run[0] - before[0] != runs[1][0] - runs[0][0]:
            return place
    return len(runs)


def layer_numbers(layers: range) -> str:
    """Number a span of layers: "7", "8 to 11", or "none"."""
    if len(layers) < 2:
        return str(layers.start) if layers else "none"
    return f"{layers.start} to {layers.stop - 1}"


def listed(names: list[str], word: str = "and") -> str:
    """Join words as in "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {word} {names[-1]}"


def shortened(name: str, most: int) -> str:
    """A name of at most `most` characters, its middle left out."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def _signed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", MINUS)
