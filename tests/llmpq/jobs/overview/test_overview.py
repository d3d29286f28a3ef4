"""What is seen of a job from outside, held against jobs that ran to where the test knows."""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from actors.stage_figures import LatencyCounts
from llmpq.jobs.job import JobOptions
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.overview.overview import JobOverview, overview_of
from llmpq.jobs.overview.places import BEAT_WITHIN_S, find_job, is_locked, jobs_in
from llmpq.jobs.overview.words import (
    beside,
    facts,
    lasted,
    rows_words,
    state_words,
    why_stopped,
)
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.store import JOURNAL
from llmpq.serve.batches.batch_job import BatchJob
from llmpq.serve.batches.lines import LineAnswer
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    IDENTITY,
    OVERWRITE,
    SMALL_SHARDS,
    QuickDisk,
    prompts,
    run_job,
    write_prompts,
)
from tests.llmpq.made_journals import (
    BEGAN,
    START,
    died,
    ended,
    failed_rows,
    session,
    write_journal,
)

BAD = {"custom_id": "bad", "prompt": "bad row"}


def look(output: Path, now: float | None = None) -> JobOverview:
    return overview_of(find_job(output), now)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Ten rows, of which one fails."""
    return write_prompts(tmp_path / "in.jsonl", *prompts(9), BAD)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.jsonl.gz", "out.parquet", "out/"])
def test_a_job_without_a_journal_tells_its_records(tmp_path: Path, source: Path, name: str) -> None:
    output = f"{tmp_path}/{name}"
    run_job(source, output, limit=4)
    job = look(Path(output))
    assert (job.state, job.rows, job.done, job.errors) == ("stopped", None, 4, 0)
    assert "no journal" in job.remarks[0]
    assert "the same command goes on" in why_stopped(job)
    run_job(source, output)
    job = look(Path(output))
    assert (job.state, job.rows, job.done, job.errors) == ("done", 10, 10, 1)
    assert [(kind.what, kind.count, kind.custom_id) for kind in job.error_kinds] == [
        ("failed", 1, "bad")
    ]
    assert state_words(job) == "done with 1 error"
    assert job.model == IDENTITY.model_name


def test_rows_that_a_kill_has_lost_are_not_done(tmp_path: Path, source: Path) -> None:
    """The journal has seen seven rows, of which three shards of two are on disk."""
    output = tmp_path / "out.jsonl"
    run_job(source, output, limit=6)
    entries = session(rows=7)
    entries[0] = replace(START, rows=10)
    write_journal(tmp_path / "out.jsonl.job", entries, beat_at=BEGAN + 33)
    job = look(output, BEGAN + 90)
    assert (job.state, job.done, job.left) == ("stopped", 6, 4)
    assert job.sessions[0].how == "killed"
    assert job.sessions[0].seconds == pytest.approx(33)  # the last sign of life
    assert "killed" in why_stopped(job)
    assert job.command == START.command
    assert job.errors == 0  # counted in the results
    run_job(source, output, limit=2)  # two more, in shards after the third one
    second = session(BEGAN + 100, rows=2)
    second[0] = replace(START, at=BEGAN + 100, rows=10, resumed=6, after=(1, 2))
    write_journal(tmp_path / "out.jsonl.job", [*entries, *second, ended(BEGAN + 131, "failed")])
    job = look(output, BEGAN + 190)
    assert (job.done, job.left, [each.rows for each in job.sessions]) == (8, 2, [7, 2])


def test_errors_by_kind_of_the_sessions_that_count(tmp_path: Path, source: Path) -> None:
    """Errors that ran again do not count any more."""
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    first = [*session(rows=10), failed_rows(BEGAN + 30, 3, "prompt has 77 tokens")]
    second = [*session(BEGAN + 90, rows=3, resumed=7), failed_rows(BEGAN + 120, 1, "failed")]
    write_journal(tmp_path / "out.jsonl.job", [*first, ended(BEGAN + 31), *second])
    job = look(output)
    assert [(kind.error, kind.count) for kind in job.error_kinds] == [("failed", 1)]


def test_errors_of_results_that_are_too_large_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the runs have counted stand for them, and of jobs without a journal a part."""
    source = write_prompts(
        tmp_path / "in.jsonl", *[BAD | {"custom_id": f"{i}"} for i in range(400)]
    )
    run_job(source, tmp_path / "out.jsonl", OutputOptions(shard_s=None), limit=390)
    monkeypatch.setattr("llmpq.jobs.result_lines.BUDGET_S", -1.0)
    job = look(tmp_path / "out.jsonl")
    assert (job.errors, job.error_rows_read, job.error_kinds[0].count) == (None, 256, 256)
    assert "errors not counted" in rows_words(job)
    entries = [*session(rows=395), failed_rows(BEGAN + 30, 395, "failed")]
    write_journal(tmp_path / "out.jsonl.job", entries)
    job = look(tmp_path / "out.jsonl")
    assert (job.done, job.errors, job.error_rows_read) == (390, 395, None)
    assert "counted twice" in job.remarks[-1]


