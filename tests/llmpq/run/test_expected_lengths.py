"""Requests of a run with the lengths that are expected of them, whatever a predictor does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Finished, Request, Sampling
from llmpq import Plan
from llmpq.lengths.predictor import Known, Prompt
from llmpq.lengths.sources import (
    Direct,
    PredictionFigures,
    PredictorProcess,
    open_source,
    wait_loaded,
)
from llmpq.rows.row import BadRow
from llmpq.run.engine import RunResources
from llmpq.run.expected_lengths import AHEAD, TOGETHER, ExpectedLengths, figures_text
from llmpq.run.options import RunOptions
from planner.scheduling import PolicyOptions
from quant.common.errors import InputError, SpecError
from tests.llmpq.lengths.learnable import by_prompt_length, expected_by_hand, saved

NO_TOKENIZER = 64


def request(number: int) -> Request:
    return Request(f"r{number}", tuple(range(1 + number % 12)), 15 + number % 30, Sampling())


def by_hand(made: Request) -> int:
    return expected_by_hand(Prompt(made.custom_id, made.max_new_tokens, made.prompt_ids))


def no_texts(ids: Sequence[tuple[int, ...]]) -> list[str]:
    raise AssertionError("the predictor reads no texts")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[PredictorProcess]:
    with closing(PredictorProcess(saved(tmp_path / "p"))) as process:
        process.wait()
        yield process


def test_requests_keep_their_order_and_get_their_lengths(process: PredictorProcess) -> None:
    """Rows that cannot run among them, and more rows than are ahead at a time."""
    said: list[str] = []
    items: list[Request | BadRow] = [
        BadRow(f"r{n}", "bad") if n % 7 == 3 else request(n) for n in range(300)
    ]
    lengths = ExpectedLengths(process, no_texts, said.append)
    found = list(lengths.attach(items))
    assert [each.custom_id for each in found] == [each.custom_id for each in items]
    for item, made in zip(items, found, strict=True):
        if isinstance(item, Request):
            assert made == replace(item, expected_tokens=by_hand(item))
        else:
            assert made is item
    lengths.note([Finished("r0", (1,) * 3, "stop"), Finished("r1", (), "error", "x")])
    figures = process.figures()
    assert figures is not None
    assert (figures.finished, figures.right) == (1, 1)
    assert said == []


def test_rows_are_read_ahead_but_not_without_end() -> None:
    read: list[int] = []

    def rows() -> Iterator[Request]:
        for number in range(10_000):
            read.append(number)
            yield request(number)

    lengths = ExpectedLengths(Direct(Known({"r0": 3})), no_texts, print)
    first = next(iter(lengths.attach(rows())))
    assert isinstance(first, Request)
    assert first.expected_tokens == 3
    assert len(read) <= TOGETHER * (AHEAD + 1)


def test_texts_are_made_for_those_that_read_them() -> None:
    class Reader(Direct):
        reads_text = True

        def submit(self, prompts: Sequence[Prompt]) -> Any:
            assert [each.text for each in prompts] == ["2", "3"]
            return super().submit(prompts)

    def texts(ids: Sequence[tuple[int, ...]]) -> list[str]:
        return [str(len(each)) for each in ids]

    lengths = ExpectedLengths(Reader(Known({"r1": 4})), texts, print)
    found = list(lengths.attach([request(1), request(2)]))
    assert [each.expected_tokens for each in found if isinstance(each, Request)] == [4, 17]


def test_a_lost_predictor_is_said_once_and_the_rows_go_on(process: PredictorProcess) -> None:
    said: list[str] = []
    lengths = ExpectedLengths(process, no_texts, said.append)
    found: list[Request | BadRow] = []
    for item in lengths.attach(map(request, range(400))):
        found.append(item)
        if len(found) == 40:
            os.kill(process.pid, signal.SIGKILL)
    assert len(found) == 400
    expected = [each.expected_tokens for each in found if isinstance(each, Request)]
    assert expected[:32] == [by_hand(request(n)) for n in range(32)]
    assert expected[-200:] == [request(n).max_new_tokens for n in range(200, 400)]
    lengths.note([Finished("r0", (1,), "stop")])
    lengths.end(None)
    assert len(said) == 1
    assert "its process ended (exit code -9)" in said[0]


def test_the_figures_are_a_sentence() -> None:
    figures = PredictionFigures(90, 80, 60, 0.5, 1.5, 2, 1, None, 100.0)
    assert figures_text(figures) == (
        "60 of 80 answers had the length that was predicted; the predictor was improved 2 times; "
        "it took 2.0 s of a processor (2.0% of the time)"
    )
    failed = replace(figures, learnt=0, failure="SpecError: scikit-learn grows the trees")
    assert "it could not learn (SpecError: scikit-learn grows" in figures_text(failed)


def test_what_was_learnt_is_written_where_that_is_wanted(
    process: PredictorProcess, tmp_path: Path
) -> None:
    said: list[str] = []
    lengths = ExpectedLengths(process, no_texts, said.append)
    list(lengths.attach([request(0)]))
    lengths.end(tmp_path / "learnt")
    assert (tmp_path / "learnt" / "predictor.json").is_file()
    assert "0 of 0 answers" in said[0]
    assert "was written to" in said[1]
    (tmp_path / "file").write_text("")
    lengths.end(tmp_path / "file")
    assert "something else is there" in said[-1]


def test_sources_by_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("custom_id,expected_tokens\na,3\n")
    prompts = [Prompt("a", 9), Prompt("b", 9)]
    longest = open_source("longest", tmp_path, NO_TOKENIZER)
    assert longest.submit(prompts).result() == [9, 9]
    trace = open_source(f"trace:{tmp_path / 't.csv'}", tmp_path, NO_TOKENIZER)
    assert trace.submit(prompts).result() == [3, 9]
    with pytest.raises(InputError, match="nothing was learnt"):
        trace.save(tmp_path / "p")
    with pytest.raises(SpecError, match="is no folder; give one of llmpq lengths train, longest"):
        open_source(tmp_path / "none", tmp_path, NO_TOKENIZER)


def test_a_predictor_of_texts_needs_a_tokenizer(tmp_path: Path) -> None:
    class Reader(Direct):
        reads_text = True

    with pytest.raises(SpecError, match="the model has no tokenizer"):
        wait_loaded(Reader(Known({})), has_tokenizer=False)
    wait_loaded(Reader(Known({})), has_tokenizer=True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy": "orca", "predictor": "longest"}, "predictor has no effect beside policy orca"),
        ({"policy": "static", "predictor": "p"}, "only s3 goes by expected lengths"),
        ({"policy": "s3", "save_predictor": "p"}, "save_predictor is 'p', but predictor 'None'"),
        (
            {"policy": "s3", "predictor": "trace:t.csv", "save_predictor": "p"},
            "learns nothing",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        RunOptions.of(given)


def test_a_predictor_beside_a_plan_of_another_policy_is_refused(plan: Plan) -> None:
    with pytest.raises(SpecError, match="predictor has no effect with policy static"):
        plan.run([[1]], predictor="longest")


@pytest.mark.parametrize("planned", ["orca", "s3"])
def test_the_limits_of_the_plan_hold_under_either_policy_of_tokens(
    plan: Plan, planned: Any
) -> None:
    policy = PolicyOptions(planned, max_batch_size=7, prefill_chunk_tokens=9)
    spec = replace(plan.spec, policy=policy)
    found = RunOptions(policy="s3").scheduling(spec)
    assert (found.name, found.max_batch_size, found.prefill_chunk_tokens) == ("s3", 7, 9)


def test_what_is_wrong_with_a_predictor_is_said_before_anything_starts(
    plan: Plan, tmp_path: Path
) -> None:
    """Another tokenizer, a trace with NaN, a damaged file, and a folder that cannot be written."""
    folder = saved(tmp_path / "p", by_prompt_length("another"))
    (tmp_path / "t.csv").write_text("custom_id,expected_tokens\na,nan\n")
    for predictor, named in (
        (folder, r"another tokenizer \(another\)"),
        (f"trace:{tmp_path / 't.csv'}", "expected_tokens is 'nan'"),
        (tmp_path, "cannot be read as JSON"),
    ):
        with pytest.raises(SpecError, match=named):
            RunResources(plan.spec, RunOptions(policy="s3", predictor=predictor))


async def expected_alone(lengths: ExpectedLengths, made: Sequence[Request]) -> list[int]:
    asked = (Prompt(each.custom_id, each.max_new_tokens, each.prompt_ids) for each in made)
    return list(await asyncio.gather(*map(lengths.expect, asked)))


def test_requests_that_come_by_themselves_get_their_lengths_at_once(
    process: PredictorProcess,
) -> None:
    """Until the predictor dies, which is said once."""
    said: list[str] = []
    lengths = ExpectedLengths(process, no_texts, said.append, "the server")
    made = [request(n) for n in range(40)]
    assert asyncio.run(expected_alone(lengths, made)) == [by_hand(each) for each in made]
    os.kill(process.pid, signal.SIGKILL)
    longest = [each.max_new_tokens for each in made[:9]]
    assert asyncio.run(expected_alone(lengths, made[:9])) == longest
    (text,) = said
    assert "exit code -9" in text
    assert "the server goes on" in text


def test_no_request_waits_long_for_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmpq.run.expected_lengths.WAIT_S", 0.01)
    source = Direct(Known({}))
    monkeypatch.setattr(source, "submit", lambda prompts: Future())
    lengths = ExpectedLengths(source, no_texts, print)
    assert asyncio.run(expected_alone(lengths, [request(1), request(2)])) == [16, 17]
