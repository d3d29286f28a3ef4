"""Rows between request and result: their own columns wait here, and none is left behind."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.logprobs import LogprobRows, TokenLogprobs
from actors.messages import Finished, Request, Sampling
from actors.stage.grammar import compiled, vocabulary_of
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import OpenJob
from llmpq.jobs.job_output import JobOutput
from llmpq.rows.results import CALLS, GENERATIONS, REASONING, Result
from llmpq.rows.row import BadRow, Row
from llmpq.run.meter import RunMeter
from llmpq.run.rows_in_flight import RowsInFlight
from llmpq.tokenizing.requests import RequestMaker, load_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits
from planner.workload import Workload
from tests.llmpq.fake_jobs import IDENTITY, SMALL_SHARDS, QuickDisk, results_in, write_prompts
from tests.llmpq.small_tokenizers import write_byte_tokenizer

SHORT, LONG = Workload(4, 8, 6), Workload(1, 64, 6)
ROWS = [
    Row("short", token_ids=(1, 2), columns={"topic": "s"}),
    Row("long", token_ids=(1,) * 60, columns={"topic": "l", "tags": ["x"]}),
    Row("too long", token_ids=(1,) * 99, columns={"topic": "t"}),
    BadRow("bad", "malformed", {"topic": "b"}),
    Row("stage", token_ids=(3,), columns={"topic": "e"}),
    Row("plain", token_ids=(4,)),
]


def ended(request: Request) -> Finished:
    failed = request.custom_id == "stage"
    return Finished(request.custom_id, (7,), "error" if failed else "length", "lost" * failed)


def test_every_result_has_the_columns_of_its_row() -> None:
    maker = RequestMaker(SHORT, 100, Sampling(), None, LONG)
    rows = RowsInFlight(maker, RunMeter(None, None))
    results: list[Result] = []
    requests = [each for each in rows.requests(maker.requests(rows.taken_in(ROWS))) if each]
    results += rows.bad_results()
    assert not any(hasattr(request, "columns") for request in requests)  # stages do not see them
    for request in (*requests, *rows.long_requests()):
        assert request is not None
        results += rows.results([ended(request)])
    found = {result.custom_id: (dict(result.columns), result.error) for result in results}
    assert {name: columns for name, (columns, _) in found.items()} == {
        row.custom_id: row.columns for row in ROWS
    }
    assert found["stage"][1] == "lost"
    assert found["bad"][1] == "malformed"
    assert "plan has room for 64" in str(found["too long"][1])
    lengths = {result.custom_id: result.prompt_tokens for result in results}
    ran = {"short": 2, "long": 60, "stage": 1, "plain": 1}
    assert lengths == {**ran, "too long": None, "bad": None}
    assert rows.columns_held == {}
    rows.long.close()


def test_a_row_of_several_answers_has_one_result() -> None:
    """Through the file of long rows too; a name that is like one of its requests is nobody's."""
    drawn = {"temperature": 1.0}
    given = [
        Row("a", token_ids=(1,), sampling=drawn, columns={"topic": "s"}, answers=3),
        Row("a\0001", token_ids=(2,)),
        Row("long", token_ids=(1,) * 60, sampling={**drawn, "seed": 3}, answers=2),
        Row("greedy", token_ids=(3,), answers=2),
        Row("broken", token_ids=(4,), sampling=drawn, answers=2),
    ]
    meter = RunMeter(len(given), None)
    maker = RequestMaker(SHORT, 100, Sampling(), None, LONG)
    rows = RowsInFlight(maker, meter)
    requests = [each for each in rows.requests(maker.requests(rows.taken_in(given))) if each]
    assert len({request.custom_id for request in requests}) == len(requests) == 3 + 1 + 1 + 2
    results: dict[str, Result] = {}
    began = [*reversed(requests)]
    for number, request in enumerate((*began, *rows.long_requests())):
        assert request is not None
        is_broken = request.draw_id == "broken-1"
        reason = "error" if is_broken else "length"
        made = Finished(request.custom_id, (number,), reason, "lost" * is_broken)  # type: ignore[arg-type]
        results |= {each.custom_id: each for each in rows.results([made])}
    assert set(results) == {row.custom_id for row in given}
    made_of = {
        name: [(each["index"], *each["token_ids"]) for each in row.columns.get(GENERATIONS) or ()]
        for name, row in results.items()
    }
    assert made_of["a"] == [(0, 6), (1, 5), (2, 4)]
    assert results["a"].token_ids == (6,)
    assert results["a"].columns["topic"] == "s"
    assert made_of["long"] == [(0, 7), (1, 8)]
    assert made_of["greedy"] == [(0, 2), (1, 2)]
    assert made_of["a\0001"] == []
    assert results["broken"].error == "answer 2 of 2: lost"
    assert results["broken"].columns == {GENERATIONS: None}
    assert (rows.ended, rows.errors, rows.in_flight, rows.tokens) == (5, 1, 0, 9)
    assert meter.state().prompts == 5
    assert rows.columns_held == {}
    rows.long.close()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("kept", range(7))
