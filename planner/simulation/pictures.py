"""A simulated batch as a Chrome trace, which Perfetto opens too, and as a Gantt picture (SVG)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from planner.schedule.passes import Pass
from planner.scheduling import Phase
from planner.simulation.simulation import Simulated
from quant.common.errors import SpecError
from quant.common.files import write_text

MICROSECONDS = 1e6  # Chrome's trace format counts in them
STAGES_PROCESS, LINKS_PROCESS = 0, 1
SHOWN_FIGURES = ("step", "requests", "tokens", "context_length")


def chrome_trace(simulated: Simulated, labels: Sequence[str]) -> str:
    """A simulated batch as Chrome's trace JSON; SpecError unless `labels` has one a stage."""
    check_labels(simulated, labels)
    events = simulated_events(simulated, labels)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def simulated_events(
    simulated: Simulated, labels: Sequence[str], title: str = "", first_process: int = 0
) -> list[dict[str, object]]:
    """Chrome's events of a batch: two processes from `first_process` on, named with `title`."""
    hops = [f"{label} to {labels[(j + 1) % len(labels)]}" for j, label in enumerate(labels)]
    return [
        *named_tracks(first_process + STAGES_PROCESS, f"{title} stages".strip(), labels),
        *named_tracks(first_process + LINKS_PROCESS, f"{title} links".strip(), hops),
        *_complete_events(simulated, first_process),
    ]


def write_chrome_trace(path: str | Path, simulated: Simulated, labels: Sequence[str]) -> None:
    write_text(Path(path), chrome_trace(simulated, labels))


def named_tracks(process: int, name: str, labels: Sequence[str]) -> Iterator[dict[str, object]]:
    """Chrome's events that name a process and, in this order, its threads."""
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for thread, label in enumerate(labels):
        where: dict[str, object] = {"ph": "M", "pid": process, "tid": thread}
        yield {"name": "thread_name", **where, "args": {"name": f"{thread}: {label}"}}
        yield {"name": "thread_sort_index", **where, "args": {"sort_index": thread}}


def span(
    track: tuple[int, int], name: str, category: str, start_s: float, end_s: float
) -> dict[str, object]:
    """Chrome's event of what lasts some time on a `track`, process and thread."""
    process, thread = track
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
    }


def _complete_events(simulated: Simulated, first_process: int) -> Iterator[dict[str, object]]:
    spans = (
        (STAGES_PROCESS, simulated.stage_start_s.tolist(), simulated.stage_end_s.tolist()),
        (LINKS_PROCESS, simulated.link_start_s.tolist(), simulated.link_end_s.tolist()),
    )
    for process, starts, ends in spans:
        for each, begins, finishes in zip(simulated.passes, starts, ends, strict=True):
            for stage, (start_s, end_s) in enumerate(zip(begins, finishes, strict=True)):
                if process == STAGES_PROCESS or end_s > start_s:
                    track, name = (first_process + process, stage), f"{each.phase} {each.index}"
                    details = {figure: getattr(each, figure) for figure in SHOWN_FIGURES}
                    yield span(track, name, each.phase, start_s, end_s) | {"args": details}


def check_labels(simulated: Simulated, labels: Sequence[str]) -> None:
    if len(labels) != simulated.stages:
        raise SpecError(
            f"{len(labels)} labels for {simulated.stages} stages; give one name for each stage"
        )


# Prefill blue, decode orange, each in shades that tell neighbouring micro-batches apart.
COLOURS = {
    "prefill": ("#1f4e79", "#2e75b6", "#5b9bd5", "#9dc3e6"),
    "decode": ("#843c0c", "#c55a11", "#ed7d31", "#f4b183"),
}

DARK_COLOURS = {
    "prefill": ("#3f7cb8", "#5b9bd5", "#8bbbe8", "#bcdcf7"),
    "decode": ("#b8601f", "#ed7d31", "#f4a26a", "#f9cba8"),
}

LINK_COLOUR = "#7f7f7f"

LABEL_WIDTH, ROW_HEIGHT, LINK_HEIGHT = 190, 30, 4

# Decode is lower than prefill too, for those to whom blue and orange look alike.
BAR_HEIGHTS = {"prefill": 18, "decode": 12}
TALLEST = max(BAR_HEIGHTS.values())

_DARK_SHADES = " ".join(
    f".gantt-picture .{phase}{shade} {{ fill: {colour}; }}"
    for phase, colours in DARK_COLOURS.items()
    for shade, colour in enumerate(colours)
)
_STYLE = f"""<style>
.gantt-picture .ground {{ fill: #ffffff; }} .gantt-picture text {{ fill: #1b1f24; }}
.gantt-picture line {{ stroke: #57606a; }}
@media (prefers-color-scheme: dark) {{
  .gantt-picture .ground {{ fill: #1c2026; }} .gantt-picture text {{ fill: #e6e9ee; }}
  .gantt-picture line {{ stroke: #a3acb8; }} .gantt-picture .link {{ fill: #a3acb8; }}
  {_DARK_SHADES}
}}
</style>"""

