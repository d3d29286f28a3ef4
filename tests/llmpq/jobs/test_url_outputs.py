"""Results behind URLs: whole or not there, exactly once whatever the store does, never replaced
without being asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import JobOptions, OpenJob, finished_tally, open_output
from llmpq.jobs.job_output import JobOutput
from llmpq.jobs.overview.places import find_job
from llmpq.jobs.result_lines import OutputOptions
from llmpq.jobs.row_database import Tally
from llmpq.workload.measured_lengths import read_measured
from quant.common import url_files
from quant.common.errors import InputError
from quant.common.url_mirror import local_place
from tests.llmpq.fake_jobs import (
    EXTEND,
    IDENTITY,
    OVERWRITE,
    SMALL_SHARDS,
    answer,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")

FILE, FOLDER = "flaky://bucket/out.jsonl", "flaky://bucket/out/"


class LostError(Exception):
    """A store that does not answer."""

    status = 503


class FlakyFileSystem(MemoryFileSystem):
    """A store in memory whose calls fail in turn: "before" or "after" they are done."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 - of all instances, as fsspec has it
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    faults: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))


def _flaky(name: str) -> Any:
    plain = getattr(MemoryFileSystem, name)

    def call(self: FlakyFileSystem, *arguments: Any, **options: Any) -> Any:
        fault = FlakyFileSystem.faults.pop(0) if FlakyFileSystem.faults else ""
        if fault == "before":
            raise LostError(name)
        found = plain(self, *arguments, **options)
        if fault == "after":
            raise LostError(name)
        return found

    return call


for _name in ("info", "ls", "put_file", "mv", "pipe_file", "rm_file"):
    setattr(FlakyFileSystem, _name, _flaky(_name))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyFileSystem]:
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.faults = []
    yield FlakyFileSystem()
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *prompts(5), "{", {"prompt": "bad"})