def test_a_stopped_job_has_each_answer_once(kept: int, tmp_path: Path) -> None:
    """Whatever part of a row's answers had ended: results are those of a job that ran through."""
    drawn: dict[str, Any] = {"temperature": 1.0}
    source = write_prompts(
        tmp_path / "in.jsonl",
        {"custom_id": "a", "prompt": [1], "n": 3, **drawn},
        {"custom_id": "b", "prompt": [2], "n": 2, "seed": 5, **drawn},
        {"custom_id": "c", "prompt": [3]},
    )

    def run(target: Path, limit: int) -> None:
        found = JobInput.find([source])
        with JobOutput(target, SMALL_SHARDS, (source,), QuickDisk()) as output:
            job = OpenJob(found, output, IDENTITY)
            maker = RequestMaker(SHORT, 100, Sampling(), None)
            rows = RowsInFlight(maker, RunMeter(None, None))
            requests = [each for each in rows.requests(maker.requests(rows.taken_in(job.todo())))]
            for request in random.Random(kept).sample(requests, min(limit, len(requests))):
                assert request is not None
                named = request.draw_id or request.custom_id
                ended = Finished(request.custom_id, tuple(named.encode()), "length")
                for result in rows.results([ended]):
                    job.write(result)
            if limit >= len(requests):
                job.finish()

    run(tmp_path / "out.jsonl", kept)
    run(tmp_path / "out.jsonl", 9)
    run(tmp_path / "other.jsonl", 9)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(lines) == 3
    assert found == results_in(tmp_path / "other.jsonl")
    made = [bytes(each["token_ids"]).decode() for each in found["a"]["generations"]]
    assert made == ["a-0", "a-1", "a-2"]
    made = [bytes(each["token_ids"]).decode() for each in found["b"]["generations"]]
    assert made == ["0", "1"]


def test_reasoning_of_chats_comes_beside_their_texts(tmp_path: Path) -> None:
    """Not of texts; an error row of a chat has the column too, so that tables have one for all."""
    template = "{{ messages[0].content }}"
    folder = write_byte_tokenizer(tmp_path / "m", (), ("<think>", "</think>"), template=template)
    with closing(load_tokenizer(folder, RowLimits())) as tokenizer:  # type: ignore[type-var]
        maker = RequestMaker(SHORT, 300, Sampling(), tokenizer, LONG)
        rows = RowsInFlight(maker, RunMeter(None, None))
        prompts = {"asked": "hi", "opened": "hi <think>\n", "long": "hi " * 15, "failed": "hi"}
        given = [
            Row(name, messages=({"role": "user", "content": text},), columns={"topic": name})
            for name, text in prompts.items()
        ]
        given.append(Row("text", text="hi"))
        requests = [each for each in rows.requests(maker.requests(rows.taken_in(given))) if each]
        answers = {"opened": "a</think>4", "failed": ""}
        found = {}
        for request in (*requests, *rows.long_requests()):
            assert request is not None
            answer = answers.get(request.custom_id, "<think>a</think>4")
            ids = tokenizer.ask({"text": answer}).ids  # type: ignore[union-attr]
            reason = "error" if request.custom_id == "failed" else "stop"
            (result,) = rows.results([Finished(request.custom_id, ids or (), reason)])
            found[result.custom_id] = result
    for name in ("asked", "opened", "long"):
        assert found[name].text == "4"
        assert found[name].columns == {REASONING: "a", "topic": name}
    assert found["failed"].columns == {REASONING: None, "topic": "failed"}
    assert found["text"].text == "<think>a</think>4"
    assert found["text"].columns == {}
    assert rows.columns_held == {}
    rows.long.close()


