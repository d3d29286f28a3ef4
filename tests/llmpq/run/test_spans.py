"""Spans of requests as OpenTelemetry's own exporter gets them, by clocks that stand still."""

from __future__ import annotations

import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.messages import Finished, Request, Sampling
from actors.processes.request_log import PhaseTimes
from llmpq import Plan
from llmpq.run.engine import CheckedModel
from llmpq.run.options import RunOptions
from llmpq.run.spans import RequestTracer, _OneWarning, open_tracer
from quant.common.errors import SpecError

WALL_S = 1.7e9


class Exported:
    """A tracer by whose clock `now_s` it is, and the spans that it has made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracer = RequestTracer(self.provider, lambda: self.now_s, lambda: WALL_S)

    @property
    def spans(self) -> list[Any]:
        return list(self.memory.get_finished_spans())

    def told(self) -> list[tuple[str, float, float, dict[str, Any]]]:
        """Name, seconds from and to, and attributes of each span."""
        return [
            (
                each.name,
                each.start_time / 1e9 - WALL_S,
                each.end_time / 1e9 - WALL_S,
                dict(each.attributes),
            )
            for each in self.spans
        ]


@pytest.fixture
def exported() -> Exported:
    return Exported()


def group_of(*stages: dict[str, Any]) -> Any:
    """A group of stages that know this of requests."""
    plan = SimpleNamespace(stages=[SimpleNamespace(label=f"gpu{n}") for n in range(len(stages))])
    observer = SimpleNamespace(
        take_requests=lambda names: tuple(
            {name: found[name] for name in names if name in found} for found in stages
        )
    )
    return SimpleNamespace(plan=plan, observer=observer)


def test_a_row_is_a_trace_over_all_stages(exported: Exported) -> None:
    tracer = exported.tracer
    request = Request("a", (1, 2, 3), 5, Sampling())
    exported.now_s = 10.0
    assert list(tracer.submitting([None, request])) == [None, request]
    exported.now_s = 20.0
    first = {"a": {"prefill": PhaseTimes(12, 13, 1, 1, 3), "decode": PhaseTimes(14, 18, 2, 4, 4)}}
    last = {"a": {"prefill": PhaseTimes(13, 14, 1, 1, 3), "decode": PhaseTimes(15, 19, 1, 4, 4)}}
    with tracer.following(group_of(first, last)):
        tracer.rows([Finished("a", (7, 8), "length")])
    assert [(name, round(a, 3), round(b, 3)) for name, a, b, _ in exported.told()] == [
        ("row", 10, 20),
        ("queue", 10, 12),
        ("prefill", 12, 13),
        ("decode", 14, 18),
        ("prefill", 13, 14),
        ("decode", 15, 19),
    ]
    row, queue, *_, decode = exported.spans
    assert dict(row.attributes) == {
        "llmpq.custom_id": "a",
        "gen_ai.usage.output_tokens": 2,
        "llmpq.outcome": "length",
    }
    assert dict(decode.attributes) == {
        "llmpq.stage": 1,
        "llmpq.device": "gpu1",
        "llmpq.busy_s": 1,
        "llmpq.micro_batches": 4,
        "llmpq.tokens": 4,
    }
    assert row.parent is None
    assert queue.parent.span_id == decode.parent.span_id == row.context.span_id
    assert {each.context.trace_id for each in exported.spans} == {row.context.trace_id}


def test_a_row_whose_stages_are_gone_has_its_own_span(exported: Exported) -> None:
    """Of a stage that was started again, and of none at all."""
    with exported.tracer.following(group_of({}, {})):
        exported.tracer.rows([Finished("a", (), "error", "not finite")])
    exported.tracer.rows([Finished("b", (1,), "stop")])
    exported.tracer.close()
    assert [name for name, *_ in exported.told()] == ["row", "row"]


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://host/x", "http://", "file:///x"])
def test_what_is_no_collectors_address_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="give the address of a collector"):
        open_tracer(url, "model")


def test_a_collector_that_does_not_answer_is_told_of_once() -> None:
    log = logging.Logger("exporter")
    log.addHandler(_OneWarning("http://host:4318/v1/traces"))
    log.warning("retrying")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            log.error("down")
    (one,) = told
    assert "http://host:4318/v1/traces does not take spans (down)" in str(one.message)


def test_without_the_extra_it_says_what_to_install(
    one_stage: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SpecError, match=r"pip install 'llmpq\[otel\]'"):
        CheckedModel(one_stage.spec, RunOptions(trace_to="http://localhost:4318"))
