"""Who is let in: by the key, by the name of the server, and by the length of the queue."""

from __future__ import annotations

import asyncio

import pytest

from llmpq.serve.engine import (
    QueueState,
)
from llmpq.serve.options import ServeOptions
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    KEY,
    LOCKED,
    ask,
    client_of,
    completion,
    error_of,
    run,
    service_of,
)
from tests.llmpq.serve.pretend_engine import PretendEngine


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
        service = service_of(engine, ServeOptions(queue_limit=1))
        async with client_of(service) as client:
            first = asyncio.create_task(client.post(COMPLETIONS, json=completion(n=2)))
            while len(engine.live) < 2:
                await asyncio.sleep(0)
            refused = await client.post(COMPLETIONS, json=completion())
            engine.go_on.set()
            after = [await first, await client.post(COMPLETIONS, json=completion(n=2))]
            return [response.status_code for response in (refused, *after)]

    assert run(scenario) == [429, 200, 200]
