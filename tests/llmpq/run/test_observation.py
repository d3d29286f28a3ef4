"""Real runs seen while they run: states, a trace file, and metrics scraped from the node."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling
from actors.processes.meter import TelemetryOptions
from actors.processes.observer import ClockOffset, Observer
from actors.recovery.policy import RecoveryEvent
from actors.stage_figures import LayersLoaded
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from llmpq.jobs.journal import ProgressPoint
from llmpq.run.meter import RunMeter, RunState
from llmpq.run.metrics import RunMetrics
from llmpq.run.monitor import LoadingState, monitored
from llmpq.run.spans import RequestTracer
from llmpq.serve.engine import QueueState
from llmpq.serve.metrics import ServeMetrics
from planner.plan.simulate import simulate_plan
from tests.actors.models import random_prompts
from tests.llmpq.conftest import BATCH, EMULATED, NEW_TOKENS, PROMPT_LENGTH, ray_cluster
from tests.llmpq.made_journals import BEGAN, START, died, failed_rows
from tests.llmpq.report.test_dashboard import metrics_in, queries
from tests.llmpq.run.test_spans import Exported

PROMPTS = 12
JOB = "watched"


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Of a Ray that reports metrics every 2 s, in place of 10 s."""
    often = {"metrics_report_interval_ms": 2000}
    with ray_cluster(num_cpus=2, _system_config=often) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def group(local_ray: None, tiny: tuple[Path, Any], plan: Plan) -> Iterator[StageGroup]:
    """Three stages that note all; runs add up."""
    options = GroupOptions(telemetry=TelemetryOptions(JOB, trace=True, requests=True))
    with StageGroup(plan.spec, str(tiny[0]), options) as stages:
        yield stages


def requests() -> list[Request]:
    prompts = random_prompts([1 + i % 16 for i in range(PROMPTS)])
    sampling = Sampling(ignore_eos=True)
    return [Request(str(i), p, NEW_TOKENS, sampling) for i, p in enumerate(prompts)]


