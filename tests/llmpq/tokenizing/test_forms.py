"""Forms of answers that cannot be kept or would do harm, before any stage has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from actors.messages import Request
from actors.sampling_options import MOST_FORM_BYTES, Sampling
from llmpq.rows.row import BadRow, row_from_mapping
from llmpq.tokenizing.requests import RequestMaker, opened_tokenizer
from llmpq.tokenizing.tokenizer_process import TokenizerProcess
from planner.workload import Workload
from tests.paths import DEMO_MODEL


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[TokenizerProcess]:
    with opened_tokenizer(DEMO_MODEL) as opened:
        assert opened is not None
        yield opened


def maker(tokenizer: TokenizerProcess | None) -> RequestMaker:
    return RequestMaker(Workload(1, 64, 16), 2048, Sampling(), tokenizer)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


TOGETHER = [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(10)]}
            for i in range(10)]  # fmt: skip
MANY = {f"p{i}": {"type": "string", "pattern": f"^{i}.*a{{1,99}}$"} for i in range(4000)}
NOT_KEPT: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}, "Unsatisfiable schema"),
    ({"guided_json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "incompatible types"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"'),
    ({"guided_json": {"$ref": "#/definitions/x"}}, "does not exist"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "is not present"),
    ({"guided_json": {"$ref": "#"}}, "no text has this form"),
    ({"guided_json": {"allOf": TOGETHER}}, "too large"),
    ({"guided_json": nested(150)}, "nests deeper than"),
    ({"guided_regex": "(a"}, "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "look-around"),
    ({"guided_regex": "a[^\\s\\S]"}, "no text has this form"),
    ({"guided_regex": "(" * 3000 + "a" + ")" * 3000}, "regex"),
    ({"guided_grammar": "start: nothing"}, "unknown name"),
    ({"guided_grammar": "start: start"}, "no text has this form"),
    ({"guided_grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "too deeply nested"),
    ({"guided_grammar": "%llguidance {}"}, "cannot be kept"),
    (
        {
            "prompt": None,
            "messages": [{"role": "user", "content": "hi"}],
            "tool_choice": "required",
            "tools": [{"name": "f", "parameters": {"type": "blurb"}}],
        },
        'tools \'{"json"',
    ),
]


@pytest.mark.parametrize(("fields", "words"), NOT_KEPT)
def test_a_form_that_cannot_be_kept_is_an_error_row(
    fields: dict[str, Any], words: str, tokenizer: TokenizerProcess
) -> None:
    process = tokenizer.pid
    row = row_from_mapping({"custom_id": "a", "prompt": [1, 2], **fields}, "f:1")
    (made,) = maker(tokenizer).requests([row])
    assert isinstance(made, BadRow)
    assert words in made.error
    assert len(made.error) < 700
    assert tokenizer.pid == process


TOO_LARGE: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": MANY}},
    {"grammar": "start: " + " | ".join(f'"x{n}" start' for n in range(9000))},
]
LARGE: list[dict[str, Any]] = [
    *TOO_LARGE,
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(.*a){50}.{1000}"},
    {"regex": "[ab]*a[ab]{200}"},
    {"choice": [f"w{n}" for n in range(25_000)]},
    {"json": {"enum": [f"w{n}" for n in range(20_000)]}},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**5}},
    {"json": {"type": "string", "minLength": 10**5, "maxLength": 10**7}},
    {"grammar": 'start: start start | start start start | "a" | ""'},
]


def test_large_forms_end_the_process_never_and_are_compiled_once(
    tokenizer: TokenizerProcess,
) -> None:
    """Each is kept, or refused; a row after them is tokenized as ever."""
    process = tokenizer.pid
    for form in LARGE:
        assert len(json.dumps(form)) < MOST_FORM_BYTES
        text = Sampling(structured_outputs=form).structured_outputs
        why = tokenizer.kept_form(text).error
        assert (why is not None) == (form in TOO_LARGE), why
        numbers = tokenizer.submit({"text": "a"})
        tokenizer.kept_form(text)
        assert tokenizer.submit({"text": "a"}) == numbers + 1
    tokenizer.forget()
    (made,) = maker(tokenizer).requests([row_from_mapping({"prompt": "Hi"}, "f:1")])
    assert isinstance(made, Request)
    assert tokenizer.pid == process


def test_a_form_needs_a_tokenizer() -> None:
    row = row_from_mapping({"custom_id": "a", "prompt": [1], "guided_choice": ["b"]}, "f:1")
    (made,) = maker(None).requests([row])
    assert isinstance(made, BadRow)
    assert "structured_outputs needs a tokenizer, which the model has not" in made.error
