"""The outermost layer of the application: ids of requests, and faults that nobody expected."""

from __future__ import annotations

import logging
import re
import traceback
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmpq.serve.wire.errors import failed

REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOG = logging.getLogger(__name__)


class Boundary:
    """Names every answer by the id of its request, the client's own where it sends a usable one.

    A fault becomes an answer with status 500, or ends the connection where the answer has begun; it
    is logged without its text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)
        is_begun = False

        async def send_named(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            return
        except Exception as error:  # one request's fault must not end the server
            log_fault(name, error)
            if not is_begun:
                answer = failed(f"the server failed at request {name}; its log says more").answer
                await JSONResponse(answer.content, answer.status)(scope, receive, send_named)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _USABLE_ID.fullmatch(given) else f"req-{uuid4().hex}"


def log_fault(name: str, error: BaseException) -> None:
    """Log where `error` came from, and not its text, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("request %s failed: %s\n%s", name, type(error).__name__, frames)
