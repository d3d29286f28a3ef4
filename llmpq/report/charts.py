"""Axes of charts, and the few SVG elements that all of them are drawn with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from llmpq.report.rendering import render

MOST_TICKS = 6
LABEL_WIDTH = 44  # pixels that a number below an axis needs
ACCENT, GRID, INK, CARD = "#1f5fa8", "#d5dae0", "#1b1f24", "#ffffff"
"""Colours where no style is; a style has its own ones."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
MOST_TIMES = 6
_TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)

Ticks = Sequence[tuple[float, str]]
"""Pixels of values that get a number, with these."""


@dataclass(frozen=True)
class Axis:
    """Maps values from `low`..`high` to pixels `first`..`last`, by logarithms if `is_log`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis from the least to the greatest value, with a margin."""
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or abs(low) or 1.0
        return cls(max(0.0, low - margin), high + margin, first, last)

    @classmethod
    def from_zero(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis from zero to a margin above the greatest value."""
        return cls(0.0, 1.12 * max(values) or 1.0, first, last)

    @classmethod
    def of_counts(cls, counts: Sequence[float], first: float, last: float) -> Axis:
        """A logarithmic axis, at both ends a margin within the pixels."""
        margin = 0.06 * (last - first)
        return cls(min(counts), max(counts), first + margin, last - margin, is_log=True)

    def at(self, value: float) -> float:
        """The pixel of a value; the middle where there is only one."""
        low, high = self.low, self.high
        if low == high:
            return (self.first + self.last) / 2
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.first + share * (self.last - self.first)

    @property
    def ticks(self) -> Ticks:
        """Round values, at most `MOST_TICKS`."""
        rough = (self.high - self.low) / (MOST_TICKS - 1)
        power = math.floor(math.log10(rough))
        step = min(
            (n * 10.0**power for n in (1, 2, 5, 10) if n * 10.0**power >= rough),
            default=10.0 ** (power + 1),
        )
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / step)
        values = [step * (first + number) for number in range(MOST_TICKS)]
        return [
            (self.at(value), f"{value:,.{decimals}f}") for value in values if value <= self.high
        ]

    @property
    def times(self) -> Ticks:
        """Round times of an axis of seconds, at most `MOST_TIMES`, in the units people count in."""
        steps = (each for each in _TIME_STEPS if self.high / each <= MOST_TIMES - 1)
        step = next(steps, _TIME_STEPS[-1])
        number = int(self.high / step)
        return [(self.at(each * step), _time_words(each * step)) for each in range(number + 1)]

    def chosen(self, values: Sequence[float]) -> Ticks:
        """These values, earlier ones before later ones, as far as their numbers have room."""
        kept: dict[float, str] = {}
        for value in values:
            pixel = self.at(value)
            if all(abs(pixel - other) >= LABEL_WIDTH for other in kept):
                kept[pixel] = f"{value:,.6g}"
        return sorted(kept.items())


def _time_words(seconds: int) -> str:
    if not seconds:
        return "0"
    for unit_s, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds % unit_s == 0:
            return f"{seconds // unit_s} {name}"
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


def element(name: str, *inner: str, **attributes: object) -> Markup:
    """An SVG element; text is escaped, floats are pixels, and empty attributes are left out.
    `_` in the names of attributes stands for `-`, and `style` is the class.
    """
    shown = Markup("").join(
        Markup(' {}="{}"').format(
            "class" if key == "style" else key.replace("_", "-"),
            f"{value:.1f}" if isinstance(value, float) else str(value),
        )
        for key, value in attributes.items()
        if value not in (None, "")
    )
    if not inner:
        return Markup("<{}{}/>\n").format(name, shown)
    return Markup("<{0}{1}>{2}</{0}>\n").format(name, shown, Markup("").join(map(escape, inner)))


def svg(
    size: tuple[int, int], label: str, parts: Iterable[Markup], alone: bool = False, **more: object
) -> Markup:
    """A chart of so many pixels; one that stands `alone` brings its style, light or dark."""
    width, height = size
    own: dict[str, object] = {}
    ground: list[Markup] = []
    if alone:
        own = {"width": width, "height": height}
        box = {"x": 0.5, "y": 0.5, "width": width - 1, "height": height - 1, "rx": 10}
        ground = [
            element("style", Markup(render("chart_alone.css"))),
            element("rect", style="ground", fill=CARD, stroke=GRID, **box),
        ]
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", **own,
        "style": "chart", "role": "img", "aria_label": label, "fill": "#57606a",
        "font_family": "sans-serif", "font_size": 14,
    }  # fmt: skip
    return element("svg", "\n", *ground, *parts, **{**attributes, **more})


def line(x1: float, y1: float, x2: float, y2: float, style: str, **more: object) -> Markup:
    return element("line", x1=x1, x2=x2, y1=y1, y2=y2, style=style, **more)


def text(x: float, y: float, words: str, style: str = "", **more: object) -> Markup:
    return element("text", words, x=float(x), y=float(y), style=style, **more)


def label(x: float, y: float, words: str, anchor: str | None = None) -> Markup:
    """Words that stay readable above lines."""
    outline = {"stroke": CARD, "stroke_width": 4, "paint_order": "stroke"}
    return text(x, y, words, "label", text_anchor=anchor, **outline)


def polyline(pixels: Iterable[tuple[float, float]], style: str = "front", **more: object) -> Markup:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    drawn = {"fill": "none", "stroke": ACCENT, "stroke_width": 2, **more}
    return element("polyline", points=points, style=style, **drawn)


def spot(
    x: float, y: float, title: str, style: str = "spot", fill: str = ACCENT, **more: object
) -> Markup:
    """A point with its figures, which show where it is pointed at."""
    inner = (element("title", title),) if title else ()
    return element("circle", *inner, cx=x, cy=y, style=style, fill=fill, **{"r": 5, **more})


def columns(ticks: Ticks, first: float, last: float, below: float = 20) -> Iterator[Markup]:
    """Lines between two pixels upright, with their numbers `below` the first one."""
    for at, words in ticks:
        yield line(at, last, at, first, "grid", stroke=GRID)
        yield text(at, first + below, words, text_anchor="middle")


def rows(ticks: Ticks, first: float, last: float) -> Iterator[Markup]:
    """Lines from the left to the right pixel, with their numbers on the left."""
    for at, words in ticks:
        yield line(first, at, last, at, "grid", stroke=GRID)
        yield text(first - 8, at + 5, words, text_anchor="end")
