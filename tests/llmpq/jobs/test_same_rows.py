"""Rows that are the same: computed once with `dedupe`, and written each with its own columns."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Sampling
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, open_output
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.same_rows import SameShare
from llmpq.jobs.store import JobIdentity
from llmpq.rows.results import CALLS, GENERATIONS, REASONING, Result
from llmpq.rows.row import BadRow, Row, row_from_mapping
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import IDENTITY, SMALL_SHARDS, answer, results_in, write_prompts

pytestmark = pytest.mark.usefixtures("no_waiting")

DEDUPE = JobOptions(dedupe=True)
SUFFIXES = ("out.jsonl", "out.csv.gz", "out.parquet", "out/")


def rows() -> list[Any]:
    """Thirty rows of nine kinds in random order, of which drawn ones and bad ones are never the
    same as others.
    """
    kinds: list[dict[str, Any]] = [
        {"prompt": "one"},
        {"prompt": [1, 2]},
        {"prompt": "one", "max_new_tokens": 3},
        {"prompt": "one", "stop": ["x"]},
        {"messages": [{"role": "user", "content": "one"}]},
        {"prompt": "bad one"},
        {"prompt": "one", "temperature": 0.7},
        {"prompt": "one", "temperature": 0.7, "seed": 3},
        {"prompt": "one", "n": 0},
    ]
    made = [{**kinds[n % 9], "custom_id": f"q{n}", "number": n} for n in range(30)]
    random.Random(3).shuffle(made)
    return made


def run(
    source: Path,
    target: str,
    options: JobOptions = DEDUPE,
    identity: JobIdentity = IDENTITY,
    limit: int | None = None,
    form: OutputOptions = SMALL_SHARDS,
) -> Counter[str]:
    """Run a job as `llmpq run` does; returns how often each prompt was computed."""
    computed: Counter[str] = Counter()
    found = JobInput.find([source])

    def counted(left: Iterator[Row | BadRow]) -> Iterator[Row | BadRow]:
        for row in left:
            if isinstance(row, Row):
                computed[identity.fingerprint(row)] += 1
            yield row

    with open_output(target, form, ()) as output:
        job = OpenJob(found, output, identity, options)
        for number, result in enumerate(answer(counted(job.todo()))):
            if number == limit:
                return computed
            if job.write(replace(result, prompt_tokens=5)):
                assert result.custom_id
        for result in job.copies():
            job.write(result)
        job.finish()
    return computed


def plain(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without errors' texts, which name another row in copies, and ids of lines' times."""
    return {
        name: {**row, "error": row["error"] is not None and str(row["error"])[-6:]}
        for name, row in results.items()
    }


def target_in(folder: Path, name: str) -> tuple[str, Path]:
    folder.mkdir(exist_ok=True)
    return str(folder / name) + "/" * name.endswith("/"), folder / name


@pytest.mark.parametrize("name", SUFFIXES)
def test_each_row_has_the_result_that_it_has_without(tmp_path: Path, name: str) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *rows(), "{", "{")
    whole, without = target_in(tmp_path / "without", name)
    everything = run(source, whole, JobOptions())
    assert sum(everything.values()) == 30 - 3
    named, target = target_in(tmp_path / "with", name)
    computed = run(source, named)
    assert computed.keys() == everything.keys()
    assert sum(computed.values()) == 6 + 2 * 3
    assert plain(results_in(target)) == plain(results_in(without))
    assert not run(source, named)


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_stop_anywhere_loses_and_doubles_nothing(tmp_path: Path, name: str) -> None:
    """And what is committed is not computed again for rows that are the same."""
    source = write_prompts(tmp_path / "in.jsonl", *rows())
    whole, without = target_in(tmp_path / "without", name)
    run(source, whole, JobOptions())
    for limit in (1, 4, 7):
        named, target = target_in(tmp_path / f"stop-{limit}", name)
        total = run(source, named, limit=limit)
        total += run(source, named)
        assert plain(results_in(target)) == plain(results_in(without))
        # those that are computed again were in flight, failed, or are drawn
        again = {fingerprint for fingerprint, count in total.items() if count > 1}
        assert len(again - never_shared(rows())) <= 1
    half, target = target_in(tmp_path / "half", name)
    run(source, half, JobOptions(), limit=15)
    run(source, half)
    assert plain(results_in(target)) == plain(results_in(without))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_rows_that_come_later_take_results_of_a_finished_file(tmp_path: Path, name: str) -> None:
    given = rows()
    source = write_prompts(tmp_path / "in.jsonl", *given[:20])
    target = tmp_path / name
    run(source, str(target))
    write_prompts(source, *given)
    again = run(source, str(target), JobOptions(dedupe=True, extend=True))
    assert set(again) <= never_shared(given)
    assert len(results_in(target)) == 30


def never_shared(given: list[dict[str, Any]]) -> set[str]:
    """Fingerprints of rows that fail as they run, or are drawn."""
    made = (row_from_mapping(row, "here") for row in given)
    return {
        IDENTITY.fingerprint(row)
        for row in made
        if isinstance(row, Row) and (row.text == "bad one" or row.sampling.get("temperature"))
    }


def test_errors_name_the_row_that_failed(tmp_path: Path) -> None:
    twins = [{"custom_id": f"q{n}", "prompt": "bad twin", "number": n} for n in range(3)]
    source = write_prompts(tmp_path / "in.jsonl", *twins)
    target = tmp_path / "out.jsonl"
    assert sum(run(source, str(target)).values()) == 1
    errors = [row["error"] for row in results_in(target).values()]
    assert errors == ["failed", *["as row 'q0', which is the same: failed"] * 2]
    assert sum(run(source, str(target), JobOptions(retry_errors=True, dedupe=True)).values()) == 1