def test_an_answer_with_a_form_reasons_before_it(tmp_path: Path) -> None:
    """Where the prompt lets it; a closing marker within JSON is none."""
    template = "{{ messages[0].content }}"
    special = ("</s>", "<think>", "</think>")
    folder = write_byte_tokenizer(tmp_path / "m", special, template=template)
    form = Sampling(structured_outputs={"json": {"type": "string"}}).structured_outputs
    given = {
        "asked": ("hi", '<think>a</think>"4"', "a", '"4"'),
        "opened": ("hi <think>\n", 'a</think>"4"', "a", '"4"'),
        "cut": ("hi <think>", "a", "a", ""),
        "none": ("hi", '"</think>"', None, '"</think>"'),
        "closed": ("<think></think>", '"4"', None, '"4"'),
    }
    with closing(load_tokenizer(folder, RowLimits())) as tokenizer:  # type: ignore[type-var]
        maker = RequestMaker(LONG, 300, Sampling(structured_outputs=form), tokenizer)
        rows = RowsInFlight(maker, RunMeter(None, None))
        chats = [
            Row(name, messages=({"role": "user", "content": prompt},))
            for name, (prompt, *_) in given.items()
        ]
        requests = [each for each in rows.requests(maker.requests(rows.taken_in(chats))) if each]
        for request in requests:
            _, answer, reasoning, text = given[request.custom_id]
            kept = request.sampling.structured_outputs
            assert (kept == form) == (request.custom_id == "closed")
            pieces = [*answer] if request.custom_id == "none" else [answer]  # so that no marker is
            asked = [tokenizer.ask({"text": each}).ids for each in pieces]  # type: ignore[union-attr]
            ids = tuple(token for each in asked for token in each or ())
            matcher = compiled(kept, vocabulary_of(AutoTokenizer.from_pretrained(folder)))
            assert matcher.validate_tokens(list(ids)) == len(ids)
            (result,) = rows.results([Finished(request.custom_id, ids, "stop")])
            assert (result.text, result.columns[REASONING]) == (text, reasoning)
        text = next(maker.requests([Row("text", text="hi")]))
        assert isinstance(text, Request)
        assert text.sampling.structured_outputs == form


def test_calls_of_tools_come_beside_texts_and_reasoning(tmp_path: Path) -> None:
    """Only of rows that offer tools; through the file of long rows too, and null where none is."""
    template = "{{ messages[0].content }}{# tools <tool_call> <think></think> #}"
    folder = write_byte_tokenizer(tmp_path / "m", (), template=template)
    look = {"type": "function", "function": {"name": "look"}}
    offered = {"tools": [look]}
    made = '<tool_call>{"name": "look", "arguments": {"town": "Ulm"}}</tool_call>'
    given = {
        "asked": (offered, f"<think>a</think>See {made}", "stop"),
        "long": (offered, made * 2, "length"),
        "none": (offered, "4", "stop"),
        "failed": (offered, "", "error"),
        "plain": ({}, made, "stop"),
        "forced": ({**offered, "tool_choice": look}, '{"town": "Bonn"}', "stop"),
    }
    with closing(load_tokenizer(folder, RowLimits())) as tokenizer:  # type: ignore[type-var]
        maker = RequestMaker(SHORT, 300, Sampling(), tokenizer, LONG)
        rows = RowsInFlight(maker, RunMeter(None, None))
        chats = [
            Row(
                name,
                messages=({"role": "user", "content": "hi" + " " * 40 * (name == "long")},),
                prompt_options=options,
                sampling={"structured_outputs": '{"json":{}}'} if "tool_choice" in options else {},
            )
            for name, (options, _, _) in given.items()
        ]
        requests = [each for each in rows.requests(maker.requests(rows.taken_in(chats))) if each]
        found = {}
        for request in (*requests, *rows.long_requests()):
            assert request is not None
            _, text, reason = given[request.custom_id]
            ids = tokenizer.ask({"text": text}).ids or ()  # type: ignore[union-attr]
            (result,) = rows.results([Finished(request.custom_id, ids, reason)])  # type: ignore[arg-type]
            calls = [each["function"] for each in result.columns.get(CALLS) or ()]
            assert (CALLS in result.columns) == (request.custom_id != "plain")
            found[result.custom_id] = (result.text, result.finish_reason, calls)
            assert result.columns[REASONING] == ("a" if request.custom_id == "asked" else None)
    ulm = {"name": "look", "arguments": '{"town": "Ulm"}'}
    assert found == {
        "asked": ("See", "tool_calls", [ulm]),
        "long": ("", "length", [ulm, ulm]),
        "none": ("4", "stop", []),
        "failed": (None, None, []),
        "plain": (made, "stop", []),
        "forced": ("", "tool_calls", [{"name": "look", "arguments": '{"town": "Bonn"}'}]),
    }
    rows.long.close()


