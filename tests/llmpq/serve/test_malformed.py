"""Requests of any content are answered or refused, and disturb no other."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.serve.bodies import ChatBody, CompletionBody
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    JSON,
    RESPONSES,
    chat,
    client_of,
    completion,
    error_of,
    service_of,
)
from tests.llmpq.serve.pretend_engine import PretendEngine

FIELDS = sorted(
    {
        *CompletionBody.model_fields,
        *ChatBody.model_fields,
        "suffix",
        "echo",
        "input",
        "text",
        "store",
    }
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2**31, 2**53, 2**63, 10**400, -1, 1e308])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(
        ["pretend", "user", "text", "function", "reasoning", "required", "\ud800", "\0"]
    )
)
KEYS = st.sampled_from(["role", "content", "type", "text", "format", "name", "97"]) | st.text(
    max_size=3
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
BASES = {COMPLETIONS: completion(), CHAT: chat(), RESPONSES: {"model": "pretend", "input": "Hello"}}
CHANGES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), VALUES, max_size=3)


@settings(max_examples=40)
@given(st.sampled_from([COMPLETIONS, CHAT, RESPONSES]), CHANGES, st.booleans())
def test_any_fields(path: str, changes: dict[str, object], is_streamed: bool) -> None:
    """Beside a request that goes on meanwhile, and ends as if nothing had happened."""

    async def scenario() -> None:
        engine = PretendEngine(hold_after=1)
        async with client_of(service_of(engine)) as client:
            other = asyncio.create_task(client.post(COMPLETIONS, json=completion()))
            while not engine.is_holding:
                await asyncio.sleep(0)
            engine.hold_after = None
            base = BASES[path]
            content = json.dumps({**base, "stream": is_streamed, **changes}).encode()
            response = await client.post(path, content=content, headers=JSON)
            assert response.status_code in (200, 400, 404)
            if response.status_code != 200:
                error_of(response)
            assert len(engine.live) == 1
            engine.go_on.set()
            assert (await other).json()["choices"][0]["text"] == "Hello"
            assert not engine.live

    asyncio.run(scenario())


@settings(max_examples=60)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0e-.\\u', max_size=12).map(str.encode))
def test_any_bytes(content: bytes) -> None:
    async def scenario() -> None:
        async with client_of(service_of(PretendEngine())) as client:
            response = await client.post(CHAT, content=content, headers=JSON)
            assert response.status_code == 400
            error_of(response)

    asyncio.run(scenario())