AXIS_HEIGHT, TICKS = 52, 8

MORE = ", and more"  # in the title of a bar that stands for several


@dataclass(frozen=True)
class GanttOptions:
    """The part of a batch to draw, in `width` pixels; SpecError for an empty or tiny one."""

    start_s: float = 0.0
    end_s: float | None = None
    width: int = 1400

    def __post_init__(self) -> None:
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
    phase: Phase
    shade: int
    title: str


def gantt_svg(
    simulated: Simulated, labels: Sequence[str], options: GanttOptions | None = None
) -> str:
    """An SVG with a row per stage: computations and, below, transfers; those narrower than a pixel
    join, so that files stay small. Raises SpecError unless there is one label a stage, or where
    nothing happens.
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
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_WIDTH + options.width + 30}" '
        f'height="{height}" class="gantt-picture" role="img" '
        f'aria-label="{_described(simulated, labels, view)}" font-family="sans-serif" '
        'font-size="12">',
        _STYLE,
        '<rect width="100%" height="100%" class="ground" fill="#ffffff"/>',
    ]
    for stage, label in enumerate(labels):
        lines += _row(simulated, stage, label, view)
    lines += [*_axis(view, len(labels) * ROW_HEIGHT), "</svg>"]
    return "\n".join(lines) + "\n"


def _described(simulated: Simulated, labels: Sequence[str], view: _View) -> str:
    shares = "; ".join(
        f"stage {stage} {label} {share:.0%}"
        for stage, (label, share) in enumerate(zip(labels, simulated.busy_share, strict=True))
    )
    text = f"what each stage computes from {view.start_s:.4g} to {view.end_s:.4g} s; busy: {shares}"
    return escape(text, {'"': "&quot;"})


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
        height = BAR_HEIGHTS[bar.phase]
        colour, name = COLOURS[bar.phase][bar.shade], f"{bar.phase}{bar.shade}"
        yield _rectangle(bar, (top + (TALLEST - height) // 2, height), colour, name)
    starts, ends = simulated.link_start_s[:, stage], simulated.link_end_s[:, stage]
    for bar in _bars(simulated.passes, starts.tolist(), ends.tolist(), view):
        link = replace(bar, title=f"transfer of {bar.title}")
        yield _rectangle(link, (top + TALLEST + 1, LINK_HEIGHT), LINK_COLOUR, "link")


def _bars(
    passes: Sequence[Pass], starts: Sequence[float], ends: Sequence[float], view: _View
) -> Iterator[_Bar]:
    waiting: _Bar | None = None
    for each, start_s, end_s in zip(passes, starts, ends, strict=True):
        if end_s <= view.start_s or start_s >= view.end_s or end_s <= start_s:
            continue
        left, right = view.pixel(start_s), view.pixel(end_s)
        shade = each.index % len(COLOURS[each.phase])
        title = f"{each.phase} {each.index}, step {each.step}: {start_s:.6g} to {end_s:.6g} s"
        bar = _Bar(left, right, each.phase, shade, title)
        if waiting is None:
            waiting = bar
        elif bar.right - waiting.left < 1 and bar.left - waiting.right < 0.5:
            title = waiting.title.removesuffix(MORE) + MORE
            waiting = replace(waiting, right=bar.right, title=title)
        else:
            yield waiting
            waiting = bar
    if waiting is not None:
        yield waiting


def _rectangle(bar: _Bar, rows: tuple[int, int], colour: str, name: str) -> str:
    top, height = rows
    return (
        f'<rect x="{LABEL_WIDTH + bar.left:.2f}" y="{top}" width="{bar.right - bar.left:.2f}" '
        f'height="{height}" class="{name}" fill="{colour}">'
        f"<title>{escape(bar.title)}</title></rect>"
    )


def _axis(view: _View, top: int) -> Iterator[str]:
    right = LABEL_WIDTH + view.width
    yield f'<line x1="{LABEL_WIDTH}" y1="{top}" x2="{right}" y2="{top}" stroke="#57606a"/>'
    for tick in range(TICKS + 1):
        x = LABEL_WIDTH + view.width * tick / TICKS
        at_s = view.start_s + (view.end_s - view.start_s) * tick / TICKS
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 5}" stroke="#57606a"/>'
        yield f'<text x="{x:.1f}" y="{top + 19}" text-anchor="middle">{at_s:.4g} s</text>'
    words = {"prefill": "prefill micro-batches (tall)", "decode": "decode micro-batches (low)"}
    keys = [(COLOURS[phase][1], f"{phase}1", words[phase]) for phase in COLOURS]
    for index, (colour, name, text) in enumerate([*keys, (LINK_COLOUR, "link", "to the next")]):
        x = LABEL_WIDTH + 210 * index
        swatch = f'<rect x="{x}" y="{top + 30}" width="12" height="12" class="{name}"'
        yield f'<g>{swatch} fill="{colour}"/><text x="{x + 18}" y="{top + 40}">{text}</text></g>'
