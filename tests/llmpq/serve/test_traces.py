"""Traces of requests over HTTP, in the trace that a client names."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from llmpq.serve.options import ServeOptions
from llmpq.serve.service import Service
from tests.llmpq.run.test_spans import Exported
from tests.llmpq.serve.asking import CHAT, COMPLETIONS, JSON, chat, client_of, completion
from tests.llmpq.serve.pretend_engine import PretendEngine

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
JOINED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


def spans_after(path: str, body: Any, headers: dict[str, str]) -> tuple[int, list[Any]]:
    """The status of a request, and the spans that were made of it."""
    exported = Exported()

    async def scenario() -> int:
        service = Service(PretendEngine(), ServeOptions(), tracer=exported.tracer)
        async with client_of(service) as client:
            answer = await client.post(path, content=json.dumps(body), headers=JSON | headers)
            return int(answer.status_code)

    status = asyncio.run(scenario())
    exported.tracer.flush()
    return status, exported.spans


def test_a_request_joins_the_trace_of_its_client() -> None:
    status, spans = spans_after(COMPLETIONS, completion(n=2), JOINED)
    by_name = {each.name: each for each in spans}
    assert status == 200
    assert Counter(each.name for each in spans) == {
        "request": 1, "tokenize": 1, "generate": 2, "text": 2,
    }  # fmt: skip
    root = by_name["request"]
    assert f"{root.parent.span_id:016x}" == SPAN
    assert root.kind.name == "SERVER"
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE}
    assert by_name["tokenize"].parent.span_id == root.context.span_id
    assert by_name["generate"].parent.span_id == root.context.span_id
    generations = {each.context.span_id for each in spans if each.name == "generate"}
    assert {each.parent.span_id for each in spans if each.name == "text"} == generations
    assert by_name["generate"].attributes["gen_ai.usage.output_tokens"] == 6
    assert by_name["generate"].attributes["llmpq.outcome"] == "stop"
    assert root.attributes["gen_ai.request.model"] == completion()["model"]


def test_a_stream_has_the_same_spans_and_without_a_parent_its_own_trace() -> None:
    for headers in ({}, {"traceparent": "no such trace"}):
        status, spans = spans_after(CHAT, chat(stream=True), headers)
        assert status == 200
        assert [each.name for each in spans if each.parent is None] == ["request"]
        assert {each.name for each in spans} == {"request", "tokenize", "generate", "text"}
        assert len({each.context.trace_id for each in spans}) == 1


def test_a_refused_request_says_so_and_is_ended() -> None:
    status, spans = spans_after(COMPLETIONS, completion(max_tokens=10**6), JOINED)
    assert status == 400
    assert [each.name for each in spans] == ["tokenize", "request"]
    assert spans[-1].attributes["error.type"] == "ApiError"
