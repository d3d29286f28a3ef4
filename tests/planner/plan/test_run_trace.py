"""A run's trace read back: its own spans, and the simulated batch beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.plan.run_trace import MeasuredStage, check_trace_path, run_trace
from planner.plan.simulate import planned_s, simulate_plan
from quant.common.errors import InputError
from tests.planner.plan.test_plan import made

PLAN, SIMULATED = made()


def measured(dropped: int = 0, shift_s: float = 0.0) -> MeasuredStage:
    """Three micro-batches: 0.5 s each, the second at once, the third after a wait of 2 s."""
    began_s = 70.0 + shift_s + np.array([0.0, 0.6, 3.1])
    return MeasuredStage(
        began_s=began_s,
        ended_s=began_s + 0.5,
        sent_s=began_s + np.array([0.6, 0.5, 0.5]),
        requests=np.array([3, 2, 5]),
        decode_requests=np.array([0, 0, 5]),
        tokens=np.array([30, 20, 5]),
        context_length=np.array([0, 0, 12]),
        dropped=dropped,
        clock_offset_s=12.0,
        clock_error_s=0.001,
    )


def read(*stages: MeasuredStage | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    content = json.loads(run_trace(PLAN, stages))
    return content["traceEvents"], content["otherData"]


def spans(events: list[dict[str, Any]], process: int, thread: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, thread)]


def test_each_micro_batch_is_a_span_and_none_overlap() -> None:
    events, notes = read(measured(), measured(dropped=4, shift_s=0.25), None)
    for stage in range(2):
        mine = spans(events, 0, stage)
        computed = [e for e in mine if e["cat"] in ("prefill", "decode")]
        assert [e["name"] for e in computed] == ["prefill 0", "prefill 1", "decode 0"]
        ends = [e["ts"] + e["dur"] for e in mine]
        assert all(b["ts"] >= end - 1e-3 for end, b in zip(ends, mine[1:], strict=False))
        assert sum(e["dur"] for e in computed) == pytest.approx(1.5e6)
    names = [(e["name"], e["ts"], e["dur"]) for e in spans(events, 0, 0)]
    assert names[1] == ("send", pytest.approx(0.5e6), pytest.approx(0.1e6))
    assert names[3] == ("wait", pytest.approx(1.1e6), pytest.approx(2.0e6))
    assert spans(events, 0, 1)[0]["name"] == "wait", "for the first stage"
    details = spans(events, 0, 0)[-1]["args"]
    assert (details["requests"], details["tokens"], details["context_length"]) == (5, 5, 12)
    assert details["wait_ms"] == pytest.approx(2000)
    assert notes["stages"][1]["micro_batches_dropped"] == 4
    assert notes["stages"][0]["clock_error_s"] == 0.001
    assert notes["stages"][2] == "did not answer"


def test_mixed_micro_batches_have_a_name_of_their_own() -> None:
    events, _ = read(replace(measured(), decode_requests=np.array([1, 2, 4])))
    computed = [e["name"] for e in spans(events, 0, 0) if e["cat"] in ("mixed", "decode")]
    assert computed == ["mixed 0", "decode 0", "mixed 1"]


def test_the_simulated_batch_lies_beside_the_run() -> None:
    events, _ = read(measured(), measured(), measured())
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "run", 1: "simulated stages", 2: "simulated links"}
    for stage in range(3):
        assert len(spans(events, 1, stage)) == len(SIMULATED.passes)
        assert min(e["ts"] for e in spans(events, 1, 0)) == 0


def test_a_plan_is_simulated_by_its_own_times() -> None:
    """As while planning, but for the context that grows."""
    bare = replace(PLAN, stages=tuple(replace(stage, modelled=None) for stage in PLAN.stages))
    assert simulate_plan(bare).latency_s == pytest.approx(SIMULATED.latency_s, rel=0.05)
    assert simulate_plan(bare).passes == SIMULATED.passes


def test_emulated_devices_are_scaled_and_follow_no_plan_at_scale_zero() -> None:
    def at(scale: float, emulated: bool) -> Any:
        stages = tuple(replace(stage, emulated=emulated) for stage in PLAN.stages)
        return replace(PLAN, time_scale=scale, stages=stages)

    whole_s = simulate_plan(at(0.0, False)).latency_s
    assert simulate_plan(at(0.25, True)).latency_s == pytest.approx(whole_s / 4)
    assert simulate_plan(at(0.0, True)).latency_s == pytest.approx(whole_s)
    stage = PLAN.stages[0]
    held = replace(stage, emulated=True)
    assert planned_s(at(0.25, True), held, "prefill") == pytest.approx(stage.prefill_s / 4)
    assert planned_s(at(0.0, True), held, "decode") == 0
    assert planned_s(at(0.0, True), stage, "decode") == stage.decode_s


def test_a_run_that_did_nothing_has_a_trace_too() -> None:
    events, notes = read(None, None, None)
    assert spans(events, 0, 0) == []
    assert notes["stages"] == ["did not answer"] * 3


def test_a_trace_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    check_trace_path(tmp_path / "trace.json")
    with pytest.raises(InputError, match="a file of its own"):
        check_trace_path(tmp_path / "a" / ".." / "out.jsonl", [tmp_path / "out.jsonl"])
    for path in (tmp_path, tmp_path / "none" / "trace.json", Path()):
        with pytest.raises(InputError, match="cannot write the trace"):
            check_trace_path(path)
