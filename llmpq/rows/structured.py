"""The form of an answer as rows and requests of several tools ask for it, as one field of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.sampling_options import FORM, checked_form
from llmpq.rows.results import RowError, json_value
from quant.common.errors import FieldError

_RESPONSE_FORMAT = "response_format"
_OBJECTS = (FORM, "guided_decoding")
_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "format": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}

FORM_FIELDS = (_RESPONSE_FORMAT, *_OBJECTS, *_KINDS)
"""Fields that ask for a form: OpenAI's, vLLM's, its older ones, and those of llama.cpp, Ollama and
SGLang."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_WITHOUT_EFFECT = ("disable_fallback", "backend", "_backend", "backend_was_auto")


def form_of(shown: str, name: str, value: Any) -> str:
    """What the field `name` asks for, as `Sampling.structured_outputs`; empty: any text.

    Raises `FieldError` of the name `shown` for what is no form.
    """
    try:
        return checked_form(_form(name, json_value(value)))
    except FieldError as error:
        raise FieldError(shown, error.why) from error
    except RowError as error:
        raise FieldError(shown, str(error)) from error


def _form(name: str, value: Any) -> Any:
    if name == _RESPONSE_FORMAT:
        return _of_response_format(value)
    if name not in _OBJECTS:
        whole = name == "format" and value == "json"
        return {_KINDS[name]: _ANY_OBJECT if whole else value}
    if not isinstance(value, Mapping):
        return value
    asked = {
        kind: each
        for kind, each in value.items()
        if each not in (None, False) and kind not in _WITHOUT_EFFECT
    }
    return {"json": _ANY_OBJECT} if asked == {"json_object": True} else asked


def _of_response_format(value: Any) -> Mapping[str, Any]:
    """OpenAI's objects; `strict` or not, the schema is kept."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":  # llama.cpp takes a schema here
        return {"json": value.get("schema") or _ANY_OBJECT}
    if kind != "json_schema":
        wanted = '{"type": "text"}, "json_object" or "json_schema"'
        raise FieldError(_RESPONSE_FORMAT, f"is {value!r:.80}; its type must be one of {wanted}")
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise FieldError(
            _RESPONSE_FORMAT,
            'has no schema; give {"type": "json_schema", "json_schema": {"name": …, "schema": …}}',
        )
    return {"json": inner["schema"]}
