"""Calls of tools in texts as models write them, in one piece and letter by letter."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmpq.rows.answers import ToolCall
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import load_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits
from llmpq.tokenizing.tool_calls import CallReading, CallStream, call_reading, calls_apart
from tests.llmpq.small_tokenizers import write_byte_tokenizer

ULM, BONN = ("look", {"town": "Ulm"}), ("look", {"town": "Bonn é", "at": [1, None]})
NEAR = '{"name": "look", "arguments": {"town": "Ulm"}}'
FAR = '{"name": "look", "arguments": {"town": "Bonn \\u00e9", "at": [1, null]}}'
LLAMA = NEAR.replace("arguments", "parameters")
TAG, CALLS = "<|python_tag|>", "[TOOL_CALLS]"
QWEN = (
    "<tool_call>\n<function=look>\n<parameter=town>\nUlm\n</parameter>\n</function>\n</tool_call>"
)
GLM = "<tool_call>look\n<arg_key>town</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
READ: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{NEAR}\n</tool_call>", "", [ULM]),
    ("hermes", f"I see.\n\n<tool_call>\n{NEAR}\n</tool_call>\n<tool_call>\n{FAR}\n</tool_call>\n",
     "I see.", [ULM, BONN]),
    ("hermes", f"<tool_call>{NEAR}", "", [ULM]),  # its end was left out
    ("hermes", f"<tool_call>{NEAR}</tool_call>\n\nDone <b> ", "\n\nDone <b>", [ULM]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "",
     [("f", {"a": "x\ny"})]),
    ("llama3", LLAMA, "", [ULM]),
    ("llama3", f" {TAG}{LLAMA}; {LLAMA}", "", [ULM, ULM]),
    ("llama3", f"Well. {TAG}{NEAR}", "Well.", [ULM]),
    ("mistral", f"{CALLS}[{NEAR}, {FAR}]", "", [ULM, BONN]),
    ("mistral", f"Yes {CALLS} [{NEAR}]", "Yes", [ULM]),
    ("mistral", f'{CALLS}look[ARGS]{{"town": "Ulm"}}{CALLS}look[CALL_ID]a1b2c3d4e[ARGS] {{}}', "",
     [ULM, ("look", {})]),
    ("mistral", f'{CALLS}look{{"town": "Ulm"}}', "", [ULM]),
    ("required", f"[{LLAMA}, {LLAMA}]", "", [ULM, ULM]),
    ("qwen3_coder", f"I see.\n{QWEN}\n{QWEN}", "I see.", [ULM, ULM]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("glm45", f"\n{GLM}\n{GLM}", "", [ULM, ULM]),
    ("glm45", "<tool_call>now</tool_call>", "", [("now", {})]),
]  # fmt: skip
UNREAD = [
    ("hermes", " a <tool_call>{'name': 1}</tool_call> b\n"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", "<tool_call></tool_call> <tool_cal"),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("hermes", "just text \n"),
    ("hermes", ""),
    ("llama3", '{"answer": 4} '),
    ("llama3", f"{TAG}print(1)"),
    ("llama3", f"it is {LLAMA}"),
    ("mistral", f"{CALLS}[1, 2]"),
    ("mistral", f"{CALLS}look[ARGS]{{"),
    ("required", f"[{LLAMA}, "),
    ("qwen3_coder", f"<tool_call>{NEAR}</tool_call>"),
    ("qwen3_coder", QWEN.replace("</parameter>", "")),
    ("qwen3_coder", QWEN.replace("</function>", "")),
    ("qwen3_coder", QWEN.replace("=look>", "=>")),
    ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>" * 30_000 + "</tool_call>"),
    ("glm45", f"<tool_call>{NEAR}<b></tool_call>"),
    ("glm45", GLM.replace("</arg_value>", "")),
    ("glm45", GLM.replace("look", " ")),
    ("glm45", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 10_000 + "</tool_call>"),
]


def streamed(text: str, reading: CallReading, size: int = 1) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a text that comes in pieces; none of a call is content at first."""
    stream, content, calls = CallStream(reading, "a"), "", list[ToolCall]()
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    for add in (*(lambda p=p: stream.add(p) for p in pieces), stream.finish):
        more, found = add()
        content += more
        calls += found
    return content, tuple(calls)


@pytest.mark.parametrize(("parser", "text", "content", "expected"), READ)
def test_calls_as_models_write_them(
    parser: str, text: str, content: str, expected: list[Any]
) -> None:
    reading = CallReading(parser)
    found, calls = calls_apart(text, reading, "a")
    assert (found, [(call.name, json.loads(call.arguments)) for call in calls]) == (
        content,
        expected,
    )
    assert [call.index for call in calls] == [*range(len(calls))]
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)  # as Mistral asks for
    assert streamed(text, reading) == streamed(text, reading, 7) == (found, calls)
    assert calls_apart(text, CallReading(parser, is_single=True), "a")[1] == calls[:1]
    assert calls_apart(text, reading, "b")[1][0].id != calls[0].id


