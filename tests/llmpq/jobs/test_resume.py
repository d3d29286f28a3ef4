"""Resuming: what is skipped, what runs again, what is refused, and that memory does not grow."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from actors.messages import Sampling
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, open_output
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.row_database import Tally
from llmpq.jobs.store import JobIdentity
from llmpq.rows.results import Result
from llmpq.rows.row import Row
from llmpq.tokenizing.prompting import PromptingOptions
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    EXTEND,
    IDENTITY,
    OVERWRITE,
    RESUME,
    SMALL_SHARDS,
    QuickDisk,
    answer,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *prompts(5), "{", {"prompt": "bad"})


def test_a_finished_job_is_done_and_a_longer_one_goes_on(source: Path, target: Path) -> None:
    assert run_job(source, target) == Tally(7, 0, 0, 6 * 8)
    before = target.read_bytes()
    assert run_job(source, target, RESUME) == Tally(7, 7, 2, 0)
    assert target.read_bytes() == before
    text = source.read_text().splitlines()
    random.Random(0).shuffle(text)
    kept = [line for line in text if line != "{"]
    write_prompts(source, *kept, {"custom_id": "new", "prompt": "n", "max_new_tokens": 3})
    with pytest.raises(InputError, match=r"rows .* input: 1 is new \('new'\); pass --extend to"):
        run_job(source, target)
    assert run_job(source, target, job_options=EXTEND) == Tally(7, 6, 1, 3)
    assert len(results_in(target)) == 8
    assert target.read_bytes().startswith(before)


def test_a_job_stopped_on_its_way_goes_on_in_a_folder_too(source: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "a.jsonl", tmp_path / "folder"):
        if not target.suffix:
            target.mkdir()
        run_job(source, target, limit=3)
        assert target.is_dir() or not target.exists()
        assert run_job(source, target).resumed == 3
        assert len(results_in(target)) == 7


def test_what_is_kept_is_told_with_the_rows_of_earlier_runs(source: Path, target: Path) -> None:
    run_job(source, target, limit=3)
    output = JobOutput(target, SMALL_SHARDS, (source,), QuickDisk())
    there = f"{target}.job; the same command goes on from there"
    with output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        assert output.committed_message() == f"3 rows are committed in {there}"
        for result in islice(answer(job.todo()), 3):
            job.write(result)
    assert output.committed_message() == f"6 rows are committed in {there}"


def test_nothing_is_told_of_a_job_that_kept_nothing(source: Path, target: Path) -> None:
    output = JobOutput(target, SMALL_SHARDS, (source,), QuickDisk())
    assert output.committed_message() == "0 rows are committed"
    stream = open_output("/dev/null", SMALL_SHARDS, ())
    assert stream.committed_message() == "what was finished has been handed on"


def test_rows_without_manifest_or_job_folder_are_known(source: Path, target: Path) -> None:
    run_job(source, target)
    (target.with_name("out.jsonl.job") / "job.json").unlink()
    target.with_name("out.jsonl.job").rmdir()
    target.write_text(target.read_text().removesuffix("\n"))
    write_prompts(source, *prompts(9))
    with pytest.raises(InputError, match=r"4 are new \('q5', 'q6', 'q7', …\)"):
        run_job(source, target)
    assert run_job(source, target, job_options=EXTEND).resumed == 5
    assert len(results_in(target)) == 11


def test_errors_run_again_when_asked_to_or_when_mended(source: Path, target: Path) -> None:
    write_prompts(source, {"custom_id": "a", "prompt": "bad 1"}, {"custom_id": "b", "prompt": 1.5})
    run_job(source, target)
    assert {name for name, row in results_in(target).items() if row["error"]} == {"a", "b"}
    assert run_job(source, target).resumed_errors == 2
    write_prompts(source, {"custom_id": "a", "prompt": "bad 1"}, {"custom_id": "b", "prompt": "y"})
    assert run_job(source, target) == Tally(2, 1, 1, 8)
    assert results_in(target)["b"]["text"] == "y"
    retry = JobOptions(retry_errors=True)
    assert run_job(source, target, job_options=retry) == Tally(2, 1, 0, 8)
    write_prompts(source, {"custom_id": "b", "prompt": "y"})
    run_job(source, target, job_options=retry)
    assert set(results_in(target)) == {"b"}


@pytest.mark.parametrize("keeps_manifest", [True, False])
def test_another_jobs_output_is_refused(keeps_manifest: bool, source: Path, target: Path) -> None:
    run_job(source, target)
    if not keeps_manifest:
        (target.with_name("out.jsonl.job") / "job.json").unlink()
    other_model = replace(IDENTITY, model="ba9876543210")
    with pytest.raises(InputError, match="another model"):
        run_job(source, target, identity=other_model)
    hot = replace(IDENTITY, sampling=Sampling(temperature=0.5, max_new_tokens=8))
    match = "temperature 0.0, this job has 0.5"
    if not keeps_manifest:
        match = r"5 have another prompt or sampling \('q0', 'q1', 'q2', …\); give a row of another"
    with pytest.raises(InputError, match=match):
        run_job(source, target, identity=hot)
    write_prompts(source, {"custom_id": "q3", "prompt": "another"})
    for how in (JobOptions(), EXTEND):
        with pytest.raises(InputError, match=r"1 has another prompt or sampling \('q3'\); give"):
            run_job(source, target, job_options=how)
    assert len(results_in(target)) == 7
    run_job(source, target, OVERWRITE, identity=other_model)
    assert set(results_in(target)) == {"q3"}


def test_what_llmpq_did_not_write_is_refused(source: Path, target: Path, tmp_path: Path) -> None:
    target.write_text('{"custom_id": "q0", "text": "mine"}\n')
    with pytest.raises(InputError, match=r"row 1 is no result .* --overwrite"):
        run_job(source, target)
    assert "mine" in target.read_text()
    with pytest.raises(InputError, match=r"other files in it"):
        run_job(source, tmp_path)
    with pytest.raises(InputError, match="is the input too"):
        run_job(source, source, OVERWRITE)
    with pytest.raises(InputError, match="nothing to resume"):
        run_job(source, tmp_path / "other.jsonl", RESUME)
    (tmp_path / "x.jsonl.job").mkdir()
    (tmp_path / "x.jsonl.job" / "job.json").write_text("{")
    with pytest.raises(InputError, match=r"job\.json cannot be read"):
        run_job(source, tmp_path / "x.jsonl")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"in.jsonl", "out.jsonl", "x.jsonl.job"}


def test_an_id_twice_is_refused_with_both_places(source: Path, target: Path) -> None:
    write_prompts(source, *prompts(3), "", *prompts(1, first=1))
    with pytest.raises(InputError, match=r"'q1' of in.jsonl:5 stands in in.jsonl:2 already"):
        run_job(source, target)
    assert list(target.parent.iterdir()) == [source]


def test_a_damaged_shard_is_kept_aside_and_done_again(source: Path, target: Path) -> None:
    run_job(source, target, limit=5)
    folder = target.with_name("out.jsonl.job")
    first, second, _ = sorted(folder.glob("part-*"))
    first.write_bytes(first.read_bytes().replace(b"prompt", b"prompd").replace(b"tpmorp", b"x"))
    second.write_bytes(second.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="damaged: its 2 rows"):
        assert run_job(source, target).resumed == 1
    assert len(results_in(target)) == 7
    assert len(list(folder.glob("*.damaged"))) == 2


def test_only_one_driver_writes_an_output(source: Path, target: Path) -> None:
    with JobOutput(target, SMALL_SHARDS):
        with pytest.raises(InputError, match="another llmpq run"):
            run_job(source, target)
        code = (
            "import sys; from llmpq.jobs.job_output import JobOutput; "
            "JobOutput(sys.argv[1]).__enter__()"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False
        )
        assert "another llmpq run" in other.stderr
    run_job(source, target)
    (target.with_name("out.jsonl.job") / "lock").touch()  # of a driver that was killed
    assert run_job(source, target).resumed == 7


def test_a_second_answer_to_a_row_is_dropped(source: Path, target: Path) -> None:
    with JobOutput(target, SMALL_SHARDS, disk=QuickDisk()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        assert job.write(Result("q0", "first", (1,), "stop"))
        assert not job.write(Result("q0", "second", (1,), "stop"))
        with pytest.raises(InputError, match="was not there"):
            job.write(Result("unknown", "x", (), "stop"))
        job.finish()
    assert results_in(target)["q0"]["text"] == "first"


def test_rows_are_committed_while_none_come(source: Path, target: Path) -> None:
    options = OutputOptions(shard_rows=1000, shard_s=0.01)
    with JobOutput(target, options, disk=QuickDisk()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        job.write(Result("q0", "text", (1,), "stop"))
        deadline = time.monotonic() + 300
        while not output.committed and time.monotonic() < deadline:
            os.sched_yield()
        assert output.committed == 1


def test_an_input_that_changes_while_it_is_read_is_noticed(source: Path, target: Path) -> None:
    with JobOutput(target, SMALL_SHARDS, disk=QuickDisk()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        write_prompts(source, *prompts(7))
        with pytest.raises(InputError, match="changed while it was read"):
            list(job.todo())


def test_bad_rows_end_the_job_before_it_begins_if_asked_to(source: Path, target: Path) -> None:
    with pytest.raises(InputError, match=r"in.jsonl:6, row 'in.jsonl:6': not JSON"):
        run_job(source, target, job_options=JobOptions(stop_at_error=True))
    assert not target.exists()


def test_devices_take_results_too_and_a_full_one_is_one_message(source: Path) -> None:
    for name in ("/dev/null", "/dev/full"):
        with open_output(name, SMALL_SHARDS, (source,)) as output:
            job = OpenJob(JobInput.find([source]), output, IDENTITY)
            if name == "/dev/null":
                job.write(Result("q0", "text", (1,), "stop"))
                job.finish()
            else:
                with pytest.raises(InputError, match="No space left"):
                    job.write(Result("q0", "text", (1,), "stop"))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Python's memory; SQLite's page cache is bounded by its setting.

    Measured in a process of its own: threads that Ray leaves in this one allocate, too.
    """
    code = (
        "import sys, tracemalloc; from pathlib import Path; from tests.llmpq.fake_jobs import *; "
        "options = OutputOptions(shard_rows=500, shard_s=None); tracemalloc.start()\n"
        "for name in sys.argv[1:]:\n"
        "    source = Path(name); tracemalloc.reset_peak()\n"
        "    run_job(source, source.with_suffix('.out.jsonl'), options)\n"
        "    print(tracemalloc.get_traced_memory()[1])"
    )
    sources = []
    for rows in (2_000, 6_000):
        sources.append(tmp_path / f"{rows}.jsonl")
        sources[-1].write_text("".join(f'{{"prompt": "prompt {i}"}}\n' for i in range(rows)))
    command = [sys.executable, "-c", code, *map(str, sources)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    fewer, more = map(int, run.stdout.split())
    assert more < 1.3 * fewer


@pytest.mark.parametrize("generation", [-1, 0, True, "1", 1.0])
def test_a_generation_that_no_shard_could_have_is_refused(
    generation: object, source: Path, target: Path
) -> None:
    run_job(source, target)
    path = target.with_name("out.jsonl.job") / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generation": generation}))
    with pytest.raises(InputError, match=r"job\.json: generation is .*, no number from 1"):
        run_job(source, target)


def test_jobs_from_before_a_sampling_field_go_on(source: Path, target: Path) -> None:
    """Their manifest lacks it, and their fingerprints did not count it."""
    row = Row("a", text="p", sampling={"top_p": 0.5})
    sampling = Sampling(temperature=0.5, max_new_tokens=8, stop=("x",))
    identity = JobIdentity("0123456789ab", "n", sampling)
    assert identity.fingerprint(row) == "0123456789ab-995719e2fa5a55d35e0c"  # of such a job
    later = {"min_p": 0.1, "logit_bias": {"5": 1}, "repetition_penalty": 1.1}
    later |= {"stop_token_ids": [5], "min_tokens": 2}
    for name, value in later.items():
        other = replace(row, sampling={"top_p": 0.5, name: value})
        assert identity.fingerprint(other) != identity.fingerprint(row)
    run_job(source, target)
    path = target.with_name("out.jsonl.job") / "job.json"
    manifest = json.loads(path.read_text())
    for name in later:
        del manifest["sampling"][name]
    path.write_text(json.dumps(manifest))
    done = run_job(source, target)
    assert done.resumed == done.rows > 0
    path.write_text(json.dumps(manifest))
    biased = replace(IDENTITY, sampling=replace(IDENTITY.sampling, logit_bias={5: 1.0}))
    with pytest.raises(InputError, match=r"made with logit_bias \{\}.*; leave out --logit_bias"):
        run_job(source, target, identity=biased)
    longer = replace(IDENTITY, sampling=replace(IDENTITY.sampling, min_tokens=1))
    with pytest.raises(InputError, match=r"made with min_tokens 0.*; pass --min_tokens as then"):
        run_job(source, target, identity=longer)


def test_how_prompts_become_tokens_is_a_part_of_a_job(
    source: Path, target: Path, tmp_path: Path
) -> None:
    """Where it is set: jobs of before know nothing of it."""
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    kwargs = {"enable_thinking": False}
    unset, job = (
        PromptingOptions().prompting,
        PromptingOptions(tmp_path / "t.jinja", kwargs, False, "hermes").prompting,
    )
    row = Row("a", text="p")
    before = replace(IDENTITY, prompting=unset.identity)
    assert before.fingerprint(row) == IDENTITY.fingerprint(row)
    run_job(source, target)
    assert run_job(source, target, identity=before).resumed
    for name, value in job.identity.items():
        other = replace(IDENTITY, prompting={**unset.identity, name: value})
        assert other.fingerprint(row) != IDENTITY.fingerprint(row)
        with pytest.raises(InputError, match=f"made with {name} none, .* leave out --{name}"):
            run_job(source, target, identity=other)
    mine = replace(IDENTITY, prompting=job.identity)
    run_job(source, target, OVERWRITE, identity=mine)
    assert run_job(source, target, identity=mine).resumed
    with pytest.raises(
        InputError, match=r"made with chat_template '[0-9a-f]{16}', this job has none"
    ):
        run_job(source, target, identity=before)
