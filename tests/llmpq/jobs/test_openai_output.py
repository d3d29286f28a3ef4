"""Results as lines of OpenAI's batches: their form, and a job that goes on from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from llmpq.jobs.file_format import input_format, numbered_lines
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, open_output
from llmpq.jobs.overview.overview import overview_of
from llmpq.jobs.overview.places import find_job
from llmpq.jobs.result_lines import openai_line
from llmpq.jobs.same_rows import SharedResults
from llmpq.jobs.store import JobIdentity
from llmpq.rows.answers import ChatForm, CompletionForm, TokenText
from llmpq.rows.results import GENERATIONS, LOGPROBS, PROMPT_LOGPROBS, Result
from llmpq.rows.row import BadRow, Row
from llmpq.workload.measured_lengths import read_measured
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    IDENTITY,
    SMALL_SHARDS,
    prompts,
    read_rows,
    run_job,
    write_prompts,
)
from tests.llmpq.serve.asking import CHAT, COMPLETIONS, chat, completion, run
from tests.llmpq.serve.batches.world import world

OPENAI = replace(SMALL_SHARDS, output_format="openai")
AFTER_INPUT = replace(SMALL_SHARDS, default_format="openai")
PRINT = f"{IDENTITY.model}-{'5' * 20}"


def batch_line(custom_id: str, prompt: str, **beside: object) -> dict[str, Any]:
    body = {"model": "any", "prompt": prompt}
    envelope = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}
    return envelope | beside


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(lines: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    return {
        line["custom_id"]: line["response"] and line["response"]["body"]["choices"][0]["text"]
        for line in lines
    }


def shape(value: Any) -> Any:
    """Names and types of a JSON value."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("is_chat", [False, True])
def test_answers_are_those_of_openai_and_of_the_server(is_chat: bool, tmp_path: Path) -> None:
    result = Result("a", "Hé\u2028llo", (7, 8, 9), "stop", prompt_tokens=5)
    line = json.loads(openai_line(result, PRINT, "m-7B", is_chat))
    body = line["response"]["body"]
    if is_chat:
        whole = ChatCompletion.model_validate(body, strict=True)
        assert whole.choices[0].message.content == "Hé\u2028llo"
    else:
        assert Completion.model_validate(body, strict=True).choices[0].text == "Hé\u2028llo"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert body["model"] == "m-7B"
    assert body["choices"][0]["finish_reason"] == "stop"

    async def scenario() -> None:
        url = CHAT if is_chat else COMPLETIONS
        asked = {"method": "POST", "url": url, "body": chat() if is_chat else completion()}
        async with world(tmp_path) as made:
            bad = {"custom_id": "bad", "url": "/v1/embeddings", "method": "POST", "body": {}}
            begun = await made.begun([{"custom_id": "a", **asked}, bad], endpoint=url)
            batch = await made.finished(begun)
            (served,) = await made.lines(batch["output_file_id"])
            (refused,) = await made.lines(batch["error_file_id"])
        assert shape(line) == shape(served)
        assert list(line) == list(served)
        ours = Result("bad", None, (), None, "url is '/v1/embeddings'")
        error = json.loads(openai_line(ours, PRINT, "m", False))
        assert shape(error) == shape(refused)
        assert error["error"]["code"] == refused["error"]["code"]

    run(scenario)


def test_lines_of_rows_that_are_unlike_others() -> None:
    ran = Result("a", None, (1,), None, "not finite", prompt_tokens=3)
    assert json.loads(openai_line(ran, PRINT, "m", False))["error"] == {
        "code": "generation_failed",
        "message": "not finite",
    }
    alike = [Result(name, "x", (1,), "stop", prompt_tokens=1) for name in ("a", "b")]
    ids = {json.loads(openai_line(each, PRINT, "m", False))["id"] for each in alike}
    assert len(ids) == 2
    without_tokenizer = Result("a", None, (4, 5), "length", prompt_tokens=1)
    body = json.loads(openai_line(without_tokenizer, PRINT, "m", False))["response"]["body"]
    assert Completion.model_validate(body).choices[0].text == ""
    assert body["choices"][0]["token_ids"] == [4, 5]
    columns = {"topic": [1], "id": 7, "input_id": 8, "response": None}
    line = json.loads(openai_line(replace(alike[0], columns=columns), PRINT, "m", False))
    assert line["topic"] == [1]
    assert (line["input_id"], line["input_input_id"]) in ((7, 8), (8, 7))
    assert line["input_response"] is None
    assert line["response"]["status_code"] == 200


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_stand_where_a_server_puts_them(is_chat: bool) -> None:
    token = TokenText("x", 0, -0.5, (("x", -0.5), ("é", -1.5)))
    told = (ChatForm if is_chat else CompletionForm).logprobs([token])
    of_prompt = [None, {"7": {"logprob": -3.0, "rank": 4, "decoded_token": "a"}}]
    columns = {LOGPROBS: told, PROMPT_LOGPROBS: of_prompt, "topic": 1}
    result = Result("a", "x", (7,), "length", columns=columns, prompt_tokens=2)
    line = json.loads(openai_line(result, PRINT, "m", is_chat))
    body = line["response"]["body"]
    whole: Any = (ChatCompletion if is_chat else Completion).model_validate(body, strict=True)
    assert whole.choices[0].to_dict()["logprobs"] == told
    beside = body if is_chat else body["choices"][0]
    assert beside["prompt_logprobs"] == of_prompt
    assert line["topic"] == 1
    assert {"logprobs", "prompt_logprobs"}.isdisjoint(line)
    shared = SharedResults([PRINT])
    shared.note_finished([line])
    again = shared.of(Row("b", text="x"), PRINT)
    assert again is not None
    assert {name: again.columns[name] for name in (LOGPROBS, PROMPT_LOGPROBS)} == {
        LOGPROBS: told,
        PROMPT_LOGPROBS: of_prompt,
    }
    shared.close()


