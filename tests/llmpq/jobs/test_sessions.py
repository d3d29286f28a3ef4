"""What is read of a journal: whole entries, whatever else stands in the file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.jobs.journal import JOURNAL_VERSION, PlanChange, ProgressPoint, entry_of, line_of
from llmpq.jobs.sessions import Journal, read_journal
from tests.llmpq.made_journals import (
    BEGAN,
    PLAN,
    START,
    died,
    ended,
    failed_rows,
    session,
    write_journal,
)


def test_sessions_come_back_as_they_were_written(tmp_path: Path) -> None:
    entries = [*session(), died(BEGAN + 15), failed_rows(BEGAN + 20, 3), ended(BEGAN + 31)]
    assert [entry_of(line_of(entry)) for entry in entries] == entries
    later = session(BEGAN + 100, resumed=40, after=(1, 7))
    (first, second) = read_journal(write_journal(tmp_path, [*entries, *later])).sessions
    assert (first.rows, first.tokens, first.loaded) == (40, 800, BEGAN + 10)
    assert (first.end, second.end) == (entries[-1], None)
    assert second.start.after == (1, 7)
    assert [event.event for event in first.events] == ["died"]
    assert first.error_notes["row is longer than …"].count == 3


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write_journal(tmp_path, session())
    whole = read_journal(path)
    data = path.read_bytes()
    for cut in range(1, 60):  # within the last line, and at its end
        path.write_bytes(data[:-cut])
        found = read_journal(path)
        assert found.sessions[0].points == whole.sessions[0].points
        assert found.remarks == ()
    path.write_bytes(data[:-9] + b"\n" + line_of(ended(BEGAN + 40)))
    found = read_journal(path)  # cut off, and gone on from there
    assert found.sessions[0].end is not None
    assert found.sessions[0].work == {}


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"point":[1]}',
        b'{"point":[NaN,1,1,1,1,1]}',
        b'{"point":[1e999,1,1,1,1,1]}',
        b'{"point":{"at":1}}',
        b'{"end":{"at":-1,"how":"done","text":""}}',
        b'{"end":{"at":1,"how":3,"text":""}}',
        b'{"end":{"at":1,"how":"\\ud800","text":""}}',
        b'{"nothing":{}}',
        b'{"start":3}',
        b"[" * 100_000,
        b'{"point":[' + b"9" * 5000 + b",1,1,1,1,1]}",
    ],
)
def test_garbage_is_left_out_and_told(tmp_path: Path, line: bytes) -> None:
    path = write_journal(tmp_path, session())
    whole = read_journal(path).sessions
    path.write_bytes(path.read_bytes() + (line + b"\n") * 9)
    found = read_journal(path)
    assert found.sessions == whole
    assert "9 of its lines are no entries" in found.remarks[0]
    path.write_bytes((line + b"\n") * 20)
    assert read_journal(path).sessions == ()


def test_sessions_of_another_version_are_left_out_and_told(tmp_path: Path) -> None:
    path = write_journal(tmp_path, session())
    newer = json.loads(line_of(replace(START, at=BEGAN + 50)))
    newer["start"]["journal"] = JOURNAL_VERSION + 1
    text = json.dumps(newer).encode() + b"\n" + line_of(ProgressPoint(BEGAN + 60, 9, 9, 9, 9, 9))
    ours = b"".join(map(line_of, session(BEGAN + 90)))
    path.write_bytes(path.read_bytes() + text + ours)
    found = read_journal(path)
    assert [each.start.at for each in found.sessions] == [BEGAN, BEGAN + 90]
    assert found.sessions[0].rows == 40
    assert f"journal version {JOURNAL_VERSION + 1}, which are left out" in found.remarks[0]


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert read_journal(tmp_path / "none") == Journal()
    for name in ("pipe", "folder"):
        (remark,) = read_journal(tmp_path / name).remarks
        assert name in remark


def test_what_was_done_before_overwriting_does_not_count(tmp_path: Path) -> None:
    first = [*session(), ended(BEGAN + 31)]
    again = session(BEGAN + 100, rows=20, anew=True)
    found = read_journal(write_journal(tmp_path, [*first, *again]))
    assert [each.rows for each in found.sessions] == [20]
    failed = [replace(START, at=BEGAN + 100, anew=True), ended(BEGAN + 110, "failed", "no GPU")]
    found = read_journal(write_journal(tmp_path, [*first, *failed]))
    assert [each.rows for each in found.sessions] == [40, 0]  # it has replaced nothing


def test_each_plan_has_its_part(tmp_path: Path) -> None:
    other = replace(PLAN, fingerprint="ba9876543210")
    entries = session(rows=40, seconds=20)
    entries.insert(12, PlanChange(BEGAN + 20.5, other))  # after ten points
    (found,) = read_journal(write_journal(tmp_path, entries)).sessions
    assert [(part.plan.fingerprint, part.tokens) for part in found.parts] == [
        (PLAN.fingerprint, 400),
        (other.fingerprint, 400),
    ]
    assert [stage.work is None for part in found.parts for stage in part.stages] == [
        True,
        True,
        False,
        False,
    ]
