"""Chat messages as OpenAI writes them, checked and in the form that text-only templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JOINER = "\n"
"""Separator of the text parts of one message, as in vLLM and llama.cpp for templates of text alone;
the format itself names none.
"""

_CALLS = ("tool_calls", "function_call")


class MessageError(ValueError):
    """A message that cannot be used; its text says why."""


def plain_message(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """`message` with its content as one string; other fields are as they were, for the template.

    Raises `MessageError` for a message without role, without content (unless an assistant calls
    tools), and for content that is not text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise MessageError(f"message {number} has no role; give system, user or assistant")
    if content is None:
        if role == "assistant" and any(message.get(name) for name in _CALLS):
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