def test_several_answers_are_choices(tmp_path: Path) -> None:
    made = [
        {"index": n, "text": text, "token_ids": [1] * (n + 1), "finish_reason": "stop"}
        for n, text in enumerate(("one", "two", "three"))
    ]
    columns = {GENERATIONS: made, "topic": "sums"}
    result = Result("a", "one", (1,), "stop", columns=columns, prompt_tokens=5)
    for is_chat in (False, True):
        line = json.loads(openai_line(result, PRINT, "m", is_chat))
        body = line["response"]["body"]
        whole: Any = (ChatCompletion if is_chat else Completion).model_validate(body, strict=True)
        texts = [each.message.content if is_chat else each.text for each in whole.choices]
        assert texts == ["one", "two", "three"]
        assert [each.index for each in whole.choices] == [0, 1, 2]
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        assert list(line)[-1] == "topic"
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    assert read_measured(tmp_path / "lines.jsonl").outputs == {"a": 2}  # their mean


def test_reasoning_stands_in_the_message() -> None:
    columns = {"reasoning_content": "as 2 + 2", "topic": "sums"}
    result = Result("a", "4", (1, 2), "stop", columns=columns, prompt_tokens=3)
    line = json.loads(openai_line(result, PRINT, "m", is_chat=True))
    message = line["response"]["body"]["choices"][0]["message"]
    assert message["content"] == "4"
    assert message["reasoning_content"] == "as 2 + 2"
    assert "reasoning_content" not in line
    assert line["topic"] == "sums"
    none = replace(result, columns={"reasoning_content": None})
    line = json.loads(openai_line(none, PRINT, "m", is_chat=True))
    assert "reasoning_content" not in line["response"]["body"]["choices"][0]["message"]
    assert "reasoning_content" not in line


def test_calls_stand_in_the_message() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = Result("a", "", (1, 2), "tool_calls", columns={"tool_calls": [call]}, prompt_tokens=3)
    line = json.loads(openai_line(result, PRINT, "m", is_chat=True))
    (choice,) = ChatCompletion.model_validate(line["response"]["body"], strict=True).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.model_dump()["tool_calls"] == [call]
    assert "tool_calls" not in line


@pytest.mark.parametrize("target", ["out.jsonl", "out.jsonl.gz", "folder/"])
def test_every_row_comes_once_through_stops(target: str, tmp_path: Path) -> None:
    given = [batch_line(f"q{n}", f"prompt {n}") for n in range(9)]
    given += [batch_line("no", "bad one"), "{", batch_line("chat", "", url="/v1/embeddings")]
    source = write_prompts(tmp_path / "in.jsonl", *given)
    output = f"{tmp_path}/{target}"
    for limit in (3, 0, 4):
        run_job(source, output, OPENAI, limit=limit)
    assert run_job(source, output, AFTER_INPUT).resumed == 7
    write_prompts(tmp_path / "in.jsonl", *given[:9], batch_line("no", "good one"), *given[10:])
    run_job(source, output, SMALL_SHARDS, job_options=JobOptions(retry_errors=True))
    again = run_job(source, output, SMALL_SHARDS)
    assert (again.rows, again.resumed, again.resumed_errors) == (12, 12, 2)
    files = JobInput.find([tmp_path / target]).files
    lines = (numbered_lines(each, input_format(each).compression) for each in files)
    found = [json.loads(line or b"") for _, line in chain.from_iterable(lines)]
    expected: dict[str, str | None] = {f"q{n}": f"prompt {n}"[::-1] for n in range(9)}
    assert texts_of(found) == expected | {"no": "eno doog", "in.jsonl:11": None, "chat": None}
    assert len(found) == 12
    errors = overview_of(find_job(tmp_path / target)).error_kinds
    assert sum(kind.count for kind in errors) == 2
    assert any("not JSON" in kind.what for kind in errors)


