"""What cannot be served is refused in OpenAI's form, with the field and the remedy."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from llmpq.serve.engine import (
    EngineBusyError,
    EngineStoppingError,
    GenerationError,
    QueueState,
)
from llmpq.serve.options import ServeOptions
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    JSON,
    ask,
    chat,
    client_of,
    completion,
    error_of,
    events,
    service_of,
)
from tests.llmpq.serve.pretend_engine import LIMITS, PretendEngine

KEY = "a-key-of-sixteen-or-more"
LOCKED = ServeOptions(api_key=KEY)


def shortly(value: object) -> str:
    return ascii(value)[:40]


WRONG_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": 5}, "prompt", "a text, a list of token ids"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": ["a", 5]}, "prompt", "its entry [1]"),
    ({"prompt": [1, "a"]}, "prompt", "token ids are whole numbers"),
    ({"prompt": [1, -1]}, "prompt", "-1 at 1"),
    ({"prompt": [[2**40]]}, "prompt", "token ids"),
    ({"prompt": [300]}, "prompt", "token id 300, the model's vocabulary ends at 256"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": "\0"}, "prompt", "takes no NUL"),
    ({"prompt": ["a", ""]}, "prompt", "no tokens"),
    ({"model": None}, "model", "it must be a text"),
    ({"temperature": "hot"}, "temperature", "'hot': it must be a number"),
    ({"temperature": -1}, "temperature", "0 (greedy) or more"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"top_k": True}, "top_k", "whole number"),
    ({"min_p": 2}, "min_p", "from 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "vocabulary ends at 256"),
    ({"logit_bias": {"3": "x"}}, "logit_bias.3", "it must be a number"),
    ({"seed": 10**30}, "seed", "at most"),
    ({"stop": ["a"] * 5}, "stop", "5 texts, at most 4"),
    ({"stop": [""]}, "stop", "1 to 1000 characters"),
    ({"stop": [1]}, "stop", "a list of texts"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "128"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 101}, "max_tokens", "room for 100 new tokens"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {}}, "stream_options", "unless stream is true"),
    ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
    (
        {"stream": True, "stream_options": {"include_usag": True}},
        "stream_options.include_usag",
        "the nearest is include_usage",
    ),
    ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
    ({"logprobs": True}, "logprobs", "whole number"),
    ({"echo": True}, "echo", "does not repeat the prompt"),
    ({"best_of": 3}, "best_of", "n is 1"),
    ({"suffix": "x"}, "suffix", "only continued"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not enforced"),
    ({"temprature": 1}, "temprature", "the nearest is temperature"),
    ({"zzz": 1}, "zzz", "known are"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG_FIELDS, ids=shortly)
def test_wrong_fields_of_a_completion(fields: dict[str, Any], param: str, words: str) -> None:
    response = ask(COMPLETIONS, completion(**fields))
    error = error_of(response)
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "a list"),
        ({"messages": [5]}, "messages[0]", "an object"),
        ({"messages": [{"content": "x"}]}, "messages", "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"prompt": "x"}, "prompt", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools", "not offered"),
        ({"top_logprobs": 2}, "top_logprobs", "unless logprobs is true"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs", "at most 5"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        ({"max_completion_tokens": 101}, "max_completion_tokens", "room for 100"),
    ],
    ids=shortly,
)
def test_wrong_fields_of_a_chat(fields: dict[str, Any], param: str, words: str) -> None:
    response = ask(CHAT, chat(**fields))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_is_too_long_says_limit_and_length(is_streamed: bool) -> None:
    for prompt, size in (("x" * 201, "201 tokens"), ("x" * 3000, "3000 characters")):
        response = ask(COMPLETIONS, completion(prompt=prompt, stream=is_streamed))
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert size in error["message"]
        assert "200" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, completion(logprobs=0)), (CHAT, chat(logprobs=True))]
)
def test_log_probabilities_that_the_engine_does_not_tell(path: str, body: object) -> None:
    engine = PretendEngine(limits=replace(LIMITS, top_logprobs=None))
    response = ask(path, body, engine)
    assert (response.status_code, error_of(response)["param"]) == (400, "logprobs")


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field(missing: str) -> None:
    body = completion()
    del body[missing]
    error = error_of(ask(COMPLETIONS, body))
    assert (error["param"], error["message"]) == (missing, f"{missing} is missing")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'"a"', b"\xff{}", b'{"a": NaN}', b"[" * 100_000, b"1" * 5000, b"{'a': 1}"],
    ids=lambda each: str(each[:10]),
)
def test_bodies_that_are_no_json_object(content: bytes) -> None:
    response = ask(COMPLETIONS, content=content, headers=JSON)
    assert response.status_code == 400
    assert "the body" in error_of(response)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_media_types(headers: dict[str, str]) -> None:
    response = ask(COMPLETIONS, content=json.dumps(completion()).encode(), headers=headers)
    assert response.status_code == 415
    error_of(response)


def test_a_charset_is_no_other_media_type() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    content = json.dumps(completion()).encode()
    assert ask(COMPLETIONS, content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("says_length", [True, False])
def test_bodies_beyond_the_bound(says_length: bool) -> None:
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b" " * 100

    options = ServeOptions(body_limit_bytes=1000)
    content: Any = b" " * 1001 if says_length else parts()
    response = ask(COMPLETIONS, content=content, headers=JSON, options=options)
    assert response.status_code == 413
    assert "1000 bytes" in error_of(response)["message"]
    assert read < 20


def test_a_body_that_does_not_come() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    options = ServeOptions(body_s=0.01)
    response = ask(COMPLETIONS, content=parts(), headers=JSON, options=options)
    assert response.status_code == 408
    error_of(response)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        KEY,
    ],
)
def test_without_the_key_nothing_is_told(header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path, body in ((COMPLETIONS, completion()), (CHAT, {}), ("/v1/models", None)):
        response = ask(path, body, options=LOCKED, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
        assert KEY not in response.text


def test_with_the_key_and_where_none_is_needed() -> None:
    headers = {"authorization": f"bearer {KEY}"}
    assert ask(COMPLETIONS, completion(), options=LOCKED, headers=headers).status_code == 200
    assert ask("/v1/models", options=LOCKED, headers=headers).status_code == 200
    assert ask("/health", options=LOCKED).status_code == 200
    assert ask("/ready", options=LOCKED).status_code == 200
    assert ask(COMPLETIONS, completion(), headers={"authorization": "any"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_pages_that_lead_their_name_here_are_refused(host: str, status: int) -> None:
    response = ask("/v1/models", headers={"host": host})
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["code"] == "host_not_allowed"
    headers = {"host": host, "authorization": f"Bearer {KEY}"}
    assert ask("/v1/models", headers=headers, options=LOCKED).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, completion(model="gpt-4")), (CHAT, chat(model="gpt-4")), ("/v1/models/x", None)],
)
def test_another_model(path: str, body: object) -> None:
    response = ask(path, body)
    error = error_of(response)
    assert response.status_code == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'pretend'" in error["message"]


def test_other_addresses_and_methods() -> None:
    for path, status in (("/v1/embeddings", 404), ("/docs", 404), (COMPLETIONS, 405)):
        response = ask(path)
        assert response.status_code == status
        error_of(response)


@pytest.mark.parametrize(
    ("queue", "answers", "status"),
    [
        (QueueState(2, 4, 4, 0, 0), 1, 429),
        (QueueState(1, 4, 4, 0, 0), 1, 200),
        (QueueState(1, 4, 4, 0, 0), 2, 429),
        (QueueState(0, 0, 4, 0, 0), 6, 200),
        (QueueState(0, 0, 4, 0, 0), 7, 400),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_full_queue(queue: QueueState, answers: int, status: int, is_streamed: bool) -> None:
    options = ServeOptions(queue_limit=2, retry_after_s=7)
    body = completion(n=answers, stream=is_streamed)
    response = ask(COMPLETIONS, body, PretendEngine(queue=queue), options)
    assert response.status_code == status
    if status == 429:
        assert response.headers["retry-after"] == "7"
        assert error_of(response)["code"] == "rate_limit_exceeded"


def test_answers_under_way_count_for_the_queue_until_they_end() -> None:
    """The engine may not know yet of requests that are being tokenized."""

    async def scenario() -> list[int]:
        engine = PretendEngine(queue=QueueState(0, 0, 1, 0, 0), hold_after=0)
        async with client_of(service_of(engine, ServeOptions(queue_limit=1))) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json=completion(n=2)))
            while len(engine.live) < 2:
                await asyncio.sleep(0)
            refused = await client.post(COMPLETIONS, json=completion())
            engine.go_on.set()
            after = [await first, await client.post(COMPLETIONS, json=completion(n=2))]
            return [response.status_code for response in (refused, *after)]

    assert asyncio.run(scenario()) == [429, 200, 200]


@pytest.mark.parametrize("status", ["loading", "draining", "failed"])
def test_an_engine_that_is_not_ready(status: Any) -> None:
    engine = PretendEngine(status=status)
    response = ask(COMPLETIONS, completion(), engine)
    assert response.status_code == 503
    assert error_of(response)["code"] == "service_unavailable"
    ready = ask("/ready", engine=engine)
    assert (ready.status_code, ready.json()) == (503, {"status": status})
    assert ask("/health", engine=engine).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (EngineBusyError(), 429),
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