def test_an_error_that_was_retried_is_found_once(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", BAD, *prompts(3))
    run_job(source, tmp_path / "out", limit=4)
    mended = write_prompts(tmp_path / "in.jsonl", BAD | {"prompt": "good row"}, *prompts(3))
    run_job(mended, tmp_path / "out", job_options=JobOptions(retry_errors=True), limit=1)
    job = look(tmp_path / "out")
    assert job.error_kinds == ()


def test_speed_and_predictions(tmp_path: Path, source: Path) -> None:
    """40 rows of 20 tokens in 20 s are 40 tokens/s; the plan has 50 s for 100 rows."""
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    write_journal(tmp_path / "out.jsonl.job", [*session(), ended(BEGAN + 30)])
    job = look(output)
    assert (job.tokens, job.seconds, job.generated_s) == (800, 30, 20)
    assert job.tokens_per_s == pytest.approx(40)
    assert job.planned_tokens_per_s == pytest.approx(40)
    assert job.planned_s == pytest.approx(50 * 10 / 100)
    told = dict(facts(job))
    assert told["predicted"] == "40 tokens/s, 5 s for 10 rows"
    assert told["measured"] == "40 tokens/s, as predicted; 20 s without loading"
    assert told["time"] == "30 s, of which 10 s loading"
    (series,) = job.series
    assert sum(point.tokens_per_s for point in series.rates) / len(series.rates) == (
        pytest.approx(40)
    )
    assert (series.rows[-1].at_s, series.rows[-1].rows) == (30, 40)
    (span,) = series.planned
    assert (span.begins_s, span.ends_s) == (10, 30)


def test_latencies_of_all_sessions_beside_the_bound(tmp_path: Path) -> None:
    """Where the plan was for one: 4 of 200 requests took more than it allows."""
    output = tmp_path / "answers"
    output.mkdir()
    plan = replace(START.plan, quantile=0.99, latency_s=8.0, bound_s=10.0)
    entries = []
    for number, slow in enumerate((1, 3)):
        one = session(BEGAN + 100 * number, plan=plan)
        counts = LatencyCounts.of([2.0] * (100 - slow) + [20.0] * slow)
        entries += [*one[:-1], replace(one[-1], latencies=counts.buckets)]
    write_journal(output, entries)
    job = look(output)
    assert job.latency is not None
    assert job.latency.requests == 200
    assert job.latency.quantile_s == pytest.approx(20.0, rel=0.011)
    told = dict(facts(job))["latency"]
    assert "above the bound" in told
    write_journal(output, session())
    assert look(output).latency is None


def test_sessions_and_events_lie_on_one_time_axis(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    first = [*session(), died(BEGAN + 12), ended(BEGAN + 30, "interrupted")]
    second = [*session(BEGAN + 5000), died(BEGAN + 5011), ended(BEGAN + 5030)]
    write_journal(tmp_path / "out.jsonl.job", [*first, *second])
    job = look(output)
    assert [(each.begins_s, each.ends_s) for each in job.series] == [(0, 30), (30, 60)]
    assert [(event.number, event.session, event.at_s) for event in job.events] == [
        (1, 1, 12),
        (2, 2, 41),
    ]


def test_a_live_job_is_seen_and_not_disturbed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks takes no lock: another one may take it at any moment."""
    output = tmp_path / "out.jsonl"
    reading, writing = os.pipe()
    ready, told = os.pipe()
    child = os.fork()
    if not child:  # pragma: no cover
        with JobOutput(output, SMALL_SHARDS, disk=QuickDisk()):
            os.write(told, b"1")
            os.read(reading, 1)
        os._exit(0)
    os.read(ready, 1)
    folder = tmp_path / "out.jsonl.job"
    write_journal(folder, session(rows=7, pid=child))
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a lock is taken"))
    assert is_locked(folder / "lock")
    job = look(output, BEGAN + 31)
    assert (job.state, job.done, job.left, job.now_tokens_per_s) == ("running", 7, 93, 40)
    assert job.left_s == pytest.approx(8)  # 9 s to go by a point of a second ago
    assert job.sessions[0].how == "running"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (folder / "lock").exists()
    assert not is_locked(folder / "lock")
    assert look(output, BEGAN + 32).state == "stopped"
    for each in (reading, writing, ready, told):
        os.close(each)
    monkeypatch.undo()
    (folder / JOURNAL).unlink()
    run_job(source, output)
    assert look(output).state == "done"


def test_a_job_of_another_machine_runs_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.job"
    folder.mkdir()
    (folder / "lock").touch()
    write_journal(folder, session(host="another"), beat_at=BEGAN + 40)
    assert look(tmp_path / "out.jsonl", BEGAN + 45).state == "running"
    job = look(tmp_path / "out.jsonl", BEGAN + 41 + BEAT_WITHIN_S)
    assert (job.state, job.sessions[0].how) == ("stopped", "killed")


def test_stages_that_load(tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.job"
    folder.mkdir()
    (folder / "lock").touch()
    write_journal(folder, [replace(START, host="another")], beat_at=BEGAN + 40)
    job = look(tmp_path / "out.jsonl", BEGAN + 41)
    assert state_words(job) == "running, loading stages"
    assert rows_words(job) == "0 of 100 done, 100 left, 0 errors"


def test_overwritten_and_replaced_results(tmp_path: Path, source: Path) -> None:
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    run_job(source, output, OVERWRITE, limit=4)
    again = session(rows=4, anew=True)
    again[0] = replace(START, rows=10, anew=True)
    write_journal(tmp_path / "out.jsonl.job", [*again, ended(BEGAN + 31, "stopped", "at row q")])
    job = look(output)
    assert (job.state, job.done, job.errors) == ("stopped", 4, 0)
    assert "stopped at row q" in why_stopped(job)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.jsonl", "there is no output"),
        ("in.jsonl", "is no output of a job"),
        ("empty", "jobs list"),
        ("broken.jsonl", "cannot be read as the manifest"),
        ("x" * 300, "cannot look at output"),
        ("a\0b", "there is no output"),
    ],
)
def test_what_is_no_job(tmp_path: Path, source: Path, name: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jsonl.job").mkdir()
    (tmp_path / "broken.jsonl.job" / "job.json").write_text("{")
    with pytest.raises(InputError, match=problem):
        look(tmp_path / name)


def test_the_folder_of_records_is_its_output(tmp_path: Path, source: Path) -> None:
    run_job(source, tmp_path / "out.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    for name in ("out.jsonl", "out.jsonl.job", "out.jsonl.job/", "link.jsonl"):
        assert look(Path(f"{tmp_path}/{name}")).output == tmp_path / "out.jsonl"


def test_a_batch_of_the_server_is_listed_by_its_records(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "batch.jsonl", *prompts(3))
    (tmp_path / "batches").mkdir()
    batch = BatchJob("batch_1", source, tmp_path / "batches" / "batch_1", QuickDisk())
    (place,) = jobs_in(tmp_path, 4)
    assert (overview_of(place).state, overview_of(place).done) == ("running", 0)
    batch.write(next(iter(batch.todo())), LineAnswer("{}", None))
    batch.close()
    job = overview_of(place)
    assert (job.state, job.done, job.model) == ("stopped", 1, "batch_1")


def test_jobs_below_a_folder(tmp_path: Path, source: Path) -> None:
    for name in ("a.jsonl", "deep/er/b.csv", "deep/c/", ".hidden/d.jsonl", "1/2/3/4/5/e.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        run_job(source, f"{tmp_path}/{name}", OutputOptions(shard_s=None))
    (tmp_path / "other.job").mkdir()
    found = [place.output.relative_to(tmp_path).as_posix() for place in jobs_in(tmp_path, 4)]
    assert sorted(found) == ["a.jsonl", "deep/c", "deep/er/b.csv"]
    assert [place.output.name for place in jobs_in(tmp_path, 0)] == ["a.jsonl"]
    assert len(list(jobs_in(tmp_path, 9))) == 4
    with pytest.raises(InputError, match="is no folder"):
        list(jobs_in(source, 4))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (2.5, "2.5 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3599.6, "1 h"),
        (86400 - 20, "1 d"),
        (90_000, "1 d 1 h"),
        (1e8, "1,157 d 10 h"),
    ],
)
def test_how_long_things_lasted(seconds: float, words: str) -> None:
    assert lasted(seconds) == words


@pytest.mark.parametrize(
    ("measured", "words"),
    [(40.1, "as predicted"), (30, "25 % slower"), (50, "25 % faster"), (124, "3.1 times as fast")],
)
def test_measured_beside_predicted(measured: float, words: str) -> None:
    assert beside(measured, 40).replace("\N{NO-BREAK SPACE}", " ") == words