def test_a_job_keeps_the_form_that_it_was_begun_with(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *prompts(6))
    target = tmp_path / "out.jsonl"
    run_job(source, target, SMALL_SHARDS, limit=3)
    manifest = tmp_path / "out.jsonl.job" / "job.json"
    older = json.loads(manifest.read_text())
    del older["output_format"]
    manifest.write_text(json.dumps(older))
    for options in (OPENAI, replace(OPENAI, default_format="openai")):
        with pytest.raises(InputError, match="with output_format 'rows', this job has 'openai'"):
            run_job(source, target, options)
    run_job(source, target, AFTER_INPUT)
    assert all("token_ids" in row for row in lines_of(target))
    run_job(source, target, replace(OPENAI, overwrite=True))
    assert set(texts_of(lines_of(target))) == {f"q{n}" for n in range(6)}
    manifest.unlink()
    with pytest.raises(InputError, match="another output_format; pass --output_format openai"):
        run_job(source, target, SMALL_SHARDS)
    assert run_job(source, target, AFTER_INPUT).resumed == 6
    broken = json.loads(manifest.read_text()) | {"output_format": "xml"}
    manifest.write_text(json.dumps(broken))
    with pytest.raises(InputError, match="output_format is 'xml', this llmpq writes rows and"):
        run_job(source, target, SMALL_SHARDS)


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "out.parquet"])
def test_a_table_holds_rows(name: str, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", batch_line("a", "x"))
    with pytest.raises(InputError, match="would be a table, and OpenAI's lines are none; name"):
        run_job(source, tmp_path / name, OPENAI)
    run_job(source, tmp_path / name, AFTER_INPUT)
    assert run_job(source, tmp_path / name, AFTER_INPUT).resumed == 1


def test_a_pipe_takes_lines_too(tmp_path: Path) -> None:
    with open_output("/dev/null", AFTER_INPUT, ()) as output:
        assert output.output_format == "openai"
        assert output.write(Result("a", "x", (1,), "stop", prompt_tokens=1), is_chat=True)


def test_lengths_are_read_from_lines(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *prompts(12), {"custom_id": "e", "prompt": "bad"})
    run_job(source, tmp_path / "rows.jsonl", SMALL_SHARDS)
    run_job(source, tmp_path / "lines.jsonl", OPENAI)
    ours = read_measured(tmp_path / "lines.jsonl").outputs
    assert ours == read_measured(tmp_path / "rows.jsonl").outputs
    assert len(ours or ()) == 12


@pytest.mark.parametrize(
    ("rows", "is_batch"),
    [
        ([batch_line("a", "x"), {"prompt": "x"}], True),
        ([{"prompt": "x"}, batch_line("a", "x")], False),
        (["{", "[1]", batch_line("a", "x")], True),
        ([{"prompt": "x", "body": "mine"}], False),
        (["x"], False),
    ],
)
def test_the_first_row_tells_whether_lines_are_asked(
    rows: list[Any], is_batch: bool, tmp_path: Path
) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    assert JobInput.find([source]).begins_with_batch_line() is is_batch
    objects = [row for row in rows if isinstance(row, dict)]
    (tmp_path / "in.json").write_text(json.dumps(objects, indent=1))
    assert JobInput.find([tmp_path / "in.json"]).begins_with_batch_line() is is_batch


def test_addresses_of_lines(tmp_path: Path) -> None:
    asked: list[Any] = [None, CHAT, COMPLETIONS, "/chat/completions", "https://h/v1/completions"]
    wrong: list[Any] = ["/v1/embeddings", "/v1/responses", "", 5]
    given = [batch_line(f"q{n}", "x", url=url) for n, url in enumerate(asked + wrong)]
    found = read_rows(write_prompts(tmp_path / "in.jsonl", *given))
    assert [type(row) for row in found] == [Row] * len(asked) + [BadRow] * len(wrong)
    for row, url in zip(found[len(asked) :], wrong, strict=True):
        assert isinstance(row, BadRow)
        assert f"url is {url!r}; lines are answered that ask /v1/chat/completions or" in row.error


def test_fingerprints_of_lines_are_those_of_rows(tmp_path: Path) -> None:
    """Whatever the model: a job of another one is told, as for rows."""
    source = write_prompts(tmp_path / "in.jsonl", *prompts(2))
    run_job(source, tmp_path / "out.jsonl", OPENAI)
    (tmp_path / "out.jsonl.job" / "job.json").unlink()
    other = JobIdentity("f" * 12, "other", IDENTITY.sampling)
    with pytest.raises(InputError, match="was made by another model"):
        run_job(source, tmp_path / "out.jsonl", OPENAI, identity=other)