def test_lines_of_batches(tmp_path: Path) -> None:
    """Copies of committed answers, of which only the number of tokens is known, are the same."""
    bodies = [
        {"messages": [{"role": "user", "content": "one"}]},
        {"prompt": "one"},
        {"prompt": "two", "max_tokens": 3},
    ]
    lines = [
        {"custom_id": f"q{n}", "method": "POST", "url": "/v1/x", "body": bodies[n % 3], "number": n}
        for n in range(9)
    ]
    for line in lines:
        chat = "messages" in line["body"]
        line["url"] = "/v1/chat/completions" if chat else "/v1/completions"
    source = write_prompts(tmp_path / "in.jsonl", *lines)
    form = replace(SMALL_SHARDS, output_format="openai")
    run(source, str(tmp_path / "without.jsonl"), JobOptions(), form=form)
    run(source, str(tmp_path / "with.jsonl"), form=form, limit=2)
    assert sum(run(source, str(tmp_path / "with.jsonl"), form=form).values()) == 1
    found = [
        {row["custom_id"]: {**row, "response": without_times(row["response"])} for row in rows}
        for rows in map(lines_of, (tmp_path / "without.jsonl", tmp_path / "with.jsonl"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["rows", "openai"])
def test_several_answers_are_shared_too(tmp_path: Path, form: Any) -> None:
    """Also those of an earlier run, as they stand in its lines."""
    given = [{"custom_id": f"q{n}", "prompt": "one", "n": 2, "number": n} for n in range(3)]
    source = JobInput.find([write_prompts(tmp_path / "in.jsonl", *given)])
    made = {"text": "x", "token_ids": [5, 6], "finish_reason": "stop"}
    all_made = [{"index": index, **made} for index in range(2)]
    options = replace(SMALL_SHARDS, output_format=form, shard_rows=1)
    for part in range(2):
        with open_output(str(tmp_path / "out.jsonl"), options, ()) as output:
            job = OpenJob(source, output, IDENTITY, DEDUPE)
            computed = list(job.todo())
            assert len(computed) == 1 - part
            for row in computed:
                columns = {GENERATIONS: all_made, **row.columns}
                result = Result(row.custom_id, "x", (5, 6), "stop", None, columns, 3)
                assert job.write(result)
            if part:
                assert all(map(job.write, job.copies()))
                job.finish()
    lines = lines_of(tmp_path / "out.jsonl")
    assert [line["number"] for line in lines] == [0, 1, 2]
    if form == "rows":
        assert {tuple(each["text"] for each in line[GENERATIONS]) for line in lines} == {("x", "x")}
        return
    for line in lines:
        body = line["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == 4


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "body": {**response["body"], "created": 0}}


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MADE = {REASONING: "because", CALLS: [CALL]}


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "openai.jsonl"])
def test_what_an_answer_brings_is_copied_before_own_columns(tmp_path: Path, name: str) -> None:
    """From this run, and from a finished file."""
    twins = [
        {"custom_id": f"q{n}", "messages": [{"role": "user", "content": "x"}], "number": n}
        for n in range(4)
    ]
    form = replace(SMALL_SHARDS, output_format="openai" if name == "openai.jsonl" else "rows")
    source = write_prompts(tmp_path / "in.jsonl", twins[0])
    for given, count in ((twins[:2], 1), (twins, 2)):
        write_prompts(source, *given)
        with open_output(str(tmp_path / name), form, ()) as output:
            job = OpenJob(JobInput.find([source]), output, IDENTITY, replace(DEDUPE, extend=True))
            for result in answer(job.todo()):
                job.write(replace(result, columns={**MADE, **result.columns}, prompt_tokens=5))
            for result in job.copies():
                number = {"number": int(result.custom_id[1:])}
                assert list(result.columns.items()) == [*MADE.items(), *number.items()]
                job.write(result)
                count -= 1
            job.finish()
        assert count == 0


def test_a_job_that_draws_shares_nothing(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *({"prompt": "x", "number": n} for n in range(5)))
    identity = replace(IDENTITY, sampling=Sampling(max_new_tokens=8, temperature=0.5))
    assert sum(run(source, str(tmp_path / "out.jsonl"), identity=identity).values()) == 5


def test_a_job_knows_how_many_are_the_same(tmp_path: Path) -> None:
    """Of greedy rows that can run, with or without the option."""
    source = write_prompts(tmp_path / "in.jsonl", *rows())
    for options in (DEDUPE, JobOptions()):
        with open_output(str(tmp_path / "out.jsonl"), SMALL_SHARDS, ()) as output:
            job = OpenJob(JobInput.find([source]), output, IDENTITY, options)
            greedy = sum(n % 9 < 6 for n in range(30))
            assert job.same_share == 1 - 6 / greedy


@pytest.mark.parametrize("count", [1, 100, 60_000])
def test_the_share_of_same_rows(count: int) -> None:
    """Held against a count of all."""
    chance = random.Random(7)
    numbers = [chance.randrange(1, 4 * count) for _ in range(count)]
    prints = [f"m-{random.Random(number).randrange(16**20):020x}" for number in numbers]
    share = SameShare()
    for fingerprint in prints:
        share.add(fingerprint)
    exact = 1 - len(set(prints)) / count
    assert share.share == pytest.approx(exact, abs=0.0 if count <= 100 else 0.02)


def test_an_input_that_changes_before_results_are_shared(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", *({"prompt": "x", "number": n} for n in range(3)))
    with open_output(str(tmp_path / "out.jsonl"), SMALL_SHARDS, ()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY, DEDUPE)
        for result in answer(job.todo()):
            job.write(result)
        write_prompts(source, {"prompt": "y"})
        with pytest.raises(InputError, match="changed while it was read"):
            list(job.copies())
