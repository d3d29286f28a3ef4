"""Chat messages as OpenAI writes them, checked and in the form that text-only templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.common.files import parsed_json

JOINER = "\n"
"""Separator of the text parts of one message, as in vLLM and llama.cpp for templates of text alone;
the format itself names none.
"""

_CALLS, _OLD_CALL = "tool_calls", "function_call"
_EMPTY = (_CALLS, "annotations")
"""Fields whose empty lists say nothing: OpenAI's clients write them into every message."""


class MessageError(ValueError):
    """A message that cannot be used; its text says why."""


def plain_message(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """`message` with its content as one string; other fields are as they were.

    Raises `MessageError` for a message without role, without content (unless an assistant calls
    tools), for content that is not text, and for calls that `template_message` cannot take.
    """
    if _CALLS in message or _OLD_CALL in message:
        template_message(message, number)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise MessageError(f"message {number} has no role; give system, user or assistant")
    if content is None:
        if role == "assistant" and (message.get(_CALLS) or message.get(_OLD_CALL)):
            return message
        raise MessageError(f"message {number} ({role!r:.40}) has no content; give it a text")
    if isinstance(content, str):
        return message
    if not isinstance(content, list) or not content:
        kind = "an empty list" if content == [] else f"of type {type(content).__name__}"
        raise MessageError(
            f"the content of message {number} is {kind}; give a text, or a list of text parts"
        )
    return {**message, "content": JOINER.join(_text(part, number) for part in content)}


def template_message(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """`message` number `number` as templates expect it, which write arguments by `tojson` and ask
    whether a message has calls: arguments of calls are objects, fields that say nothing are left
    out, and the `function_call` of OpenAI's first interface is a call as any other.

    Raises `MessageError` where arguments are no JSON object: a template would write other text.
    """
    said = {
        name: value
        for name, value in message.items()
        if value is not None and not (name in _EMPTY and value == [])
    }
    old = said.pop(_OLD_CALL, None)
    if old is not None:
        said.setdefault(_CALLS, [{"type": "function", "function": old}])
    if _CALLS not in said:
        return said
    calls = said[_CALLS]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise MessageError(f"{_CALLS} of message {number} is no list of objects")
    made = [_call(call, number) for call in calls]
    return {"content": None, **said, _CALLS: made}


def _call(call: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """A call of a tool, with its arguments as an object; one of no function stays as it is."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": {**function, "arguments": _arguments(function, number)}}
    return {**call, "arguments": _arguments(call, number)} if "arguments" in call else call


def _arguments(function: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    given, why = function.get("arguments"), ""
    try:
        found = parsed_json(given.strip() or "{}") if isinstance(given, str) else given or {}
    except ValueError as error:
        found, why = None, f" ({error})"
    if isinstance(found, Mapping):
        return found
    raise MessageError(
        f"message {number} calls {function.get('name')!r:.60} with arguments that are no JSON "
        f"object: {given!r:.80}{why}; mend them, or leave the call out"
    )


def _text(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise MessageError(
            f"a part of the content of message {number} has no type; give "
            '{"type": "text", "text": …}'
        )
    text = part.get("text")
    if kind != "text":
        raise MessageError(
            f"message {number} has a part of type {kind!r:.40}; the model reads text alone: leave "
            "the part out, or put into words what it shows"
        )
    if not isinstance(text, str):
        raise MessageError(f"a text part of message {number} has no text")
    return text
