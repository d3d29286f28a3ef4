"""A simulated batch as a Gantt picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from planner.schedule.static import Pass
from planner.simulation.simulation import Simulated
from planner.simulation.trace import check_labels, write_text
from quant.common.errors import SpecError

# Prefill blue, decode orange, each in shades that tell neighbouring micro-batches apart.
COLOURS = {
    "prefill": ("#1f4e79", "#2e75b6", "#5b9bd5", "#9dc3e6"),
    "decode": ("#843c0c", "#c55a11", "#ed7d31", "#f4b183"),
}

LINK_COLOUR = "#7f7f7f"

LABEL_WIDTH, ROW_HEIGHT, BAR_HEIGHT, LINK_HEIGHT = 190, 30, 18, 4

AXIS_HEIGHT, TICKS = 50, 8

MORE = ", and more"  # in the title of a bar that stands for several


@dataclass(frozen=True)
class GanttOptions:
    """The part of a batch to draw: from `start_s` to `end_s` (None: the end) in `width` pixels.

    Raises SpecError for an empty span or a width of no use.
    """

    start_s: float = 0.0
    end_s: float | None = None
    width: int = 1400

    def __post_init__(self) -> None:
        """Check span and width."""
        if self.start_s < 0 or (self.end_s is not None and self.end_s <= self.start_s):
            raise SpecError(
                f"a picture from {self.start_s} s to {self.end_s} s is empty; give an end after a "
                "start of at least 0"
            )
        if self.width < 100:
            raise SpecError(f"a picture of {self.width} pixels is too narrow; give at least 100")


@dataclass(frozen=True)
class _Bar:
    """One or more computations that touch, in pixels from the left of the drawing area."""

    left: float
    right: float
    colour: str
    title: str


def gantt_svg(
    simulated: Simulated, labels: Sequence[str], options: GanttOptions | None = None
) -> str:
    """An SVG with a row per stage: its computations and, below them, its transfers.

    Computations narrower than a pixel are drawn together, so that long batches stay small files.
    Raises SpecError unless there is one label a stage, or where nothing happens in the span.
    """
    check_labels(simulated, labels)
    options = options or GanttOptions()
    end_s = simulated.latency_s if options.end_s is None else options.end_s
    if options.start_s >= simulated.latency_s:
        raise SpecError(
            f"the picture starts at {options.start_s:g} s, but the batch ends after "
            f"{simulated.latency_s:g} s; start earlier"
        )
    view = _View(options.start_s, end_s, options.width)
    height = len(labels) * ROW_HEIGHT + AXIS_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + options.width + 20}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for stage, label in enumerate(labels):
        lines += _row(simulated, stage, label, view)
    lines += [*_axis(view, len(labels) * ROW_HEIGHT), "</svg>"]
    return "\n".join(lines) + "\n"


def write_gantt(
    path: str | Path,
    simulated: Simulated,
    labels: Sequence[str],
    options: GanttOptions | None = None,
) -> None:
    """Write `gantt_svg` to `path`; raises InputError where that is not possible."""
    write_text(Path(path), gantt_svg(simulated, labels, options))


@dataclass(frozen=True)
class _View:
    """Maps seconds to pixels."""

    start_s: float
    end_s: float
    width: int

    def pixel(self, at_s: float) -> float:
        share = (at_s - self.start_s) / (self.end_s - self.start_s)
        return min(max(share, 0.0), 1.0) * self.width


def _row(simulated: Simulated, stage: int, label: str, view: _View) -> Iterator[str]:
    top = stage * ROW_HEIGHT + 4
    share = f"{simulated.busy_share[stage]:.0%} busy"
    yield f'<text x="4" y="{top + 13}">{escape(f"{stage}: {label}")}<title>{share}</title></text>'
    starts, ends = simulated.stage_start_s[:, stage], simulated.stage_end_s[:, stage]
    for bar in _bars(simulated.passes, starts.tolist(), ends.tolist(), view):
        yield _rectangle(bar, top, BAR_HEIGHT)
    starts, ends = simulated.link_start_s[:, stage], simulated.link_end_s[:, stage]
    for bar in _bars(simulated.passes, starts.tolist(), ends.tolist(), view):
        link = _Bar(bar.left, bar.right, LINK_COLOUR, f"transfer of {bar.title}")
        yield _rectangle(link, top + BAR_HEIGHT + 1, LINK_HEIGHT)


def _bars(
    passes: Sequence[Pass], starts: Sequence[float], ends: Sequence[float], view: _View
) -> Iterator[_Bar]:
    """Yield bars in order of time; a bar narrower than a pixel joins a neighbour it touches."""
    waiting: _Bar | None = None
    for each, start_s, end_s in zip(passes, starts, ends, strict=True):
        if end_s <= view.start_s or start_s >= view.end_s or end_s <= start_s:
            continue
        left, right = view.pixel(start_s), view.pixel(end_s)
        shades = COLOURS[each.phase]
        title = f"{each.phase} {each.index}, step {each.step}: {start_s:.6g} to {end_s:.6g} s"
        bar = _Bar(left, right, shades[each.index % len(shades)], title)
        if waiting is None:
            waiting = bar
        elif bar.right - waiting.left < 1 and bar.left - waiting.right < 0.5:
            title = waiting.title.removesuffix(MORE) + MORE
            waiting = _Bar(waiting.left, bar.right, waiting.colour, title)
        else:
            yield waiting
            waiting = bar
    if waiting is not None:
        yield waiting


def _rectangle(bar: _Bar, top: int, height: int) -> str:
    return (
        f'<rect x="{LABEL_WIDTH + bar.left:.2f}" y="{top}" width="{bar.right - bar.left:.2f}" '
        f'height="{height}" fill="{bar.colour}"><title>{escape(bar.title)}</title></rect>'
    )


def _axis(view: _View, top: int) -> Iterator[str]:
    right = LABEL_WIDTH + view.width
    yield f'<line x1="{LABEL_WIDTH}" y1="{top}" x2="{right}" y2="{top}" stroke="black"/>'
    for tick in range(TICKS + 1):
        x = LABEL_WIDTH + view.width * tick / TICKS
        at_s = view.start_s + (view.end_s - view.start_s) * tick / TICKS
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 5}" stroke="black"/>'
        yield f'<text x="{x:.1f}" y="{top + 19}" text-anchor="middle">{at_s:.4g} s</text>'
    colours = [(COLOURS[phase][1], f"{phase} micro-batches") for phase in COLOURS]
    for index, (colour, text) in enumerate([*colours, (LINK_COLOUR, "transfers to the next")]):
        x = LABEL_WIDTH + 180 * index
        yield f'<text x="{x}" y="{top + 40}" fill="{colour}">{text}</text>'