@pytest.mark.parametrize(("parser", "text"), UNREAD)
def test_what_cannot_be_read_stays_as_it_is(parser: str, text: str) -> None:
    reading = CallReading(parser)
    assert calls_apart(text, reading, "a") == (text, ())
    assert streamed(text, reading, max(1, len(text) // 50)) == (text, ())


def test_a_broken_call_hides_no_other() -> None:
    text = f"<tool_call>oh</tool_call>\n<tool_call>{NEAR}</tool_call>"
    assert streamed(text, CallReading("hermes"))[0] == "<tool_call>oh</tool_call>"
    assert len(calls_apart(text, CallReading("hermes"), "a")[1]) == 1


def test_arguments_of_the_function_that_was_named() -> None:
    reading = CallReading("named", "look")
    text = '{"town": "\\ud800 é"}'  # half a pair, which UTF-8 cannot write
    (call,) = calls_apart(text, reading, "a")[1]
    assert (call.name, call.arguments) == ("look", '{"town": "\\ud800 \\u00e9"}')
    assert calls_apart('{"town', reading, "a") == ('{"town', ())


VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "007", "007"),
    ({"type": "string"}, "a <b>\n\n c", "a <b>\n\n c"),
    ({"type": "string"}, "null", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "integer"}, " 12 ", 12),
    ({"type": "integer"}, "many", "many"),
    ({"type": "boolean"}, "True", True),
    ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
    ({"type": "array"}, "[1] and more", "[1] and more"),
    ({"enum": 5, "anyOf": 1, "oneOf": [2], "type": {}}, "0.5", 0.5),
    (True, "x", "x"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize(
    ("parser", "frame"), [("qwen3_coder", QWEN), ("glm45", GLM)], ids=["qwen", "glm"]
)
def test_values_without_types_get_those_of_the_tools(
    parser: str, frame: str, schema: Any, text: str, value: Any
) -> None:
    look = {"name": "look", "parameters": {"type": "object", "properties": {"town": schema}}}
    reading = call_reading({"tools": [{"type": "function", "function": look}]}, parser, {})
    assert reading is not None
    content, (call,) = calls_apart(frame.replace("Ulm", text), reading, "a")
    assert (content, json.loads(call.arguments)) == ("", {"town": value})
    assert CallReading(*json.loads(json.dumps(reading))) == reading, "long rows wait on disk"


TOOL = {"type": "function", "function": {"name": "look"}}
OFFERED = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "special", "text", "job"),
    [
        (OFFERED + "{# <tool_call> #}", (), f"a <tool_call>{NEAR}</tool_call>", {}),
        (OFFERED, ("<tool_call>", "</tool_call>"), f"a <tool_call>{NEAR}</tool_call>", {}),
        (OFFERED + "{# <tool_call><function= #}", ("<tool_call>", "</s>"), f"a {QWEN}</s>", {}),
        (OFFERED, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), f"a {GLM}", {}),
        (OFFERED + "{# <|start_header_id|>ipython #}", (TAG, "<|eom_id|>"),
         f"a {TAG}{LLAMA}<|eom_id|>", {}),
        (OFFERED, (CALLS, "[ARGS]", "</s>"), f'a {CALLS}look[ARGS]{{"town": "Ulm"}}</s>', {}),
        (OFFERED + "{# <tool_call><function= #}", (CALLS,), f"a {CALLS}[{NEAR}]",
         {"tool_parser": "mistral", "chat_template_kwargs": {"tools": [TOOL]}}),
    ],
)  # fmt: skip
def test_the_form_is_told_from_template_or_vocabulary(
    template: str, special: tuple[str, ...], text: str, job: dict[str, Any], tmp_path: Path
) -> None:
    """The markers are special tokens, which texts are without, and the calls come out."""
    folder = write_byte_tokenizer(tmp_path / "m", special, template=template)
    with closing(load_tokenizer(folder, RowLimits(), Prompting(**job))) as tokenizer:  # type: ignore[type-var]
        reading = tokenizer.call_reading({} if job else {"tools": [TOOL]})  # type: ignore[union-attr]
        assert reading is not None
        ids = tokenizer.ask({"text": text}).ids  # type: ignore[union-attr]
        made = tokenizer.ask({"ids": ids, "before": []}).text  # type: ignore[union-attr]
        content, (call,) = calls_apart(str(made), reading, "a")
        assert (content, call.name, json.loads(call.arguments)) == ("a", *ULM)


def test_answers_are_read_only_where_calls_are_known() -> None:
    options = {"tools": [TOOL]}
    assert call_reading({}, "hermes", {}) is None
    assert call_reading(options, None, {}) is None
    assert call_reading(options, "none", {}) is None
    assert call_reading(options, "hermes", {}) == CallReading("hermes")
    forced = {**options, "tool_choice": TOOL, "parallel_tool_calls": False}
    assert call_reading(forced, "none", {}) == CallReading("named", "look", True)
