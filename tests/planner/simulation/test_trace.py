"""Traces read back with a JSON and an XML parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.costs.pass_times import PassSeconds
from planner.schedule.passes import Pass
from planner.simulation.pictures import (
    LABEL_WIDTH,
    GanttOptions,
    chrome_trace,
    gantt_svg,
    write_chrome_trace,
    write_gantt,
)
from planner.simulation.simulation import Simulated, simulate
from planner.workload import MicroBatches, Workload
from quant.common.errors import InputError, SpecError

LABELS = ("node0/T4:0", "node1/<V100> & more")
SVG = "{http://www.w3.org/2000/svg}"


def simulated(new_tokens: int = 4, scale: float = 1.0) -> Simulated:
    def seconds(each: Pass) -> PassSeconds:
        long = each.phase == "prefill"
        own = (0.5, 0.25) if long else (0.125, 0.0625)
        return PassSeconds(tuple(scale * s * each.requests for s in own), (scale * 0.01, 0.0))

    return simulate(Workload(5, 16, new_tokens), MicroBatches(2, 3), 2, seconds)


def test_chrome_trace_holds_every_computation() -> None:
    run = simulated()
    events = json.loads(chrome_trace(run, LABELS))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    stages = [event for event in complete if event["pid"] == 0]
    links = [event for event in complete if event["pid"] == 1]
    assert len(stages) == 2 * len(run.passes)
    assert len(links) == len(run.passes)  # the way back takes no time
    for stage in range(2):
        mine = [event for event in stages if event["tid"] == stage]
        busy_s = sum(event["dur"] for event in mine) / 1e6
        assert busy_s == pytest.approx(run.busy_share[stage] * run.latency_s)
        ends = [event["ts"] + event["dur"] for event in mine]
        assert all(later["ts"] >= end - 1e-6 for end, later in zip(ends, mine[1:], strict=False))
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(
        run.latency_s * 1e6
    )
    contexts = {e["args"]["context_length"] for e in stages if e["cat"] == "decode"}
    assert contexts == {16, 17, 18}


def test_chrome_trace_names_stages_and_links() -> None:
    events = json.loads(chrome_trace(simulated(), LABELS))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 1] == f"1: {LABELS[1]}"
    assert names[1, 1] == f"1: {LABELS[1]} to {LABELS[0]}"
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["stages", "links"]


def bars(svg: str) -> list[ElementTree.Element]:
    """All rectangles but the background."""
    return ElementTree.fromstring(svg).findall(f"{SVG}rect")[1:]


def test_gantt_shows_every_span_to_scale() -> None:
    run, options = simulated(), GanttOptions(width=10_000)
    svg = gantt_svg(run, LABELS, options)
    found = sorted(
        (float(bar.attrib["x"]) - LABEL_WIDTH, float(bar.attrib["width"])) for bar in bars(svg)
    )
    scale = options.width / run.latency_s
    spans = [
        (start * scale, (end - start) * scale)
        for starts, ends in (
            (run.stage_start_s, run.stage_end_s),
            (run.link_start_s, run.link_end_s),
        )
        for start, end in zip(starts.ravel(), ends.ravel(), strict=True)
        if end > start
    ]
    assert len(found) == len(spans)
    for (left, width), (x, wide) in zip(found, sorted(spans), strict=True):
        assert left == pytest.approx(x, abs=0.01)
        assert width == pytest.approx(wide, abs=0.01)
    labels = [text.text for text in ElementTree.fromstring(svg).findall(f"{SVG}text")]
    assert f"1: {LABELS[1]}" in labels


def test_gantt_joins_what_is_too_narrow_to_see() -> None:
    run = simulated(new_tokens=1500)
    svg = gantt_svg(run, LABELS, GanttOptions(width=300))
    assert len(bars(svg)) < 3 * 300 * 2
    assert len(run.passes) > 2000
    row = [bar for bar in bars(svg) if bar.attrib["y"] in ("4", "7")]  # prefill and decode
    covered = sum(float(bar.attrib["width"]) for bar in row)
    assert covered == pytest.approx(300 * run.busy_share[0], rel=0.02)


def test_gantt_of_a_span_leaves_out_the_rest() -> None:
    run = simulated()
    whole, part = gantt_svg(run, LABELS), gantt_svg(run, LABELS, GanttOptions(0.0, 0.9))
    assert 0 < len(bars(part)) < len(bars(whole))
    assert "decode" not in "".join(re.findall("<title>(.*?)</title>", part))


def test_written_files_are_what_was_made(tmp_path: Path) -> None:
    run = simulated()
    write_chrome_trace(tmp_path / "trace.json", run, LABELS)
    write_gantt(tmp_path / "trace.svg", run, LABELS)
    assert (tmp_path / "trace.json").read_text() == chrome_trace(run, LABELS)
    assert (tmp_path / "trace.svg").read_text() == gantt_svg(run, LABELS)
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    run = simulated()
    with pytest.raises(SpecError, match="1 labels for 2 stages"):
        chrome_trace(run, LABELS[:1])
    with pytest.raises(SpecError, match="is empty"):
        GanttOptions(2.0, 1.0)
    with pytest.raises(SpecError, match="too narrow"):
        GanttOptions(width=3)
    with pytest.raises(SpecError, match="the batch ends"):
        gantt_svg(run, LABELS, GanttOptions(start_s=1e6))
    with pytest.raises(InputError, match="cannot write"):
        write_gantt(tmp_path / "nowhere" / "trace.svg", run, LABELS)
