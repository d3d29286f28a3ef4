"""What a run tells its job's journal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.recovery.policy import RecoveryEvent
from actors.stage_figures import NO_LATENCIES, LatencyCounts, PhaseWork, StageStats
from llmpq import Plan
from llmpq.jobs.journal import Entry, line_of
from llmpq.jobs.overview.overview import latency_figures
from llmpq.jobs.row_database import Tally
from llmpq.jobs.sessions import read_journal
from llmpq.report.formatting import plain
from llmpq.rows.results import Result
from llmpq.run.meter import RunState, TimeLeft
from llmpq.run.recorder import MOST_EVENTS, RunRecorder, SessionOf, recorded
from planner.plan.simulate import time_scale
from planner.scheduling import RequestSchedule
from tests.planner.bounded import bounded

WEEK_S = 7 * 24 * 3600
STAGE = StageStats(
    8.0, 900, 900, 90, 10, 10, prefill=PhaseWork(9, 9, 90, 0.9, 4, 0.6, 4.0, 9), decode=PhaseWork()
)
SCHEDULE = RequestSchedule("rra", 4, 9, 3, 3, 2, 8.0)
SESSION = SessionOf(Path(), "llmpq run --plan plan.json", "plan.json", Tally(1000, 10, 1, 0))


def state(elapsed_s: float, tokens: int, stages: int = 3) -> RunState:
    left = TimeLeft(50.0, "tokens")
    return RunState(
        elapsed_s, 1, 9, tokens, 99, 12.5, (), (0.5,) * stages, None, left, (STAGE,) * stages
    )


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def test_a_week_takes_less_than_a_megabyte(plan: Plan) -> None:
    clock, sizes = Clock(), [0]

    def note(entry: Entry) -> None:
        sizes.append(len(line_of(entry)))

    recorder = RunRecorder(note, SESSION, plan.spec, clock)
    for second in [*range(30_000), *range(30_000, WEEK_S, 30)]:
        clock.now = 1e9 + second
        recorder.see(state(second, 1_000_000 * second, stages=8))
    recorder.end("done", "")
    assert 200_000 < sum(sizes) < 1_000_000


def test_what_a_run_tells(plan: Plan, tmp_path: Path) -> None:
    clock, entries = Clock(), list[Entry]()
    recorder = RunRecorder(entries.append, SESSION, plan.spec, clock)
    clock.now += 20
    for number in range(40):
        clock.now += 1
        error = f"prompt {number} has {number} tokens" if number % 10 == 0 else None
        recorder.count(Result(f"q{number}", "", (), "stop", error))
        recorder.see(state(1.0 + number, 100 * number))
    for _ in range(MOST_EVENTS + 7):
        recorder.tell(RecoveryEvent("died", 1, 3.0, "stage 1 died", clock.now))
    recorder.change_plan(replace(plan.spec, cluster="smaller"))
    recorder.end("done", "")
    recorder.end("failed", "this comes too late")
    path = tmp_path / "journal"
    path.write_bytes(b"".join(map(line_of, entries)))
    (found,) = read_journal(path).sessions
    assert (found.rows, found.errors, found.tokens) == (40, 4, 3900)
    assert found.loaded == pytest.approx(1e9 + 20)
    assert len(found.points) == 40 + 2  # a second apart, with the change of plan and the end
    ((what, kind),) = found.error_notes.items()
    assert (what, kind.count, kind.custom_id) == ("prompt … has … tokens", 4, "q0")
    assert (len(found.events), found.more_events) == (MOST_EVENTS, 7)
    assert [part.plan.cluster for part in found.parts] == [plan.spec.cluster, "smaller"]
    work = found.work[0]
    assert work.stages[0].prefill_s == pytest.approx(0.15)  # of full ones: 0.6 s for 4
    assert work.stages[0].decode_s is None
    assert work.stages[0].busy_share == pytest.approx(0.5)  # though it counts only 8 s of 40
    assert found.end is not None
    assert found.end.how == "done"


def test_predictions_only_where_the_plan_is_followed(plan: Plan) -> None:
    entries: list[Entry] = []
    RunRecorder(entries.append, SESSION, plan.spec)
    assert entries[0].plan.tokens_per_s is None  # type: ignore[union-attr]
    scaled = replace(plan.spec, time_scale=10.0)
    RunRecorder(entries.append, SESSION, scaled)
    note = entries[1].plan  # type: ignore[union-attr]
    rate = scaled.predicted.tokens_per_s if scaled.job is None else scaled.job.tokens_per_s
    assert note.tokens_per_s == pytest.approx(rate / time_scale(scaled))
    assert note.stages[0].prefill_s == pytest.approx(10 * scaled.stages[0].prefill_s)


def test_latencies_are_kept_beside_what_was_planned_of_them(plan: Plan, tmp_path: Path) -> None:
    """In the seconds of the run, which a time scale lengthens; a plan without a bound has none."""
    spec = replace(bounded(plan.spec, SCHEDULE), time_scale=2.0)
    clock, entries = Clock(), list[Entry]()
    recorder = RunRecorder(entries.append, SESSION, spec, clock)
    seconds = [1.0] * 60 + [30.0] * 38 + [50.0, 60.0]
    early = replace(state(1.0, 10), latencies=LatencyCounts.of(seconds[:50]))
    recorder.see(early)
    run: Any = SimpleNamespace(rows=SimpleNamespace(tokens=20))
    run.latencies = LatencyCounts.of(seconds)
    recorder.end("done", "", run)
    path = tmp_path / "journal"
    path.write_bytes(b"".join(map(line_of, entries)))
    found = latency_figures(read_journal(path).sessions)
    assert found is not None
    assert (found.requests, found.bound_s, found.planned_s) == (100, 40.0, 24.0)
    assert found.quantile_s == pytest.approx(50.0, rel=0.011)
    assert "99 % within 50." in plain(str(found))
    assert "planned 24.00 s, above the bound of 40.00 s), half within 1.00 s" in plain(str(found))
    entries.clear()
    recorder = RunRecorder(entries.append, SESSION, replace(plan.spec, time_scale=2.0), clock)
    recorder.see(early)
    path.write_bytes(b"".join(map(line_of, entries)))
    assert latency_figures(read_journal(path).sessions) is None


@pytest.mark.parametrize(
    ("leave", "how", "text"),
    [
        (None, "done", ""),
        (KeyboardInterrupt(), "interrupted", ""),
        (RuntimeError("stage 1 is lost"), "failed", "stage 1 is lost"),
        ("give up", "failed", "Ray is gone"),
    ],
)
def test_how_a_session_ended(
    plan: Plan, tmp_path: Path, leave: BaseException | str | None, how: str, text: str
) -> None:
    given_up: list[str] = []
    run: Any = SimpleNamespace(
        plan=plan.spec, on_state=[], on_plan=[], on_event=[], give_up=given_up.append, name="run"
    )
    run.rows, run.latencies = SimpleNamespace(tokens=77), NO_LATENCIES
    session = replace(SESSION, path=tmp_path / "job.journal")

    def leave_it() -> None:
        with recorded(run, session) as recorder:
            recorder.count(Result("q", "", (), "stop", None))
            run.on_state[0](state(1.0, 50))
            if leave == "give up":
                run.give_up(text)
            elif isinstance(leave, BaseException):
                raise leave

    if isinstance(leave, BaseException):
        with pytest.raises(type(leave)):
            leave_it()
    else:
        leave_it()
    (found,) = read_journal(session.path).sessions
    assert found.end is not None
    assert (found.end.how, found.end.text, found.tokens) == (how, text, 77)
    assert given_up == ([text] if leave == "give up" else [])


def test_without_an_output_nothing_is_kept(plan: Plan, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(plan=plan.spec, on_state=[], on_plan=[], on_event=[])
    with recorded(run, None) as recorder:
        recorder.count(Result("q", "", (), "stop", None))
    assert run.on_state == []
    assert list(tmp_path.iterdir()) == []


def test_secrets_and_controls_stay_out(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    entries: list[Entry] = []
    session = replace(SESSION, command="llmpq run --model hf_secretsecret \x1b[31m" + "x" * 20_000)
    recorder = RunRecorder(entries.append, session, plan.spec)
    recorder.count(Result("\x1b]q" * 900, None, (), None, "\x07" + "y" * 9000))
    recorder.end("failed", "z" * 9000)
    text = b"".join(map(line_of, entries))
    assert b"hf_secret" not in text
    assert b"\\u001b" not in text
    assert len(text) < 40_000
