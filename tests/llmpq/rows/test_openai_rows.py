"""Rows as OpenAI's formats write them: content in parts, fields that change nothing, long ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.cli import run as run_cli
from llmpq.jobs.job import JobOptions
from llmpq.jobs.python_rows import rows_of
from llmpq.rows.row import MAX_ID_CHARACTERS, BadRow, Row, row_from_line
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts

USER = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def row_of(**fields: Any) -> Row | BadRow:
    return row_from_line(json.dumps(fields).encode(), "f:1")


def batch_line(url: str = CHAT, **body: Any) -> Row | BadRow:
    prompt = {"messages": [USER]} if url == CHAT else {"prompt": "Hi"}
    whole = {"model": "gpt-4o-mini", **prompt, **body}
    return row_of(custom_id="a", method="POST", url=url, body=whole)


def part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([part("one")], "one"),
        ([part("one"), part("two")], "one\ntwo"),
        (["one", part("two")], "one\ntwo"),
        ([part("")], ""),
        ("", ""),
    ],
)
def test_text_parts_are_one_text(content: Any, text: str) -> None:
    row = row_of(custom_id="a", messages=[{"role": "user", "content": content, "name": "x"}])
    assert isinstance(row, Row)
    assert row.messages == ({"role": "user", "content": text, "name": "x"},)
    assert row == row_of(custom_id="a", messages=[{"role": "user", "content": text, "name": "x"}])


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ({"role": "user"}, "message 2 ('user') has no content"),
        ({"role": "user", "content": None}, "message 2 ('user') has no content"),
        ({"role": "assistant", "content": None}, "message 2 ('assistant') has no content"),
        ({"role": "assistant", "tool_calls": []}, "has no content"),
        ({"content": "a"}, "message 2 has no role"),
        ({"role": "", "content": "a"}, "message 2 has no role"),
        ({"role": 5, "content": "a"}, "message 2 has no role"),
        ({"role": "user", "content": []}, "the content of message 2 is an empty list"),
        ({"role": "user", "content": {"a": 1}}, "the content of message 2 is of type dict"),
        ({"role": "user", "content": 5}, "the content of message 2 is of type int"),
        ({"role": "user", "content": [{"text": "a"}]}, "has no type"),
        ({"role": "user", "content": [5]}, "has no type"),
        ({"role": "user", "content": [part(None)]}, "a text part of message 2 has no text"),
        ({"role": "user", "content": [part("a"), {"type": "image_url", "image_url": {}}]},
         "message 2 has a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "of type 'input_audio'"),
        ({"role": "user", "content": [{"type": "file"}]}, "of type 'file'"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "'refusal'"),
        (calling("{town"), "message 2 calls 'look' with arguments that are no JSON object: '{"),
        (calling("[1]"), "arguments that are no JSON object: '[1]'; mend them"),
        (calling(5), "arguments that are no JSON object: 5"),
        (calling("[" * 9000), "nests too deeply: 64 levels"),
        ({"role": "assistant", "content": "a", "tool_calls": {"id": 1}}, "is no list of objects"),
        ({"role": "assistant", "content": "a", "tool_calls": ["look"]}, "is no list of objects"),
    ],
)  # fmt: skip
def test_messages_without_text_are_refused_by_name(message: Any, cause: str) -> None:
    bad = row_of(custom_id="a", messages=[USER, message])
    assert isinstance(bad, BadRow)
    assert bad.custom_id == "a"
    assert cause in bad.error


def test_fields_that_say_nothing_are_not_given_to_templates() -> None:
    """Rows stay as they were written, so that jobs of older versions know them again."""
    silent = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    written = [
        {**USER, "name": None},
        {"role": "assistant", "content": "yes", "tool_calls": [], **silent},
        {"role": "assistant", "content": "", "tool_calls": None, "reasoning_content": "so"},
    ]
    row = row_of(custom_id="a", messages=written)
    assert isinstance(row, Row)
    assert row.content["messages"] == tuple(written)
    assert row.tokenizing["chat"] == [
        USER,
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]


def test_an_assistant_that_calls_tools_needs_no_content() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    answered = {"role": "tool", "tool_call_id": "1", "content": [part("5")]}
    row = row_of(custom_id="a", messages=[USER, asked, answered])
    assert isinstance(row, Row)
    assert row.messages == (USER, asked, {**answered, "content": "5"})


NEUTRAL: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"logprobs": False},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": None},
        {"frequency_penalty": 0, "presence_penalty": 0},
        {"n": 1},
        {"stream": False, "stream_options": None},
        {"logit_bias": {}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"functions": [], "function_call": "auto"},
        {"store": False, "service_tier": "auto", "metadata": {"a": "b"}, "user": "me"},
        {"modalities": ["text"], "audio": None, "prediction": None, "verbosity": "medium"},
        {"reasoning_effort": None, "web_search_options": None, "seed": None, "stop": None},
    ],
    COMPLETIONS: [
        {"best_of": 1, "echo": False, "suffix": None, "logprobs": None, "n": 1},
        {"suffix": "", "stream": False, "frequency_penalty": 0.0},
    ],
}


@pytest.mark.parametrize(("url", "fields"), [(u, f) for u, group in NEUTRAL.items() for f in group])
def test_values_that_ask_for_nothing(url: str, fields: dict[str, Any]) -> None:
    row = batch_line(url, **fields)
    assert isinstance(row, Row), row
    plain = row_of(prompt="Hi", **{k: v for k, v in fields.items() if k != "messages"})
    assert isinstance(plain, Row)
    if not {"logit_bias", "frequency_penalty"} & fields.keys():
        assert row.sampling == {}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logprobs": True}, (0, None)),
        ({"logprobs": True, "top_logprobs": 3.0}, (3, None)),
        ({"logprobs": 0, "prompt_logprobs": 20}, (0, 20)),
        ({"logprobs": None, "extra_body": {"prompt_logprobs": 0}}, (None, 0)),
        ({"sampling_params": {"logprobs": 4, "prompt_logprobs": None}}, (4, None)),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_log_probabilities_that_are_asked_for(
    url: str, fields: dict[str, Any], wanted: tuple[int | None, int | None]
) -> None:
    """Rows that ask for others are no longer the same."""
    row, plain = batch_line(url, **fields), batch_line(url)
    assert isinstance(row, Row)
    assert isinstance(plain, Row)
    assert (row.logprobs, row.prompt_logprobs) == wanted
    assert row.content != plain.content
    assert "logprobs" not in plain.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": -1}, "logprobs is -1; it must be a whole number from 0 to 20"),
        ({"logprobs": 21}, "logprobs is 21; it must be"),
        ({"logprobs": "yes"}, "logprobs is 'yes'; it must be"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs is True; it must be"),
        ({"top_logprobs": 5}, "top_logprobs has no effect unless logprobs is true"),
        ({"logprobs": 5, "top_logprobs": 5}, "top_logprobs has no effect unless"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be a whole number from 0 to 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True; it must be"),
        ({"prompt_logprobs": [1]}, "prompt_logprobs is [1]; it must be"),
        ({"n": 129}, "n is 129; it must be a whole number from 1 to 128"),
        ({"n": True}, "n is True; it must be"),
        ({"best_of": 3}, "best_of must be 1"),
        ({"echo": True}, "echo must be false"),
        ({"suffix": "end"}, "suffix must be"),
        (
            {"response_format": {"type": "xml"}},
            "response_format is {'type': 'xml'}; its type must be",
        ),
        ({"tools": [5]}, "tools is [5]; it must be a list of objects"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; it must be"),
        ({"modalities": ["text", "audio"]}, "the answer is text"),
        ({"audio": {"voice": "a"}}, "the answer is text"),
        ({"reasoning_effort": "low"}, "ask for it in the prompt"),
        ({"tools": "x" * 10**6}, "tools is 'xxx"),
    ],
)
def test_values_that_ask_for_what_is_not_done(fields: dict[str, Any], message: str) -> None:
    for bad in (batch_line(**fields), row_of(custom_id="a", prompt="Hi", **fields)):
        assert isinstance(bad, BadRow)
        assert message in bad.error
        assert len(bad.error) < 700


def test_a_body_has_no_fields_of_its_own() -> None:
    for fields, message in (
        ({"surprise": 1}, "unknown field 'surprise'; known: "),
        ({"max_token": 5}, "unknown field 'max_token'; is max_tokens meant?"),
    ):
        bad = batch_line(**fields)
        assert isinstance(bad, BadRow)
        assert message in bad.error


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 5, "max_completion_tokens": 7}, {"seed": 1, "sampling": {"seed": 2}}],
)
def test_a_field_that_is_given_twice_otherwise_is_refused(fields: dict[str, Any]) -> None:
    row = row_of(custom_id="a", prompt="x", **fields)
    assert isinstance(row, BadRow)
    assert "is given twice, as" in row.error
    assert isinstance(row_of(prompt="x", max_tokens=5, sampling={"max_new_tokens": 5}), Row)


def test_long_ids_are_named_by_their_place() -> None:
    row = row_of(custom_id="i" * MAX_ID_CHARACTERS, prompt="Hi")
    assert isinstance(row, Row)
    bad = row_of(custom_id="i" * 10**7, prompt="Hi")
    assert isinstance(bad, BadRow)
    assert bad.custom_id == "f:1"
    assert bad.error.endswith("has 10000000 characters; give it at most 1000")
    assert len(bad.error) < 200


def test_messages_show_the_beginning_of_an_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "i" * MAX_ID_CHARACTERS
    row = {"custom_id": long, "prompt": "a"}
    texts = []
    with pytest.raises(InputError) as caught:
        list(rows_of([row, row]))
    texts.append(str(caught.value))
    source = write_prompts(tmp_path / "in.jsonl", row, row)
    with pytest.raises(InputError) as caught:
        run_job(source, tmp_path / "out.jsonl")
    texts.append(str(caught.value))
    write_prompts(source, {**row, "prompt": "b", "n": 0})
    with pytest.raises(InputError) as caught:
        run_job(source, tmp_path / "out.jsonl", job_options=JobOptions(stop_at_error=True))
    texts.append(str(caught.value))
    write_prompts(source, row)
    run_job(source, tmp_path / "out.jsonl")
    write_prompts(source, {**row, "prompt": "b"}, *prompts(1))
    with pytest.raises(InputError) as caught:
        run_job(source, tmp_path / "out.jsonl")
    texts.append(str(caught.value))
    for text in texts:
        assert "iiii" in text
        assert "i" * 81 not in text


def test_a_field_that_nests_as_deep_as_can_be_read() -> None:
    for depth in range(700, 1000, 10):
        nested = "[" * depth + "]" * depth
        for name in ("tools", "custom_id", "stop", "messages"):
            line = f'{{"custom_id": "a", "prompt": "Hi", "{name}": {nested}}}'
            assert isinstance(row_from_line(line.encode(), "f:1"), BadRow)


def test_seconds_of_a_row_are_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--plan", "p.json", "--input", "in.jsonl", "--output", "out.jsonl"]
    assert run_cli.main([*arguments, "--row-s", "0"]) == 2
    assert "row_s is 0" in capsys.readouterr().err