def test_log_probabilities_come_beside_texts_with_those_of_their_tokens(tmp_path: Path) -> None:
    """Of byte tokens, up to a stop string and without the end token; a failed row has null, and
    of several answers each has its own, the prompt's are there once. The file of long rows keeps
    what was asked for.
    """
    folder = write_byte_tokenizer(tmp_path / "m", ("</s>",))
    asks = {"logprobs": 1, "prompt_logprobs": 1}
    with closing(load_tokenizer(folder, RowLimits())) as tokenizer:  # type: ignore[type-var]
        ids = {text: tokenizer.ask({"text": text}).ids for text in ("ab", "xé!", "zz", "b" * 30)}  # type: ignore[union-attr]
        given = [
            Row("text", text="ab", sampling={"stop": ("!",)}, **asks),  # type: ignore[arg-type]
            Row("two", text="ab", sampling={"temperature": 1.0}, answers=2, **asks),  # type: ignore[arg-type]
            Row("chat", text="b" * 30, logprobs=0),
            Row("failed", text="ab", columns={"topic": 1}, **asks),  # type: ignore[arg-type]
        ]
        maker = RequestMaker(SHORT, 300, Sampling(), tokenizer, LONG)
        rows = RowsInFlight(maker, RunMeter(None, None))
        requests = [each for each in rows.requests(maker.requests(rows.taken_in(given))) if each]
        assert [each.prompt_logprobs for each in requests] == [1, 1, None, 1]
        found: dict[str, Result] = {}
        for request in (*requests, *rows.long_requests()):
            assert request is not None
            answer = ids["xé!"] or ()
            own = tuple(TokenLogprobs(-n / 2, ((answer[0], -0.1),), n + 1) for n in range(4))
            prompt = None
            if request.prompt_logprobs is not None:
                (after,) = request.prompt_ids[1:]
                prompt = LogprobRows(*map(np.array, ([1], [-3.0], [2], [[after + 1]], [[-0.25]])))
            is_failed = request.custom_id == "failed"
            reason = "error" if is_failed else "length"
            made = Finished(request.custom_id, answer, reason, None, own, prompt)  # type: ignore[arg-type]
            found |= {each.custom_id: each for each in rows.results([made])}
    told = found["text"].columns["logprobs"]
    assert found["text"].text == "xé"
    assert told["tokens"] == ["x", "\ufffd", "\ufffd"]
    assert told["token_logprobs"] == [0.0, -0.5, -1.0]
    assert told["text_offset"] == [0, 1, 1]
    assert told["top_logprobs"][1] == {"x": -0.1, "\ufffd": -0.5}
    first, second = (ids["ab"] or ())[1], (ids["ab"] or ())[1] + 1
    assert found["text"].columns["prompt_logprobs"] == [
        None,
        {
            str(first): {"logprob": -3.0, "rank": 2, "decoded_token": "b"},
            str(second): {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        },
    ]
    several = found["two"].columns[GENERATIONS]
    assert [each["logprobs"]["tokens"][-1] for each in several] == ["!", "!"]
    assert all("prompt_logprobs" not in each for each in several)
    assert found["two"].columns["prompt_logprobs"] == found["text"].columns["prompt_logprobs"]
    assert found["chat"].columns["logprobs"]["top_logprobs"][0] == {"x": -0.1}
    assert found["failed"].columns == {"logprobs": None, "prompt_logprobs": None, "topic": 1}
    assert rows.columns_held == {}
    rows.long.close()
