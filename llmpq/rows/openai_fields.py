"""Fields of OpenAI requests that are no sampling: without effect here, or not supported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
    )
)
"""Fields about service, storing and streaming: no value of them changes what is generated."""


class _Field(NamedTuple):
    """Values of a field that ask for nothing, and what to do about others."""

    neutral: tuple[Any, ...]
    remedy: str


_ONE = "one answer a row: repeat the row with another seed"
_NO_LOGPROBS = "log-probabilities are not given: leave it out, or ask llmpq serve"
_NO_TOOLS = "tools are not offered to the model: describe them in a system message, or leave it out"
_IN_WORDS = "ask for it in the prompt, or leave it out"
_FIELDS: Mapping[str, _Field] = {
    "audio": _Field((), "the answer is text: leave it out"),
    "best_of": _Field((1,), _ONE),
    "echo": _Field((False,), "the answer does not repeat the prompt: leave it out"),
    "function_call": _Field(("none", "auto"), _NO_TOOLS),
    "functions": _Field(([],), _NO_TOOLS),
    "logprobs": _Field((False,), _NO_LOGPROBS),
    "modalities": _Field((["text"],), "the answer is text: leave it out"),
    "n": _Field((1,), _ONE),
    "reasoning_effort": _Field((), _IN_WORDS),
    "response_format": _Field(({"type": "text"},), f"the form is not enforced: {_IN_WORDS}"),
    "suffix": _Field(("",), "text is only continued: leave it out"),
    "tool_choice": _Field(("none", "auto"), _NO_TOOLS),
    "tools": _Field(([],), _NO_TOOLS),
    "top_logprobs": _Field((0,), _NO_LOGPROBS),
    "verbosity": _Field(("medium",), _IN_WORDS),
    "web_search_options": _Field((), "nothing is looked up: leave it out"),
}


REQUEST_FIELDS = frozenset(_FIELDS)
"""Fields that ask for something in any row."""


class UnsupportedFieldError(ValueError):
    """A field, `name`, that asks for what llmpq does not do."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} {why}")
        self.name = name


def without_neutral(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that are null or change nothing.

    Raises `UnsupportedFieldError` naming one that asks for what is not done here, and what to do.
    """
    kept = {}
    for name, value in fields.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name not in _FIELDS:
            kept[name] = value
            continue
        neutral, remedy = _FIELDS[name]
        if not any(type(value) is type(each) and value == each for each in neutral):
            wanted = json.dumps(neutral[0]) if neutral else "null"
            raise UnsupportedFieldError(name, f"must be {wanted}, not {value!r:.80}; {remedy}")
    return kept
