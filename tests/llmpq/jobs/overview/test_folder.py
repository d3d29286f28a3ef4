"""The jobs below a folder at a look, and at the next one: nothing is read twice, and no links."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.jobs.overview import folder as looking
from llmpq.jobs.overview.folder import JobFolder, SeenJob
from llmpq.jobs.store import JOURNAL, LOCK, MANIFEST
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.llmpq.made_journals import BEGAN, START, ended, session, write_journal


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A job that is done, one that was killed, and one whose manifest is damaged."""
    source = write_prompts(tmp_path / "in.jsonl", *prompts(6))
    found = tmp_path / "outputs"
    for name, limit in (("done", None), ("killed", 4), ("damaged", 2)):
        (found / name).mkdir(parents=True)
        run_job(source, found / name / "out.jsonl", limit=limit)
        entries = [replace(START, rows=6), *session(rows=limit or 6)[1:]]
        entries += [ended(BEGAN + 31)] if limit is None else []
        write_journal(found / name / "out.jsonl.job", entries)
    (found / "damaged" / "out.jsonl.job" / MANIFEST).write_text("{")
    return found


def by_name(jobs: list[SeenJob]) -> dict[str, SeenJob]:
    return {each.shown: each for each in jobs}


def test_each_job_is_told_and_a_damaged_one_says_what_is_wrong(top: Path) -> None:
    found = by_name(JobFolder(top, 4).look())
    states = {name: each.job and (each.job.state, each.job.done) for name, each in found.items()}
    assert states == {
        "done/out.jsonl": ("done", 6),
        "killed/out.jsonl": ("stopped", 4),
        "damaged/out.jsonl": None,
    }
    assert f"out.jsonl.job/{MANIFEST} cannot be read" in found["damaged/out.jsonl"].wrong
    assert [each.shown for each in JobFolder(top, 4).look()][-1] == "damaged/out.jsonl"


def test_only_what_changed_is_read_again(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    overview_of = looking.overview_of

    def noted(place: looking.JobPlace, *more: object, **named: object) -> object:
        read.append(place.output.parent.name)
        return overview_of(place, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(looking, "overview_of", noted)
    folder = JobFolder(top, 4)
    folder.look()
    assert sorted(read) == ["damaged", "done", "killed"]
    read.clear()
    again = by_name(folder.look(now=BEGAN + 1e6))
    assert read == ["damaged"]
    job = again["killed/out.jsonl"].job
    assert job is not None
    assert (job.state, job.at) == ("stopped", BEGAN + 1e6)
    read.clear()
    lock = top / "killed" / "out.jsonl.job" / LOCK
    with lock.open("w") as held:  # it goes on
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(2):  # one that runs is read each time
            running = by_name(folder.look())["killed/out.jsonl"].job
            assert running is not None
            assert running.state == "running"
        assert read.count("killed") == 2
        assert "done" not in read
    stopped = by_name(folder.look())["killed/out.jsonl"].job
    assert stopped is not None
    assert stopped.state == "stopped"


def test_what_there_is_no_time_for_comes_with_the_next_look(top: Path) -> None:
    folder = JobFolder(top, 4)
    late = folder.look(within_s=-1.0)
    assert [(each.job, each.wrong) for each in late] == [(None, "")] * 3
    assert sum(each.job is not None for each in folder.look()) == 2
    assert sum(each.job is not None for each in folder.look(within_s=-1.0)) == 2  # they are kept


def test_one_job_by_its_name(top: Path) -> None:
    folder = JobFolder(top, 4, confined=True)
    assert folder.job("killed/out.jsonl.job").left == 2
    with pytest.raises(InputError, match="cannot be read as the manifest"):
        folder.job("damaged/out.jsonl.job")
    for name in ("", "none", "done", "../in.jsonl", "killed/../killed/out.jsonl.job", "a\0b"):
        with pytest.raises(InputError, match="there is no job"):
            folder.job(name)
    with pytest.raises(InputError, match="there is no job"):
        folder.job(str(top / "killed" / "out.jsonl.job"))
    with pytest.raises(InputError, match="is no folder"):
        JobFolder(top / "none", 4)


@pytest.mark.parametrize("linked", ["folder", "output", "manifest", "journal", "shard"])
def test_links_lead_nowhere(top: Path, tmp_path: Path, linked: str) -> None:
    """What lies elsewhere is not shown, whichever part of a job is a link to it."""
    records, output = top / "killed" / "out.jsonl.job", top / "killed" / "out.jsonl"
    shard = next(records.glob("part-*"))
    paths = {"folder": records, "manifest": records / MANIFEST, "journal": records / JOURNAL}
    path = paths.get(linked, shard if linked == "shard" else output)
    elsewhere = tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text('{"custom_id": "secret", "error": "secret"}\n')
    path.symlink_to(elsewhere)
    folder = JobFolder(top, 4, confined=True)
    with pytest.raises(InputError, match=r"is a link|there is no job"):
        folder.job("killed/out.jsonl.job")
    seen = by_name(folder.look()).get("killed/out.jsonl")
    if linked == "shard":  # counted by its name, and not read
        assert seen is not None
        assert seen.job is not None
    else:
        assert seen is None or "is a link" in seen.wrong


def test_the_records_of_one_job_are_no_folder_of_jobs(top: Path) -> None:
    (seen,) = JobFolder(top / "done" / "out.jsonl.job", 4, confined=True).look()
    assert "show the folder around it" in seen.wrong