def spans_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The run's own, by stage."""
    events = json.loads(path.read_text())["traceEvents"]
    simulated = {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert simulated == {0, 1, 2}
    mine = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    return {stage: [e for e in mine if e["tid"] == stage] for stage in range(3)}


def test_a_trace_holds_every_micro_batch_of_every_stage(
    group: StageGroup, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes have the clock of this machine, of which no ping is sure."""
    monkeypatch.setattr(Observer, "_ping", lambda *_: ClockOffset(0.0, 0.0))
    path, states = tmp_path / "trace.json", list[RunState]()
    meter = RunMeter(PROMPTS, PROMPTS * NEW_TOKENS)
    with monitored(group, plan.spec, meter, [states.append], path):
        for finished in group.generate(requests()):
            for each in finished:
                meter.end(len(each.token_ids), NEW_TOKENS)
        figures = group.observer.figures()
    assert figures is not None
    meter.add(figures)
    stages = spans_of(path)
    for stats, spans in zip(figures, stages.values(), strict=True):
        computed = _computed(spans)
        assert len(computed) == stats.micro_batches > 2 * NEW_TOKENS
        assert sum(e["args"]["tokens"] for e in computed) == (
            stats.prefill_tokens + stats.decode_tokens
        )
        assert sum(e["dur"] for e in computed) / 1e6 <= stats.busy_s + 1e-6
        ends = [e["ts"] + e["dur"] for e in spans]
        assert all(b["ts"] >= end - 1e-3 for end, b in zip(ends, spans[1:], strict=False))
    for before, after in ((0, 1), (1, 2)):
        pairs = list(zip(_computed(stages[before]), _computed(stages[after]), strict=True))
        assert all(a["name"] == b["name"] for a, b in pairs)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairs), "causality"
    state = meter.state()
    assert state.tokens == figures[-1].sampled_tokens >= PROMPTS * NEW_TOKENS
    assert state.prompts == PROMPTS
    assert state.queue is not None
    assert (state.queue.waiting, state.queue.in_slots, state.queue.micro_batches) == (0, 0, 0)
    assert all(0 < share <= 1 for share in state.whole_busy_share)


def _computed(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in spans if e["cat"] in ("prefill", "decode")]


def test_a_loaded_plan_is_simulated_as_while_planning(
    tiny: tuple[Path, Any], tmp_path: Path
) -> None:
    """Stages of emulated devices hold modelled times for every micro-batch."""
    path = tmp_path / "cluster.yaml"
    path.write_text(EMULATED.replace("time_scale: 0", "time_scale: 0.5"))
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    plan = Cluster.from_yaml(path).plan(tiny[0], workload, dtype="float32", bits=[16])
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").spec
    expected_s = 0.5 * plan.predicted.latency_s
    assert simulate_plan(loaded).latency_s == pytest.approx(expected_s, rel=1e-9)


def test_a_run_that_is_interrupted_leaves_a_trace(
    group: StageGroup, plan: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"

    def interrupted() -> None:
        with monitored(group, plan.spec, RunMeter(None, None), [], path):
            next(group.generate(requests()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(_computed(spans) for spans in spans_of(path).values())


def scraped_names() -> dict[str, set[str]]:
    """The names of the node's metrics of llmpq, as Prometheus sees them, with their labels."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, set[str]] = {}
    for line in (each for each in lines if each.startswith("ray_llmpq_")):
        name, _, rest = line.partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return found


def test_every_stage_tells_what_it_did_for_each_request(
    group: StageGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of a request pass every stage, its prompt first, and the first stage before the
    last one; what was asked for is forgotten. All processes have the clock of this machine.
    """
    monkeypatch.setattr(Observer, "_ping", lambda *_: ClockOffset(0.0, 0.0))
    group.observer.align()
    asked = requests()
    began_s = time.perf_counter()
    assert sum(len(finished) for finished in group.generate(asked)) == PROMPTS
    ended_s = time.perf_counter()
    names = [each.custom_id for each in asked]
    stages = group.observer.take_requests(names)
    assert len(stages) == 3
    for times in stages:
        assert list(times) == names
        for request in asked:
            prefill, decode = (times[request.custom_id][phase] for phase in ("prefill", "decode"))
            assert prefill.tokens == len(request.prompt_ids)
            assert decode.tokens == decode.micro_batches == NEW_TOKENS - 1
            span_s = decode.ended_s - decode.began_s
            assert 0 < decode.busy_s <= span_s + 1e-6
            assert began_s <= prefill.began_s <= prefill.ended_s <= decode.began_s
            assert decode.ended_s <= ended_s
    first, *_, last = stages
    assert all(first[n]["prefill"].began_s < last[n]["prefill"].began_s for n in names)
    assert group.observer.take_requests(names) == ({}, {}, {})


def test_a_run_makes_a_trace_of_each_row(
    one_stage: Plan, monkeypatch: pytest.MonkeyPatch, local_ray: None
) -> None:
    monkeypatch.setattr(Observer, "_ping", lambda *_: ClockOffset(0.0, 0.0))
    exported = Exported()
    tracer = RequestTracer(exported.provider)
    monkeypatch.setattr("llmpq.run.spans.open_tracer", lambda url, model: tracer)
    prompts = [list(each.prompt_ids) for each in requests()[:3]]
    results = list(one_stage.run(prompts, trace_to="http://localhost:4318", ignore_eos=True))
    found: dict[int, dict[str, Any]] = {}
    for span in exported.spans:
        found.setdefault(span.context.trace_id, {})[span.name] = span
    assert len(found) == len(results) == 3
    ids = {spans["row"].attributes["llmpq.custom_id"] for spans in found.values()}
    assert ids == {result.custom_id for result in results}
    for spans in found.values():
        assert set(spans) == {"row", "queue", "prefill", "decode"}
        assert spans["decode"].attributes["llmpq.tokens"] == NEW_TOKENS - 1
        row = spans["row"]
        begins, ends = zip(*((s.start_time, s.end_time) for s in spans.values()), strict=True)
        assert (row.start_time, row.end_time) == (min(begins), max(ends))


def test_prometheus_gets_what_the_dashboard_shows(group: StageGroup) -> None:
    """Driver, stages and server tell all that its queries name, under the same labels."""
    assert sum(len(finished) for finished in group.generate(requests())) == PROMPTS
    told, served = RunMetrics("driver"), ServeMetrics("served")
    served.count_request("/v1/completions", "200")
    served.count_prompts(3)
    served.count_event(RecoveryEvent("died", 0, 0.5, "stage 0 died"))
    with served.timer(served.clock()) as timer:
        timer.note_token()
        timer.note_token()
        timer.outcome = "stop"
    rare = {"ray_llmpq_outgrown_reservations_total", "ray_llmpq_shared_prompt_tokens_total"}
    named = [each for query in queries() for each in metrics_in(query).items()]
    wanted = {name: labels for name, labels in named if name not in rare}
    entries = (START, died(BEGAN), failed_rows(BEGAN, 2), ProgressPoint(BEGAN, 1, 2, 3, 4, 5))
    deadline = time.monotonic() + 300
    found: dict[str, set[str]] = {}
    while any(not labels <= found.get(name, set()) for name, labels in wanted.items()):
        for entry in entries:
            told.note(entry)  # what is told before Ray's agent has begun is forgotten
        served.observe(QueueState(0, 0, 1, 0, 1))
        assert time.monotonic() < deadline, {n: (wanted[n], found.get(n)) for n in wanted}
        time.sleep(0.1)
        found = scraped_names()


def scraped(job: str) -> dict[tuple[str, str, str, str], float]:
    """Values of the node's metrics by name, stage, phase, and state or kind."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("ray_llmpq_") and f'run="{job}"' in line:
            name, rest = line.split("{", 1)
            tags = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            kind = tags.get("state", tags.get("kind", tags.get("le", "")))
            value = float(line.rpartition(" ")[2])
            key = name.removeprefix("ray_llmpq_"), tags["stage"], tags.get("phase", ""), kind
            found[key] = value
    return found


def test_prometheus_gets_the_figures_of_every_stage(group: StageGroup, plan: Plan) -> None:
    """Scraped from the metrics port of the node, as Prometheus does."""
    assert sum(len(finished) for finished in group.generate(requests())) == PROMPTS
    stats = group.observer.figures()
    expected: dict[tuple[str, str, str, str], float] = {
        ("requests", "0", "", "waiting"): 0,
        ("requests", "0", "", "in_slots"): 0,
        ("kv_slots", "0", "", "all"): plan.workload.global_batch,
        ("micro_batches_under_way", "0", "", ""): 0,
    }
    for stage, each in enumerate(map(str, range(3))):
        told = stats[stage]
        expected["held_bytes", each, "", "weights"] = told.weight_bytes
        expected["held_bytes", each, "", "kv_cache"] = told.kv_cache_bytes
        for phase, work in (("prefill", told.prefill), ("decode", told.decode)):
            expected["tokens_total", each, phase, ""] = work.tokens
            expected["micro_batches_total", each, phase, ""] = work.micro_batches
            expected["micro_batch_seconds_count", each, phase, ""] = work.micro_batches
            expected["busy_seconds_total", each, phase, ""] = pytest.approx(work.seconds, rel=1e-6)
    sampling, other = ("0", "2") if plan.spec.head_on_first else ("2", "0")
    for phase, work in (("prefill", stats[2].prefill), ("decode", stats[2].decode)):
        expected["generated_tokens_total", sampling, phase, ""] = work.requests
    deadline = time.monotonic() + 300
    found = scraped(JOB)
    while any(found.get(key) != value for key, value in expected.items()):
        assert time.monotonic() < deadline, {k: (found.get(k), v) for k, v in expected.items()}
        time.sleep(0.1)
        found = scraped(JOB)
    assert ("generated_tokens_total", other, "decode", "") not in found, "not sampled there"


def test_stages_tell_how_many_layers_they_have_loaded(group: StageGroup, plan: Plan) -> None:
    told = group.observer.loading()
    wanted = [LayersLoaded("weights", len(s.layers), len(s.layers)) for s in plan.spec.stages]
    assert list(told) == wanted
    state = LoadingState.of(told, sum(len(stage.layers) for stage in plan.spec.stages))
    assert state.done == state.layers > 0
