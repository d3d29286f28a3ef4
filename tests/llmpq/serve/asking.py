"""Asking the application in one process, and reading what it answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx2

from llmpq.serve.options import ServeOptions
from llmpq.serve.server import Server, application
from llmpq.serve.service import Service
from tests.llmpq.serve.pretend_engine import PretendEngine

KEY = "a-key-of-sixteen-or-more"
OPTIONS = ServeOptions()
LOCKED = ServeOptions(api_key=KEY)
JSON = {"content-type": "application/json"}
NOW_S = 1_750_000_000
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ENDLESS_S = 300.0
"""No scenario takes so long, however slow the machine is."""

SMALL_BYTES = 4096
"""Of socket buffers, so that little is sent unread."""

Result = TypeVar("Result")


def client_of(service: Service) -> httpx2.AsyncClient:
    """A client of an application in this event loop."""
    transport = httpx2.ASGITransport(application(service))
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost")


def service_of(engine: PretendEngine, options: ServeOptions = OPTIONS) -> Service:
    """A service whose clock stands still."""
    return Service(engine, options, clock=lambda: NOW_S + 0.5)


def ask(
    path: str,
    body: object = None,
    engine: PretendEngine | None = None,
    options: ServeOptions = OPTIONS,
    **more: Any,
) -> httpx2.Response:
    """The answer to one request; without a body it is a GET."""

    async def once() -> httpx2.Response:
        async with client_of(service_of(engine or PretendEngine(), options)) as client:
            if body is None and "content" not in more:
                return await client.get(path, **more)
            if body is not None:
                more["content"] = json.dumps(body).encode()
                more["headers"] = {**JSON, **more.get("headers", {})}
            return await client.post(path, **more)

    return asyncio.run(once())


def run(scenario: Callable[[], Awaitable[Result]]) -> Result:
    """Run `scenario` in an event loop; one that waits for what does not come is ended."""

    async def bounded() -> Result:
        async with asyncio.timeout(ENDLESS_S):
            return await scenario()

    return asyncio.run(bounded())


def completion(**fields: object) -> dict[str, object]:
    """A body of `/v1/completions`."""
    return {"model": "pretend", "prompt": "Hello", **fields}


def chat(**fields: object) -> dict[str, object]:
    """A body of `/v1/chat/completions`."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "pretend", "messages": messages, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must be framed exactly and end with `[DONE]`."""
    *frames, after = text.split("\n\n")
    assert after == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    contents = [frame.removeprefix("data: ") for frame in frames]
    assert contents.pop() == "[DONE]"
    return [json.loads(content) for content in contents]


def error_of(response: httpx2.Response) -> Mapping[str, Any]:
    """The error of an answer, which has OpenAI's form."""
    content = response.json()
    assert list(content) == ["error"]
    assert list(content["error"]) == ["message", "type", "param", "code"]
    assert content["error"]["message"]
    return content["error"]


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until `holds`."""
    while not holds():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(engine: PretendEngine, **options: object) -> AsyncIterator[Server]:
    """A server of `engine` on a free port, which is asked to end afterwards."""
    server = Server(service_of(engine, ServeOptions(**{"port": 0, "drain_s": 5.0, **options})))
    running = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    for listening in server.servers[0].sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
    try:
        yield server
    finally:
        server.should_exit = True
        await running


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.bound_port}"
