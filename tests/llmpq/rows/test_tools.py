"""Fields of tools, and the forms of answers that must call: by pydantic's schemas, jsonschema and
the grammar that keeps them.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from transformers import AutoTokenizer

from actors.sampling_options import FORM
from actors.stage.grammar import compiled, vocabulary_of
from llmpq.rows.row import BadRow, Row, row_from_mapping
from tests.paths import DEMO_MODEL


class Move(BaseModel):
    """With a reference of its own, one to itself, and a field that is named as a reference is."""

    class Place(BaseModel):
        street: Literal["a", "b"]
        near: Move.Place | None

    to: Place


MOVE = openai.pydantic_function_tool(Move)
REF = {"type": "object", "properties": {"$ref": {"const": "#"}}, "required": ["$ref"]}
LINK = {"type": "function", "function": {"name": "link", "parameters": REF}}
NOW = {"type": "function", "function": {"name": "now"}}
HUGE = {"name": "huge", "parameters": {"enum": ["x" * 300_000]}}
TOOLS = [MOVE, LINK, NOW]
MOVED = {"to": {"street": "a", "near": {"street": "b", "near": None}}}


def row_of(**fields: Any) -> Row | BadRow:
    given = {"custom_id": "a", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    return row_from_mapping(given | fields, "f:1")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (named("Move"), [MOVED], [{"to": {"street": "c", "near": None}}, {}, []]),
        ({"type": "function", "name": "link"}, [{"$ref": "#"}], [{"$ref": "a"}]),
        (named("now"), [{}], [{"a": 1}]),
        (
            "required",
            [
                [{"name": "Move", "parameters": MOVED}],
                [{"name": "now", "parameters": {}}, {"name": "link", "parameters": {"$ref": "#"}}],
            ],
            [[], {}, [{"name": "now"}], [{"name": "now", "parameters": MOVED}]],
        ),
    ],
)
def test_answers_that_must_call(choice: Any, good: list[Any], bad: list[Any]) -> None:
    row = row_of(tool_choice=choice)
    assert isinstance(row, Row), row
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    grammar = compiled(row.sampling[FORM], vocabulary_of(tokenizer))
    schema = jsonschema.Draft202012Validator(json.loads(row.sampling[FORM])["json"])
    for value, fits in (*((each, True) for each in good), *((each, False) for each in bad)):
        assert schema.is_valid(value) == fits
        ids = tokenizer(json.dumps(value), add_special_tokens=False)["input_ids"]
        matcher = grammar.deep_copy()
        assert (matcher.validate_tokens(ids) == len(ids)) == fits
    assert row.content["prompt_options"]["tool_choice"]  # another choice makes another row


def test_one_call_alone() -> None:
    row = row_of(tool_choice="required", parallel_tool_calls=False)
    assert isinstance(row, Row)
    assert json.loads(row.sampling[FORM])["json"]["maxItems"] == 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": [NOW, {"type": "function"}]}, "tools[1] is no function with a name; give"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is no function"),
        ({"tools": [named("")]}, "tools[0] is no function"),
        ({"tools": [NOW, NOW]}, "tools[1] is named 'now' as one before it"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]},
         "tools[0].function.parameters are no JSON schema"),
        ({"tools": None, "chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs.tools[0]"),
        ({"tool_choice": named("f")}, "tool_choice names 'f', which is none of the tools: Mov"),
        ({"tool_choice": "required", "tools": []}, "tool_choice asks for a call, but there are no"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is {'type': 'allowed_tools'}"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice asks for a call beside an"),
        ({"tools": [HUGE], "tool_choice": "required"}, "tools as a form of the answer: it has 3"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'; it must be true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(fields: dict[str, Any], told: str) -> None:
    row = row_of(**fields)
    assert isinstance(row, BadRow)
    assert row.error.startswith(told)
