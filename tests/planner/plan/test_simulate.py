"""A plan of a job, simulated by its own times, against the times of the latency model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.plan.parts import JobForecast, LatencyForecast
from planner.plan.simulate import (
    FILLS_SHOWN,
    MeasuredStage,
    check_trace_path,
    planned_s,
    run_trace,
    simulate_plan,
)
from planner.schedule.job_passes import job_passes
from planner.scheduling import PolicyOptions, RequestSchedule
from planner.simulation.pictures import gantt_svg
from planner.workload import Job, MicroBatches
from quant.common.errors import InputError
from tests.planner.bounded import FORECAST
from tests.planner.plan.test_plan import made


class _Stage:
    """A stage of a plan, of which only the seconds of a micro-batch are read."""

    modelled = None
    emulated = False
    prefill_s, prefill_comm_s = 0.5, 0.25
    decode_s, decode_comm_s = 0.125, 0.0625
    state_bytes = 0


class _Plan:
    """What the simulation reads of a plan for a job."""

    micro_batches = MicroBatches(2, 4)
    policy = PolicyOptions()
    latency: LatencyForecast | None = None
    time_scale = 0.0
    stages = (_Stage(), _Stage())

    def __init__(self, job: Job) -> None:
        passes = job_passes(job, 8, self.micro_batches, 2)
        self.workload = job.in_flight(8)
        self.job: JobForecast | None = JobForecast(job, 10.0, 10.0, passes)
        self.timed_sizes = passes.prefill_requests * job.computed_tokens, passes.decode_requests


def test_the_first_fills_of_a_job_are_simulated_each_prefill_by_its_tokens() -> None:
    lengths = Lengths((10, 30, 20, 40, 5), (3, 9, 1, 12, 6))
    plan = _Plan(Job(1000, lengths))
    simulated = simulate_plan(cast(Any, plan))
    prefills = [each for each in simulated.passes if each.phase == "prefill"]
    assert sum(each.requests for each in prefills) == FILLS_SHOWN * 8
    prompts, outputs = lengths.rows(FILLS_SHOWN * 8)
    assert sum(each.requests for each in simulated.passes) == outputs.sum()
    mean = plan.job.passes.prefill_requests * lengths.mean_prompt
    assert simulated.busy_s("prefill")[1] == pytest.approx(0.5 * prompts.sum() / mean)
    steps = len(simulated.passes) - len(prefills)
    assert simulated.busy_s("decode")[0] == pytest.approx(0.125 * steps)


def test_a_short_job_is_simulated_whole() -> None:
    plan = _Plan(Job(5, Lengths((10, 30), (3, 9))))
    simulated = simulate_plan(cast(Any, plan))
    outputs = plan.job.job.lengths.rows(5)[1]
    assert sum(each.requests for each in simulated.passes) == outputs.sum()


def test_a_schedule_is_simulated_with_lengths_that_it_is_for() -> None:
    """Three times its requests in flight, with turns of newcomers and three steps between them."""
    plan = _Plan(Job(5, Lengths((10, 30), (3, 9))))
    plan.job = None
    schedule = RequestSchedule("rra", 4, 12, 3, 2, 2, 20.0)
    plan.policy = PolicyOptions("exegpt", schedule=schedule)
    lengths = RequestLengths(
        LengthDistribution.of_sample([10, 20, 30]), LengthDistribution.of_sample([1, 5, 12])
    )
    plan.latency = replace(FORECAST, lengths=lengths)
    simulated = simulate_plan(cast(Any, plan))
    prefills = [each for each in simulated.passes if each.phase == "prefill"]
    assert sum(each.requests for each in prefills) == FILLS_SHOWN * 12
    assert {tokens for each in prefills for tokens in each.prompts} == {10, 20, 30}
    decodes = [each for each in simulated.passes if each.phase == "decode"]
    assert {each.index for each in decodes} == {0, 1}
    assert max(each.step for each in decodes) > 11
    picture = gantt_svg(simulated, ("first", "second"))
    assert picture.startswith("<svg")


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
