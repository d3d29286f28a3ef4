"""A job that is done and unchanged is told by its manifest; whatever has changed is noticed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.messages import Sampling
from llmpq import Plan
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, finished_tally
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.row_database import Tally
from llmpq.run.checkpoint import job_identity
from llmpq.run.options import RunOptions
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    EXTEND,
    IDENTITY,
    SMALL_SHARDS,
    QuickDisk,
    answer,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

DONE = Tally(7, 7, 2, 0)
ROWS: list[Any] = [*prompts(5), "{", {"custom_id": "e", "prompt": "bad"}]


def told(source: Path | list[Path], target: str | Path, **options: Any) -> Tally | None:
    """What the manifest tells of the job, without a look at its rows."""
    named = source if isinstance(source, list) else [source]
    job_options = JobOptions(**{k: options.pop(k) for k in list(options) if k in OPTIONS})
    identity = options.pop("identity", IDENTITY)
    output_options = replace(SMALL_SHARDS, **options)
    with JobOutput(target, output_options, disk=QuickDisk()) as output:
        return finished_tally(JobInput.find(named), output, identity, job_options)


OPTIONS = ("retry_errors", "stop_at_error")


def tell_by_content(monkeypatch: pytest.MonkeyPatch, may: bool) -> None:
    """Let the bytes of files be read, or fail where they are."""
    if may:
        monkeypatch.undo()
        return

    def read(path: Path) -> str:
        pytest.fail(f"{path} is read")

    monkeypatch.setattr("llmpq.jobs.job_files.file_digest", read)
    monkeypatch.setattr("llmpq.jobs.job_files.Shard.is_whole", lambda self: read(self.path))


def edit(path: Path, old: bytes, new: bytes) -> None:
    """Another content of the same size and time of change."""
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *ROWS)


@pytest.fixture(params=["out.jsonl", "out.parquet", "out/"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/{request.param}"


def test_nothing_is_read_of_an_unchanged_job(
    source: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(source, target) is None
    run_job(source, target)
    tell_by_content(monkeypatch, may=False)
    assert told(source, target) == DONE
    assert told(source, target, resume=True) == DONE
    assert told(source, target, overwrite=True) is None
    assert told(source, target, retry_errors=True) is None
    assert told(source, target, stop_at_error=True) is None
    with pytest.raises(InputError, match="another model"):
        told(source, target, identity=replace(IDENTITY, model="ba9876543210"))
    with pytest.raises(InputError, match=r"temperature 0\.0, this job has 0\.5"):
        told(source, target, identity=replace(IDENTITY, sampling=Sampling(0.5, max_new_tokens=8)))


def test_what_is_only_touched_or_copied_is_told_by_its_content(
    source: Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(source, target)
    results = sorted(Path(target).glob("part-*")) if Path(target).is_dir() else [Path(target)]
    for path in (source, results[0]):
        os.utime(path)
        assert told(source, target) == DONE
        tell_by_content(monkeypatch, may=False)
        with pytest.raises(pytest.fail.Exception, match="is read"):
            told(source, target)
        tell_by_content(monkeypatch, may=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(source, copy)
    assert told(copy / "in.jsonl", target) == DONE


@pytest.mark.parametrize("waits", [True, False])
def test_a_changed_input_is_noticed_whatever_its_size_and_time(
    waits: bool, source: Path, target: str, request: pytest.FixtureRequest
) -> None:
    if not waits:  # the file system's clock may not have moved on since it was written
        request.getfixturevalue("no_waiting")
    run_job(source, target)
    assert told(source, target) == DONE
    edit(source, b"prompt 3", b"prompt 9")
    assert told(source, target) is None
    edit(source, b"prompt 9", b"prompt 3")
    assert told(source, target) == DONE
    with source.open("a") as file:
        file.write('{"prompt": "more"}\n')
    assert told(source, target) is None
    assert run_job(source, target, job_options=EXTEND).left == 1
    assert told(source, target) == Tally(8, 8, 2, 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_changed_output_is_noticed_and_mended(
    waits: bool, source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not waits:
        request.getfixturevalue("no_waiting")
    target = tmp_path / "out.jsonl"
    run_job(source, target)
    whole = target.read_bytes()
    edit(target, b"tpmorp", b"TPMORP")
    assert told(source, target) is None
    target.write_bytes(whole[: whole.rindex(b"{")])
    assert told(source, target) is None
    assert run_job(source, target).left == 1
    assert told(source, target) == DONE
    target.unlink()
    assert told(source, target) is None
    assert run_job(source, target).left == 7
    assert len(results_in(target)) == 7


def test_changed_shards_are_noticed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run_job(source, f"{target}/")
    first, second, *_ = sorted(target.glob("part-*"))
    whole = first.read_bytes()
    edit(first, b"tpmorp", b"TPMORP")
    assert told(source, target) is None
    first.write_bytes(whole)
    assert told(source, target) == DONE
    second.unlink()
    assert told(source, target) is None
    assert run_job(source, target).left == 2
    assert told(source, target) == DONE


def test_what_a_crash_or_another_run_left_is_looked_at(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    folder = target.with_name("out.jsonl.job")
    run_job(source, target)
    for name in ("joined.part", "job.json.part", "part-001-000000-1-0123456789abcdef.jsonl"):
        (folder / name).touch()
        assert told(source, target) is None
        (folder / name).unlink()
    assert told(source, target) == DONE
    run_job(source, target, replace(SMALL_SHARDS, overwrite=True), limit=5)
    assert told(source, target) is None
    run_job(source, target)
    assert told(source, target) == DONE


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(llmpq="0.0.1"),
        lambda record: record["input"].update(rows="many"),
        lambda record: record.pop("output"),
        lambda record: record["input"]["files"].append(record["input"]["files"][0]),
    ],
)
def test_a_record_that_is_broken_or_of_another_llmpq_tells_nothing(
    change: Callable[[dict[str, Any]], object], source: Path, tmp_path: Path
) -> None:
    run_job(source, tmp_path / "out.jsonl")
    manifest = tmp_path / "out.jsonl.job" / "job.json"
    content = json.loads(manifest.read_text())
    change(content["record"])
    manifest.write_text(json.dumps(content))
    assert told(source, tmp_path / "out.jsonl") is None
    assert run_job(source, tmp_path / "out.jsonl") == DONE
    assert told(source, tmp_path / "out.jsonl") == DONE, "written again"


def test_folders_globs_and_other_formats(tmp_path: Path) -> None:
    folder, target = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    write_prompts(folder / "a.jsonl", *prompts(2))
    line = json.dumps({"custom_id": "z", "prompt": "zipped"}) + "\n"
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    pq.write_table(pa.Table.from_pylist(prompts(2, first=5)), folder / "c.parquet")
    done = Tally(5, 5, 0, 0)
    run_job(folder, target)
    assert told(folder, target) == done
    assert told(Path(f"{folder}/*"), target) == done
    assert told([folder / "c.parquet", folder / "a.jsonl"], target) is None
    edit(folder / "c.parquet", b"q5", b"q7")
    assert told(folder, target) is None
    edit(folder / "c.parquet", b"q7", b"q5")
    write_prompts(folder / "d.jsonl", {"prompt": "new"})
    assert told(folder, target) is None
    assert run_job(folder, target, job_options=EXTEND).left == 1
    assert told(folder, target) == Tally(6, 6, 0, 0)


def test_an_input_that_was_changed_during_the_run_is_no_finished_one(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    with JobOutput(target, SMALL_SHARDS, disk=QuickDisk()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        for result in answer(job.todo()):
            job.write(result)
        edit(source, b"prompt 3", b"prompt 9")
        job.finish()
    assert told(source, target) is None


def test_a_job_is_only_finished_where_every_row_is(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with JobOutput(target, SMALL_SHARDS, disk=QuickDisk()) as output:
        job = OpenJob(JobInput.find([source]), output, IDENTITY)
        job.write(next(answer(job.todo())))
        job.finish()
    assert told(source, target) is None
    assert run_job(source, target).left == 6


def test_the_command_needs_neither_torch_nor_ray_for_a_finished_job(
    plan: Plan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    source = write_prompts(tmp_path / "in.jsonl", *ROWS)
    run_job(source, tmp_path / "out.jsonl", identity=job_identity(plan.spec, RunOptions()))
    write_prompts(tmp_path / "good.jsonl", *prompts(3))
    run_job(
        tmp_path / "good.jsonl",
        tmp_path / "good-out.jsonl",
        OutputOptions(shard_s=None),
        identity=job_identity(plan.spec, RunOptions()),
    )
    code = (
        "import sys; from llmpq.cli.run import main\n"
        "command = ['--plan', 'plan.json', '--input']\n"
        "codes = [main([*command, 'in.jsonl', '--output', 'out.jsonl']),\n"
        "    main([*command, 'good.jsonl', '--output', 'good-out.jsonl', '--retry-errors'])]\n"
        "print(codes, {'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[3, 0] set()", done.stderr
    assert "all 7 rows are done" in done.stderr
    assert "2 rows have errors; --retry_errors runs them again" in done.stderr
    assert "all 3 rows are done" in done.stderr
