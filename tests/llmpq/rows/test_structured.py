"""The form of an answer as OpenAI, vLLM, llama.cpp, Ollama and SGLang ask for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.sampling_options import MOST_FORM_BYTES, Sampling
from llmpq.rows.row import BadRow, Row, row_from_line, row_from_mapping
from llmpq.rows.sampling import merge_sampling
from quant.common.errors import FieldError

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é", 1]}}}
OBJECT = {"json": {"type": "object"}}
DEEP = "[" * 10_000 + "]" * 10_000

FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    (
        {"response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
        }},
        {"json": SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, OBJECT),
    ({"sampling_params": {"guided_decoding": {"regex": "a+"}}}, {"regex": "a+"}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"guided_regex": "a|b"}, {"regex": "a|b"}),
    ({"guided_choice": ["x", "y"]}, {"choice": ["x", "y"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"format": "json"}, OBJECT),
    ({"format": SCHEMA}, {"json": SCHEMA}),
    ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"sampling_params": {"ebnf": "root ::= x"}}, {"grammar": "root ::= x"}),
    ({"guided_json": {"type": "array"}, "response_format": None}, {"json": {"type": "array"}}),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
]  # fmt: skip


def row_of(**content: Any) -> Row | BadRow:
    return row_from_mapping({"custom_id": "a", "prompt": "p", **content}, "f:1")


@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_forms_are_one_field(fields: dict[str, Any], form: Any) -> None:
    """In rows and in bodies; a schema keeps the order of its properties."""
    body = {"model": "m", "prompt": "p", **fields}
    line = row_from_line(json.dumps({"custom_id": "a", "body": body}).encode(), "f:1")
    for row in (row_of(**fields), line):
        assert isinstance(row, Row), row
        found = merge_sampling(Sampling(), row.sampling)
        assert found == Sampling(structured_outputs=form)
        assert json.dumps(json.loads(found.structured_outputs)) == json.dumps(form)


def test_a_row_overrides_the_form_of_the_job() -> None:
    job = Sampling(structured_outputs=OBJECT)
    for fields, form in (({}, OBJECT), ({"response_format": {"type": "text"}}, "")):
        row = row_of(**fields)
        assert isinstance(row, Row)
        assert merge_sampling(job, row.sampling) == Sampling(structured_outputs=form)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format is 'json'; its type must be one of"),
    ({"response_format": {"type": "json_schema"}}, "response_format has no schema; give"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs is {'xml': 'a'}; it must be an"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "it must be an object with one of json"),
    ({"guided_choice": []}, "guided_choice has the choice []; give texts"),
    ({"guided_choice": ["a", 5]}, "guided_choice has the choice ['a', 5]; give texts"),
    ({"guided_choice": ["a", ""]}, "none of them empty"),
    ({"guided_regex": 5}, "guided_regex has the regex 5; it must be a text, and not empty"),
    ({"guided_json": "{"}, "guided_json is no JSON (its schema): Expecting"),
    ({"guided_json": DEEP}, "guided_json is no JSON (its schema): it nests too deeply"),
    ({"extra_body": {"guided_json": 5}}, "extra_body.guided_json has the schema 5; it must be an"),
    ({"guided_choice": [str(n) for n in range(10**5)]}, f"give at most {MOST_FORM_BYTES}"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "is given twice"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_what_is_no_form_is_an_error_row(fields: dict[str, Any], message: str) -> None:
    row = row_of(**fields)
    assert isinstance(row, BadRow)
    assert message in row.error
    assert len(row.error) < 700


def test_a_form_in_python_is_checked_as_that_of_a_row() -> None:
    with pytest.raises(FieldError, match=r"structured_outputs is .* it must be"):
        Sampling(structured_outputs={"xml": 5})
    assert Sampling(structured_outputs={}) == Sampling()
