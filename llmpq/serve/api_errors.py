"""Errors in OpenAI's form with their statuses, and the layer that answers unexpected ones."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from uuid import uuid4

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quant.common.errors import MESSAGE_CHARACTERS
from quant.common.text import printable

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
PARAM_CHARACTERS = 200


@dataclass(frozen=True)
class ErrorAnswer:
    """What a client is told: status, words, the field that they are about, a code for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    type: str = INVALID_REQUEST
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def content(self) -> Mapping[str, object]:
        """The JSON object."""
        error = {
            "message": printable(self.message, MESSAGE_CHARACTERS),
            "type": self.type,
            "param": None if self.param is None else printable(self.param[:PARAM_CHARACTERS]),
            "code": self.code,
        }
        return {"error": error}


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(f"{answer.status} {answer.code or answer.type}")
        self.answer = answer


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: what the request asks for cannot be served."""
    return ApiError(ErrorAnswer(HTTPStatus.BAD_REQUEST, message, param, code))


def bad_body(status: HTTPStatus, message: str) -> ApiError:
    """An error about the body as a whole."""
    return ApiError(ErrorAnswer(status, message))


def wrong_key() -> ApiError:
    """401: the key is wrong, or none is given."""
    message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
    return ApiError(
        ErrorAnswer(
            HTTPStatus.UNAUTHORIZED,
            message,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    )


def other_host(host: str) -> ApiError:
    """403: a server without a key is called by a name that is not of its machine."""
    message = (
        f"this server has no API key and answers to localhost alone, not to {host!r:.200}; start "
        "it with a key"
    )
    return ApiError(ErrorAnswer(HTTPStatus.FORBIDDEN, message, code="host_not_allowed"))


def from_page(origin: str) -> ApiError:
    """403: a web page sends a request to a server without a key."""
    message = (
        f"this server has no API key and takes nothing from web pages ({origin!r:.200}); start it "
        "with a key"
    )
    return ApiError(ErrorAnswer(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed"))


def not_found(kind: str, name: str) -> ApiError:
    """404: there is no such file or batch."""
    message = f"there is no {kind} {name!r:.80}; it may have been deleted, or have expired"
    return ApiError(ErrorAnswer(HTTPStatus.NOT_FOUND, message, "id", "not_found"))


def conflict(message: str, code: str) -> ApiError:
    """409: the state of a file or batch does not allow it."""
    return ApiError(ErrorAnswer(HTTPStatus.CONFLICT, message, code=code))


def no_room(message: str) -> ApiError:
    """507: the server's disk is full."""
    return ApiError(
        ErrorAnswer(HTTPStatus.INSUFFICIENT_STORAGE, message, code="no_room", type=SERVER_ERROR)
    )


def unknown_model(name: str, served: str) -> ApiError:
    """404: another model is asked for."""
    message = f"the model {name!r:.200} is not served here; {served!r} is"
    return ApiError(ErrorAnswer(HTTPStatus.NOT_FOUND, message, "model", "model_not_found"))


def queue_full(retry_after_s: int) -> ApiError:
    """429: too many answers wait already."""
    return ApiError(
        ErrorAnswer(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"too many requests wait already; try again in {retry_after_s} s",
            code="rate_limit_exceeded",
            type="requests",
            headers={"Retry-After": str(retry_after_s)},
        )
    )


def unavailable(message: str) -> ApiError:
    """503: the server is loading, or takes no more requests before it ends."""
    return ApiError(
        ErrorAnswer(
            HTTPStatus.SERVICE_UNAVAILABLE,
            message,
            code="service_unavailable",
            type=SERVER_ERROR,
        )
    )


def failed(message: str) -> ApiError:
    """500: a fault of the server."""
    return ApiError(ErrorAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, message, type=SERVER_ERROR))


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