def results_at(url: str, tmp_path: Path, left: str = "none") -> dict[str, dict[str, Any]]:
    """The results behind a URL of `store`, each id once, and nothing beside them but what is `left`
    of names."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path, file in FlakyFileSystem.store.items():
        (copy / Path(path).name).write_bytes(file.getvalue())
    names = {path.name for path in copy.iterdir() if not path.name.endswith(left)}
    if url.endswith("/"):
        assert all(name == "job.json" or name.startswith("part-") for name in names)
        return results_in(copy)
    assert names == {Path(url).name}
    return results_in(copy / Path(url).name)


def test_lengths_of_an_output_there(store: FlakyFileSystem, source: Path) -> None:
    run_job(source, FILE)
    measured = read_measured(FILE)
    assert measured.outputs == {f"q{n}": len(f"prompt {n}") for n in range(5)}
    with pytest.raises(InputError, match="no such file, or no such bucket"):
        read_measured("flaky://bucket/none.jsonl")
    with pytest.raises(InputError, match="is a folder; name a file"):
        read_measured("flaky://bucket")


@pytest.mark.parametrize("url", [FILE, FOLDER, "flaky://bucket/out.csv.gz", "flaky://out.parquet"])
def test_a_job_there_is_as_one_here(
    store: FlakyFileSystem, url: str, source: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here" / Path(url).name
    here.parent.mkdir()
    run_job(source, f"{here}/" if url.endswith("/") else here)
    assert run_job(source, url, limit=3) == Tally(7, 0, 0, 6 * 8)
    assert run_job(source, url).resumed == 3
    assert results_at(url, tmp_path) == results_in(here)
    assert run_job(source, url) == Tally(7, 7, 2, 0)
    assert find_job(url).output == local_place(url)


@pytest.mark.parametrize("url", [FILE, FOLDER])
def test_another_machine_goes_on_from_what_is_there(
    store: FlakyFileSystem, url: str, source: Path, tmp_path: Path
) -> None:
    run_job(source, url, limit=None if url == FILE else 5)
    shutil.rmtree(tmp_path / "state")
    source.write_text(source.read_text() + json.dumps(prompts(1, 9)[0]) + "\n")
    assert run_job(source, url, job_options=EXTEND).resumed == (7 if url == FILE else 5)
    assert len(results_at(url, tmp_path)) == 8


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("url", [FILE, FOLDER])
def test_faults_of_the_store_lose_and_double_nothing(
    store: FlakyFileSystem, url: str, mode: str, source: Path, tmp_path: Path
) -> None:
    run_job(source, tmp_path / "here.jsonl")
    for first in range(0, 60, 3):
        FlakyFileSystem.store.clear()
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        FlakyFileSystem.faults = [""] * first + [mode] * 4
        run_job(source, url)
        FlakyFileSystem.faults = []
        assert results_at(url, tmp_path) == results_in(tmp_path / "here.jsonl")


@pytest.mark.parametrize("url", [FILE, FOLDER])
def test_a_store_that_stays_away_is_told_and_the_next_start_uploads(
    store: FlakyFileSystem, url: str, source: Path, tmp_path: Path
) -> None:
    for first in range(0, 40, 3):
        FlakyFileSystem.store.clear()
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        FlakyFileSystem.faults = [""] * first + ["before"] * 100
        with suppress(InputError):
            run_job(source, url)
            assert first > 9  # more calls than it makes
        FlakyFileSystem.faults = []
        run_job(source, url)
        # a store that fails between copying and removing, which is its renaming, leaves the copy
        assert len(results_at(url, tmp_path, left=".llmpq-part")) == 7


def test_what_is_there_is_not_replaced_unasked(
    store: FlakyFileSystem, source: Path, tmp_path: Path
) -> None:
    store.pipe_file("/bucket/out.jsonl", b'{"prompt": "not ours"}\n')
    with pytest.raises(InputError, match="is no result of llmpq"):
        run_job(source, FILE)
    run_job(source, FILE, OVERWRITE, limit=3)
    assert run_job(source, FILE).resumed == 3
    assert len(results_at(FILE, tmp_path)) == 7
    store.pipe_file("/bucket/out.jsonl", b"somebody else's\n")
    with pytest.raises(InputError, match="was written by something else than the job in"):
        run_job(source, FILE)
    store.pipe_file("/bucket/out/readme.txt", b"somebody else's\n")
    with pytest.raises(InputError, match=r"folder with other files in it \(readme.txt\)"):
        run_job(source, FOLDER)
    with pytest.raises(InputError, match=r"out is a folder; end its name in /"):
        run_job(source, FOLDER.rstrip("/"))


def test_who_writes_there_meanwhile_is_not_replaced(store: FlakyFileSystem, source: Path) -> None:
    found = JobInput.find([source])
    with open_output(FILE, SMALL_SHARDS, ()) as output:
        job = OpenJob(found, output, IDENTITY)
        for result in answer(job.todo()):
            job.write(result)
        store.pipe_file("/bucket/out.jsonl", b"somebody else's\n")
        with pytest.raises(InputError, match="something else has written there meanwhile"):
            job.finish()
    assert store.cat_file("/bucket/out.jsonl") == b"somebody else's\n"


def test_a_kill_between_upload_and_record(
    store: FlakyFileSystem, source: Path, tmp_path: Path
) -> None:
    run_job(source, FILE)
    (local_place(FILE).parent / "uploaded.json").unlink()
    assert run_job(source, FILE) == Tally(7, 7, 2, 0)
    assert len(results_at(FILE, tmp_path)) == 7


def test_shards_are_there_while_a_job_runs(
    store: FlakyFileSystem, source: Path, tmp_path: Path
) -> None:
    run_job(source, FOLDER, limit=4)
    assert len(results_at(FOLDER, tmp_path)) == 4
    run_job(source, FOLDER, OVERWRITE)
    assert len(results_at(FOLDER, tmp_path)) == 7
    run_job(source, FOLDER, job_options=JobOptions(retry_errors=True))
    assert len(results_at(FOLDER, tmp_path)) == 7


def test_what_cannot_be_written(store: FlakyFileSystem, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a web server takes no files; name a path, or s3://"):
        open_output("https://127.0.0.1/out.jsonl", OutputOptions(), ())
    with pytest.raises(InputError, match="Protocol not known: nosuch"):
        open_output("nosuch://bucket/out.jsonl", OutputOptions(), ())
    with pytest.raises(InputError, match=r"ends in '\.txt', which llmpq does not write"):
        run_job(source, "flaky://bucket/out.txt")
    (tmp_path / "closed").write_text("no folder")
    with pytest.raises(InputError, match=f"cannot write output file://{tmp_path}/closed/out.jsonl"):
        run_job(source, f"file://{tmp_path}/closed/out.jsonl")
    store.pipe_file("/bucket/in.jsonl", source.read_bytes())
    inputs = JobInput.find(["flaky://bucket/in.jsonl"]).files
    with (
        pytest.raises(InputError, match="is the input too"),
        JobOutput("flaky://bucket/in.jsonl", SMALL_SHARDS, inputs),
    ):
        pass


def test_a_changed_input_there_is_refused_on_resume(
    store: FlakyFileSystem, source: Path, tmp_path: Path
) -> None:
    """One that is the same is known by its version, without being read."""
    store.pipe_file("/bucket/in.jsonl", source.read_bytes())
    found = JobInput.find(["flaky://bucket/in.jsonl"])
    with JobOutput(FILE, SMALL_SHARDS, found.files) as output:
        job = OpenJob(found, output, IDENTITY)
        for result in answer(job.todo()):
            job.write(result)
        job.finish()
    with JobOutput(FILE, SMALL_SHARDS, found.files) as output:
        none = replace(found, row_of=lambda content, place: pytest.fail("it was read"))
        assert finished_tally(none, output, IDENTITY, JobOptions()) == Tally(7, 7, 2, 0)
    store.pipe_file("/bucket/in.jsonl", source.read_bytes().replace(b"prompt 1", b"prompt X"))
    with JobOutput(FILE, SMALL_SHARDS, found.files) as output:
        assert finished_tally(found, output, IDENTITY, JobOptions()) is None
        with pytest.raises(InputError, match="was made from other rows than those of this input"):
            OpenJob(found, output, IDENTITY)


def test_file_urls_work_across_processes(source: Path, tmp_path: Path, store: Any) -> None:
    url = f"file://{tmp_path}/there/out.jsonl"
    run_job(source, url)
    assert len(results_in(tmp_path / "there" / "out.jsonl")) == 7
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out.jsonl"]
