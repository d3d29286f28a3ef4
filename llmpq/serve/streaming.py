"""Answers on their way to a client: server-sent events, and what happens if it goes or stalls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status of a request whose client has gone; it is seen in logs only (nginx's number)."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
T = TypeVar("T")


def event(content: Mapping[str, object]) -> bytes:
    """One server-sent event."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """Sends `events` as fast as the client reads them.

    The status is sent with the first event, so that what is raised before it has an own status.
    `events` is closed at the end, also where the client has gone, or has left an event unread for
    `stall_s` seconds: then the connection ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_s: float) -> None:
        super().__init__(headers=_HEADERS, media_type=self.media_type)
        del self.headers["content-length"]
        self._events = events
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; raises what getting the first one raises."""
        try:
            await _unless_gone(receive, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        is_begun = False
        try:
            async for content in self._events:
                async with asyncio.timeout(self._stall_s):
                    if not is_begun:
                        await send(self._start())
                        is_begun = True
                    await send(_body(content, more=True))
            async with asyncio.timeout(self._stall_s):
                await send(_body(b"", more=False))
        except TimeoutError:
            return  # an answer that is not complete has the server close the connection

    def _start(self) -> dict[str, Any]:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }


def _body(content: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def answer_unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that `work` makes; it is cancelled when the client goes."""
    answer = await _unless_gone(request.receive, work)
    return Response(status_code=CLIENT_GONE) if answer is None else answer


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None where the client goes before, which cancels it."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
