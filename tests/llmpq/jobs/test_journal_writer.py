"""Writing a journal never holds up a job, and never fails it."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path

import pytest

from llmpq.jobs.journal import THIN_BYTES, JournalWriter, ProgressPoint, line_of, thin_out
from llmpq.jobs.sessions import read_journal
from tests.llmpq.made_journals import BEGAN, START, ended, lines_of, session, write_journal


def test_entries_are_there_when_the_job_ends(tmp_path: Path) -> None:
    path = tmp_path / "job.journal"
    for number in range(3):
        journal = JournalWriter(path)
        for entry in session(BEGAN + 100 * number):
            journal.note(entry)
        journal.close()
    assert [each.rows for each in read_journal(path).sessions] == [40, 40, 40]


def test_the_start_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the writer has waited for it: a job may be killed within its first second."""
    monkeypatch.setattr("llmpq.jobs.journal.WRITE_S", 3600.0)
    written = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        written.set()
        return os.write(descriptor, data)

    journal = JournalWriter(tmp_path / "job.journal", write)
    assert not written.wait(0.1)
    journal.note(START)
    assert written.wait(60)
    journal.close()
    assert len(read_journal(tmp_path / "job.journal").sessions) == 1


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = write_journal(tmp_path, session())
    path.write_bytes(path.read_bytes()[:-5])
    journal = JournalWriter(path)
    for entry in session(BEGAN + 100):
        journal.note(entry)
    journal.close()
    assert [each.rows for each in read_journal(path).sessions] == [40, 40]


def test_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    calls = []

    def write(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return os.write(descriptor, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            journal = JournalWriter(tmp_path / "job.journal", write)
            journal.note(START)
            journal.note(ended(BEGAN))
            journal.close()
    told = [str(each.message) for each in seen]
    assert len(told) == 2  # one of each writer
    assert "No space left on device; the job goes on without it" in told[0]
    assert read_journal(tmp_path / "job.journal").sessions == ()


@pytest.mark.parametrize("what", ["folder", "link", "missing"])
def test_a_path_that_cannot_be_written(tmp_path: Path, what: str) -> None:
    path = tmp_path / ("missing/job.journal" if what == "missing" else "job.journal")
    if what == "folder":
        path.mkdir()
    elif what == "link":
        (tmp_path / "other").write_text("mine\n")
        path.symlink_to(tmp_path / "other")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        journal = JournalWriter(path)
        journal.note(START)
        journal.close()
    assert "the job goes on without it" in str(seen[0].message)
    if what == "link":
        assert (tmp_path / "other").read_text() == "mine\n"


def test_a_disk_that_hangs_does_not_hold_up_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmpq.jobs.journal.CLOSE_S", 0.05)
    released = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        released.wait(60)
        return len(data)

    journal = JournalWriter(tmp_path / "job.journal", write)
    for entry in session():
        journal.note(entry)
    closing = threading.Thread(target=journal.close)
    closing.start()
    closing.join(30)
    still_waits = closing.is_alive()
    released.set()
    assert not still_waits


def test_a_large_journal_keeps_every_second_point_of_earlier_sessions(tmp_path: Path) -> None:
    points = [ProgressPoint(BEGAN + 10 + n, n, 0, 20 * n, 1.0, None) for n in range(1, 20_001)]
    entries = [*session(seconds=1, rows=1)[:2], *points, ended(BEGAN + 30_000)]
    path = write_journal(tmp_path, entries)
    before = path.stat().st_size
    assert before > THIN_BYTES
    thin_out(path)
    (found,) = read_journal(path).sessions
    assert path.stat().st_size < 0.6 * before
    assert len(found.points) == 10_000
    assert found.end == entries[-1]
    kept = list(lines_of(path))
    thin_out(path)
    assert list(lines_of(path)) == kept or path.stat().st_size < before / 2
    assert line_of(entries[0]) == kept[0]
