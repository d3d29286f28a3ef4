"""From the bytes of a request to its checked fields; a mistake becomes an error that names it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from llmpq.rows.request_fields import fields_by_name, prompt_options
from llmpq.serve.api_errors import ApiError, bad_body, bad_request
from llmpq.serve.bodies import Body, ChatBody, CompletionBody, StreamOptions
from quant.common.errors import FieldError

BodyT = TypeVar("BodyT", bound=Body)
ModelT = TypeVar("ModelT", bound=BaseModel)

_LIMIT = "max_tokens"
"""The field of a body that other names of `max_new_tokens` go into."""

_WORDS = {
    "bool_type": "it must be true or false",
    "dict_type": "it must be an object",
    "float_type": "it must be a number",
    "int_type": "it must be a whole number",
    "list_type": "it must be a list",
    "model_type": "it must be an object",
    "string_type": "it must be a text",
}
"""Words for pydantic's kinds of errors; others are told in its own."""


async def read_body(request: Request, most_bytes: int, within_s: float) -> bytes:
    """The body of a request, read only as far as it is within the limits.

    415 for what is no JSON by its headers, which no web page of another site can send unasked; 413
    and 408 beyond the limits.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise bad_body(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type is {kind or 'missing'!r:.80}; send application/json",
        )
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise bad_body(
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
        raise bad_body(
            HTTPStatus.REQUEST_TIMEOUT, f"the body took more than {within_s:g} s to arrive"
        ) from error
    return bytes(body)


def _too_large(most_bytes: int) -> ApiError:
    return bad_body(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {most_bytes} bytes"
    )


def parse_json(body: bytes, what: str = "the body") -> Mapping[str, object]:
    """The JSON object of a body; 400 for anything else, which is called `what`."""
    try:
        content = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise bad_request(f"{what} is not UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise bad_request(f"{what} is not JSON: {error}") from error
    except RecursionError as error:
        raise bad_request(f"{what} nests too deeply") from error
    if not isinstance(content, dict):
        raise bad_request(f"{what} must be a JSON object")
    return content


def _no_number(name: str) -> float:
    raise ValueError(f"it has {name}, which is no number of JSON")


def completion_body(content: Mapping[str, object]) -> CompletionBody:
    """The fields of a completion; 400 naming the first that cannot be served."""
    body = _fields(CompletionBody, content)
    if body.best_of not in (None, body.answers):
        raise bad_request(
            f"best_of is {body.best_of}, n is {body.answers}; all answers are returned: leave "
            "best_of out",
            "best_of",
        )
    return body


def chat_body(content: Mapping[str, object]) -> ChatBody:
    """The fields of a chat; 400 naming the first that cannot be served."""
    body = _fields(ChatBody, content)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs has no effect unless logprobs is true", "top_logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens "
            f"{body.max_completion_tokens}; give one of them",
            "max_tokens",
        )
    return body


def _fields(model: type[BodyT], content: Mapping[str, object]) -> BodyT:
    served = {name: value for name, value in content.items() if name in model.model_fields}
    others = {name: value for name, value in content.items() if name not in served}
    try:
        names = _add_others(served, others, model)
        body = checked(model, served, StreamOptions, names)
        _ = body.prompt_options
    except FieldError as error:
        raise bad_request(str(error), error.name) from error
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options has no effect unless stream is true", "stream_options")
    return body


def _add_others(
    served: dict[str, object], others: Mapping[str, object], model: type[Body]
) -> dict[str, str]:
    """Add to the `served` fields those that the `others` mean, and tell the names of these.

    Raises `FieldError` for what is not done, and `ApiError` for what nothing knows.
    """
    found, names = fields_by_name(others), {}
    for name in (*found,):
        field = _LIMIT if name == "max_new_tokens" else name
        if field not in model.model_fields:
            continue
        names[field], value = found.pop(name)
        if served.get(field) not in (None, value):
            raise FieldError(names[field], f"and {field} are given and differ; give one of them")
        served[field] = value
    prompt_options(found, has_messages=model is ChatBody)
    if found:
        name = next(iter(found.values())).name
        raise _unknown(name, name, tuple(model.model_fields))
    return names


def checked(
    model: type[ModelT],
    content: Mapping[str, object],
    nested: type[BaseModel] | None = None,
    names: Mapping[str, str] | None = None,
) -> ModelT:
    """The fields of `content`; 400 naming the first that is wrong.

    `nested`: the model of the one field that has fields itself. `names`: under which some of the
    fields were given.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _wrong_field(first, nested if len(first["loc"]) > 1 else model, names) from error


def _unknown(path: str, name: str, known: Sequence[str]) -> ApiError:
    near = get_close_matches(name, known, 1)
    hint = f"the nearest is {near[0]}" if near else f"known are {', '.join(known)}"
    return bad_request(f"unknown field {path!r:.80}; {hint}", path)


def _wrong_field(
    error: ErrorDetails, model: type[BaseModel] | None, names: Mapping[str, str] | None
) -> ApiError:
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        path = (names or {}).get(path, path)
    if error["type"] == "missing":
        return bad_request(f"{path} is missing", path)
    if error["type"] == "extra_forbidden" and model is not None:
        return _unknown(path, str(error["loc"][-1]), tuple(model.model_fields))
    why = _WORDS.get(error["type"], error["msg"])
    return bad_request(f"{path} is {_shown(error['input'])}: {why}", path)


def _shown(value: object) -> str:
    """A value of a request in a few characters, whatever its size."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if abs(value) < 10**18 else "a number of many digits"
    if isinstance(value, float | bool) or value is None:
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "an object"
