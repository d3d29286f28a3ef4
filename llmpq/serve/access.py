"""Errors in OpenAI's form, who is let in when: by key, queue, and the end of the server, and bodies
within their limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmpq.serve.engine import Engine, EngineStatus
from llmpq.serve.options import ServeOptions
from quant.common.errors import MESSAGE_CHARACTERS
from quant.common.loopback import host_in, is_of_this_machine
from quant.common.text import printable

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
PARAM_CHARACTERS = 200
CLIENT_GONE = 499
"""Status of a request whose client has gone; it is seen in logs only (nginx's number)."""

T = TypeVar("T")


@asynccontextmanager
async def tasks(*work: Coroutine[Any, Any, T]) -> AsyncGenerator[list[asyncio.Task[T]], None]:
    """Tasks of `work`, which are cancelled at the end of the body, and waited for."""
    begun = [asyncio.create_task(each) for each in work]
    try:
        yield begun
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is answered with an error: what a client is told, in words and, for programs,
    by a code; `param` is the field that they are about.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = INVALID_REQUEST
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status} {self.code or self.type}"  # a message may quote a prompt

    @property
    def content(self) -> Mapping[str, object]:
        error = {
            "message": printable(self.message, MESSAGE_CHARACTERS),
            "type": self.type,
            "param": None if self.param is None else printable(self.param[:PARAM_CHARACTERS]),
            "code": self.code,
        }
        return {"error": error}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def not_found(kind: str, name: str) -> ApiError:
    message = f"there is no {kind} {name!r:.80}; it may have been deleted, or have expired"
    return ApiError(HTTPStatus.NOT_FOUND, message, "id", "not_found")


def queue_full(retry_after_s: int) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"too many requests wait already; try again in {retry_after_s} s",
        code="rate_limit_exceeded",
        type="requests",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str) -> ApiError:
    """503: the server is loading, or takes no more requests before it ends."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, message, code="service_unavailable", type=SERVER_ERROR
    )


def failed(message: str) -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, type=SERVER_ERROR)


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _USABLE_ID.fullmatch(given) else f"req-{uuid4().hex}"
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
                told = failed(f"the server failed at request {name}; its log says more")
                await JSONResponse(told.content, told.status)(scope, receive, send_named)


def log_fault(name: str, error: BaseException) -> None:
    """Log where `error` came from, and not its text, which may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("request %s failed: %s\n%s", name, type(error).__name__, frames)


_NOT_READY: dict[EngineStatus, str] = {
    "loading": "the model is loading; try again when /ready answers 200",
    "draining": "the server takes no more requests",
    "failed": "the engine has failed; the server's log says more",
}


class Gate:
    """Lets requests in while there is room for the answers that they ask for.

    `answers`: those that are being worked on. `background`: generations that the engine has beside
    them, which take nobody's place in the queue. `on_room` is called when answers have ended. After
    `close` nothing new is let in, and after `give_up` they end.
    """

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self._engine = engine
        self._options = options
        self.answers = 0
        self.background = 0
        self.on_room: Callable[[], None] = lambda: None
        self.is_closed = False
        self.given_up = asyncio.Event()

    def close(self) -> None:
        self.is_closed = True

    def give_up(self) -> None:
        """Let no more time to the answers that are being worked on."""
        self.close()
        self.given_up.set()

    @property
    def status(self) -> EngineStatus:
        """Whether requests are taken."""
        status = self._engine.status
        return "draining" if self.is_closed and status != "failed" else status

    def check_open(self) -> None:
        """Raise `ApiError` (503) unless requests are taken."""
        if self.status != "ready":
            raise unavailable(_NOT_READY[self.status])

    @contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """Let a request in that asks for so many answers.

        Raises `ApiError`: 503 as `check_open`, 429 where too many wait, 400 where they could never
        wait together.
        """
        self.check_open()
        self.check_number(answers)
        queue = self._engine.queue
        present = max(self.answers, queue.waiting + queue.running - self.background)
        if present + answers > self._most:
            raise queue_full(self._options.retry_after_s)
        self.answers += answers
        try:
            yield
        finally:
            self.answers -= answers
            self.on_room()

    def check_number(self, answers: int) -> None:
        """Raise `ApiError` (400) for more answers than could ever wait together."""
        if answers > self._most:
            raise bad_request(
                f"the request asks for {answers} answers (prompts times n), this server takes at "
                f"most {self._most} at once; split it",
                "n",
            )

    @property
    def _most(self) -> int:
        return self._engine.queue.slots + self._options.queue_limit


def check_key(authorization: str | None, api_key: str | None) -> None:
    """Raise `ApiError` (401) without the right key, in a time that tells nothing of it."""
    if api_key is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    is_same = hmac.compare_digest(_digest(given.strip()), _digest(api_key))
    if not is_same or scheme.lower() != "bearer":
        raise ApiError(
            HTTPStatus.UNAUTHORIZED,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def check_host(host: str) -> None:
    """Raise `ApiError` (403) unless `host`, of a request's header, is a name of this machine."""
    if not is_of_this_machine(host_in(host)):
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"this server has no API key and answers to localhost alone, not to {host!r:.200}; "
            "start it with a key",
            code="host_not_allowed",
        )


def check_origin(origin: str | None) -> None:
    """Raise `ApiError` (403) for a request that a web page sends.

    Browsers name the page's origin in requests that a page may send to any site without being
    asked, such as forms with files.
    """
    if origin is not None:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            f"this server has no API key and takes nothing from web pages ({origin!r:.200}); start "
            "it with a key",
            code="origin_not_allowed",
        )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


async def read_body(request: Request, most_bytes: int, within_s: float) -> bytes:
    """The body of a request, read only as far as it is within the limits.

    415 for what is no JSON by its headers, which no web page of another site can send unasked; 413
    and 408 beyond the limits.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type is {kind or 'missing'!r:.80}; send application/json",
        )
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding is {coding!r:.80}; send the body as it is",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most_bytes:
        raise _too_large(most_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
    except TimeoutError as error:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {within_s:g} s to arrive"
        ) from error
    return bytes(body)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {most_bytes} bytes"
    )
