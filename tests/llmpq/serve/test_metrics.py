"""The metrics of a server against the answers that it gave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.messages import Request
from llmpq.serve.engine import GenerationError
from llmpq.serve.metrics import AnswerTimer, ServeMetrics
from llmpq.serve.options import ServeOptions
from llmpq.serve.service import Service
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    JSON,
    KEY,
    LOCKED,
    ask,
    chat,
    client_of,
    completion,
)
from tests.llmpq.serve.pretend_engine import IDLE, PretendEngine

Figures = dict[str, float]


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def figures(text: str) -> Figures:
    """Values by name and labels, as an independent parser reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name.removeprefix('llmpq_serve_')}{{{labels}}}"] = sample.value
    return found


def after(
    requests: list[tuple[str, object]],
    engine: PretendEngine,
    clock: Callable[[], float] = lambda: 0.0,
) -> Figures:
    """The metrics after these requests."""

    async def scenario() -> str:
        service = Service(engine, ServeOptions(), metrics=ServeMetrics(clock=clock))
        async with client_of(service) as client:
            for path, body in requests:
                await client.post(path, content=json.dumps(body).encode(), headers=JSON)
            return (await client.get("/metrics")).text

    return figures(asyncio.run(scenario()))


def test_tokens_answers_and_requests_are_counted() -> None:
    asked = [
        (COMPLETIONS, completion(n=2)),  # "Hello" twice, each with an end token
        (COMPLETIONS, completion(max_tokens=2, stream=True)),
        (CHAT, chat(stop="H", stream=True)),  # "user: Hello\n" up to its seventh character
        (COMPLETIONS, completion(max_tokens=0)),
        ("/v1/secret", {}),
    ]
    found = after(asked, PretendEngine())
    assert found["tokens_total{of=prompts}"] == 5 + 5 + 12
    assert found["tokens_total{of=answers}"] == 2 * 6 + 2 + 7
    assert found["answers_total{outcome=stop}"] == 3
    assert found["answers_total{outcome=length}"] == 1
    assert found["requests_total{address=/v1/completions,status=200}"] == 2
    assert found["requests_total{address=/v1/completions,status=400}"] == 1
    assert found["requests_total{address=/v1/chat/completions,status=200}"] == 1
    assert found["requests_total{address=other,status=404}"] == 1
    assert found["first_token_seconds_count{}"] == 4
    assert not any("secret" in name for name in found)


def test_times_count_from_the_arrival_of_the_body() -> None:
    """0.3 s until the first token, which is at hand when the body has come, and 0.4 s for each
    other one: by the clock that the answer itself moves.
    """
    clock = Clock()

    class Timed(PretendEngine):
        async def generate(self, request: Request):
            clock.now_s += 0.3 - 0.4
            async for event in super().generate(request):
                clock.now_s += 0.4
                yield event

    found = after([(COMPLETIONS, completion())], Timed(), clock)
    assert found["first_token_seconds_sum{}"] == pytest.approx(0.3)
    assert found["output_token_seconds_sum{}"] == pytest.approx(0.4)
    assert found["answer_seconds_sum{}"] == pytest.approx(0.3 + 5 * 0.4)
    assert found["first_token_seconds_bucket{le=0.2}"] == 0
    assert found["first_token_seconds_bucket{le=0.5}"] == 1


def test_failures_and_clients_that_go_are_told_apart() -> None:
    failing = PretendEngine(fault=GenerationError("gone"), fault_after=1)
    found = after([(COMPLETIONS, completion(stream=True))], failing)
    assert found["answers_total{outcome=error}"] == 1
    assert found["first_token_seconds_count{}"] == 1
    assert found["answer_seconds_count{}"] == 0
    seen: list[AnswerTimer] = []
    with AnswerTimer(seen.append, Clock(), None) as timer:
        timer.note_token()
    assert [(each.outcome, each.tokens) for each in seen] == [("cancelled", 1)]


def test_the_load_is_that_of_the_engine() -> None:
    engine = PretendEngine(queue=replace(IDLE, waiting=3, running=2, kv_tokens_used=70))
    found = after([], engine)
    assert found["answers_under_way{state=waiting}"] == 3
    assert found["answers_under_way{state=running}"] == 2
    assert found["kv_tokens{state=used}"] == 70
    assert found["kv_tokens{state=all}"] == 1000


def test_metrics_need_the_key_and_tell_no_text() -> None:
    assert ask("/metrics", options=LOCKED).status_code == 401
    answer = ask("/metrics", options=LOCKED, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert ask("/metrics", headers={"host": "elsewhere.example"}).status_code == 403
