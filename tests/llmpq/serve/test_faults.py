"""Faults of the engine and of the server, as clients and logs see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from llmpq.serve.engine import (
    EngineStoppingError,
    GenerationError,
)
from llmpq.serve.service import EventStream
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    KEY,
    LOCKED,
    ask,
    chat,
    completion,
    error_of,
    events,
    run,
)
from tests.llmpq.serve.pretend_engine import PretendEngine


@pytest.mark.parametrize("status", ["loading", "draining", "failed"])
def test_an_engine_that_is_not_ready(status: Any) -> None:
    engine = PretendEngine(status=status)
    response = ask(COMPLETIONS, content=b"never read", engine=engine)
    assert response.status_code == 503
    assert error_of(response)["code"] == "service_unavailable"
    ready = ask("/ready", engine=engine)
    assert (ready.status_code, ready.json()) == (503, {"status": status})
    assert ask("/health", engine=engine).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (EngineStoppingError(), 503),
        (GenerationError("stage 2 is lost"), 500),
        (ValueError("a secret prompt"), 500),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_faults_before_the_first_token(fault: Exception, status: int, is_streamed: bool) -> None:
    engine = PretendEngine(fault=fault)
    response = ask(COMPLETIONS, completion(n=2, stream=is_streamed), engine)
    assert response.status_code == status
    assert "secret" not in response.text
    error_of(response)
    assert not engine.live


def test_faults_in_a_stream_are_its_last_event() -> None:
    engine = PretendEngine(fault=GenerationError("stage 2 is lost"), fault_after=3)
    response = ask(CHAT, chat(stream=True, n=2), engine)
    assert response.status_code == 200
    *before, last = events(response.text)
    assert all("choices" in chunk for chunk in before)
    assert last["error"]["type"] == "server_error"
    assert "stage 2 is lost" in last["error"]["message"]
    assert not engine.live


def test_faults_nobody_expected_are_500(caplog: pytest.LogCaptureFixture) -> None:
    engine = PretendEngine()
    engine.decode = None  # type: ignore[assignment]
    assert ask(COMPLETIONS, completion(), engine).status_code == 500
    engine.encode = None  # type: ignore[method-assign, assignment]
    response = ask(COMPLETIONS, completion(), engine, headers={"x-request-id": "r-1"})
    assert response.status_code == 500
    error_of(response)
    assert "request r-1 failed: TypeError" in caplog.text
    assert "requests.py" in caplog.text


def test_neither_prompts_nor_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"authorization": f"Bearer {KEY}"}
    for engine in (
        PretendEngine(),
        PretendEngine(fault=ValueError("Hello")),
        PretendEngine(fault=GenerationError("x")),
    ):
        for fields in ({}, {"stream": True}, {"temprature": "Hello"}):
            ask(COMPLETIONS, completion(**fields), engine, LOCKED, headers=headers)
            ask(COMPLETIONS, completion(**fields), engine, LOCKED, headers={})
    ours = [record for record in caplog.records if record.name.startswith(("llmpq", "uvicorn"))]
    assert ours
    assert "Hello" not in caplog.text
    assert KEY not in caplog.text
    assert KEY not in repr(LOCKED)


@pytest.mark.parametrize(
    ("given", "is_kept"), [("my-id.1", True), ("a b", False), ("x" * 129, False), ("", False)]
)
def test_every_answer_has_the_id_of_its_request(given: str, is_kept: bool) -> None:
    for path, body in ((COMPLETIONS, completion(stream=True)), (COMPLETIONS, {}), ("/x", None)):
        found = ask(path, body, headers={"x-request-id": given}).headers["x-request-id"]
        assert (found == given) is is_kept
        assert found


def test_a_stream_that_the_system_does_not_cut_off_ends_too() -> None:
    async def scenario() -> bool:
        is_closed = False

        async def endless() -> AsyncGenerator[bytes, None]:
            nonlocal is_closed
            try:
                while True:
                    yield b"data: x\n\n"
            finally:
                is_closed = True

        async def never(message: object = None) -> Any:
            await asyncio.Event().wait()

        await EventStream(endless(), stall_s=0.01)({"type": "http"}, never, never)
        return is_closed

    assert run(scenario)
