"""Lines of a batch: what they ask for, and the lines that answer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from llmpq.rows.answers import (
    ChatForm,
    CompletionForm,
    Form,
    Json,
    answer_line,
    line_response,
    written_line,
)
from llmpq.rows.row import MAX_ID_CHARACTERS
from llmpq.serve.batches.storage.records import Endpoint
from llmpq.serve.wire.bodies import ChatBody, CompletionBody
from llmpq.serve.wire.errors import ApiError, ErrorAnswer, bad_request
from llmpq.serve.wire.parsing import chat_body, checked, completion_body, parse_json

DUPLICATE = "duplicate_custom_id"
EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"


class _Envelope(BaseModel):
    """A line's fields around the body of its request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
    method: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The request of a line."""

    body: CompletionBody | ChatBody
    form: Form


@dataclass(frozen=True)
class LineAnswer:
    """The line that answers a line; `error` is a code where it belongs into the file of errors."""

    text: str
    error: str | None


def custom_id_of(line: bytes) -> str | None:
    """The id of a line, also of one that is wrong otherwise; None where it has no usable one."""
    try:
        found = parse_json(line).get("custom_id")
        if not isinstance(found, str) or not 0 < len(found) <= MAX_ID_CHARACTERS:
            return None
        found.encode()
    except (ApiError, UnicodeEncodeError):
        return None
    return found


def envelope(line: bytes, endpoint: Endpoint) -> Mapping[str, object]:
    """The body of a line's request; raises `ApiError` for a line that is no request of a batch."""
    found = checked(_Envelope, parse_json(line, "the line"))
    try:
        found.custom_id.encode()
    except UnicodeEncodeError as error:
        raise bad_request("custom_id holds half a surrogate pair", "custom_id") from error
    if found.method != "POST":
        raise bad_request(f"method is {found.method!r:.40}; it must be 'POST'", "method")
    if found.url != endpoint:
        raise bad_request(f"url is {found.url!r:.80}; the batch's endpoint is {endpoint!r}", "url")
    return found.body


def request_of(content: Mapping[str, object], endpoint: Endpoint) -> Asked:
    """The request of a body, checked as by HTTP; raises `ApiError` where it cannot be served."""
    body: CompletionBody | ChatBody
    form: Form
    if endpoint == "/v1/completions":
        body = completion_body(content)
        form = CompletionForm(body.logprobs is not None)
    else:
        body = chat_body(content)
        form = ChatForm(bool(body.logprobs))
    if body.stream:
        raise bad_request("stream is true; a batch gives whole answers: leave it out", "stream")
    return Asked(body, form)


def answered(custom_id: str | None, content: Json) -> LineAnswer:
    """The line of an answer."""
    response = line_response(HTTPStatus.OK, content, uuid4().hex)
    return LineAnswer(_line(custom_id, response, None), None)


def refused(custom_id: str | None, answer: ErrorAnswer) -> LineAnswer:
    """The line of a request that HTTP answers by an error."""
    response = line_response(answer.status, answer.content, uuid4().hex)
    return LineAnswer(_line(custom_id, response, None), answer.code or answer.type)


def failed(custom_id: str | None, code: str, message: str) -> LineAnswer:
    """The line of what was no request, or did not run."""
    return LineAnswer(_line(custom_id, None, {"code": code, "message": message}), code)


def _line(custom_id: str | None, response: Json | None, error: Json | None) -> str:
    return written_line(answer_line(custom_id, response, error, uuid4().hex))
