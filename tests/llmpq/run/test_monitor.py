"""Progress of a run from what its stages tell, by a clock that the test moves."""

from __future__ import annotations

import threading
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from actors.stage_figures import LatencyCounts, PhaseWork, QueueDepth, StageStats
from llmpq.rows.results import Result
from llmpq.run.display import (
    EVERY_S,
    FIRST_S,
    LogTimes,
    RunProgress,
    about,
    duration,
    state_lines,
)
from llmpq.run.meter import EARLY_PROMPTS, WINDOW_S, RunMeter, RunState
from llmpq.run.monitor import monitor

QUEUE = QueueDepth(waiting=7, in_slots=3, slots=4, micro_batches=2)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def stats(busy_s: float, tokens: int = 0, queue: QueueDepth | None = None) -> StageStats:
    work = PhaseWork(1, tokens, tokens, busy_s, sampled=tokens)
    return StageStats(busy_s, 0, tokens, 1, 10, 20, decode=work, queue=queue)


def meter_at(clock: Clock, prompts: int | None = 100, most: int | None = 1000) -> RunMeter:
    meter = RunMeter(prompts, most, clock)
    clock.now_s += 30.0  # loading
    meter.begin()
    return meter


def test_tokens_and_busy_shares_are_of_the_last_seconds_and_of_all() -> None:
    clock = Clock()
    meter = meter_at(clock)
    for second in range(1, 41):
        clock.now_s += 1.0
        fast = max(0, second - 20)  # 10 tokens/s for 20 s, then 30
        meter.add([stats(0.5 * second, 0, QUEUE), stats(0.25 * second, 10 * second + 20 * fast)])
    state = meter.state()
    assert state.elapsed_s == pytest.approx(40)
    assert state.tokens == 800
    assert state.tokens_per_s == pytest.approx(30)
    assert WINDOW_S < 20, "or the window would reach into the slow part"
    assert state.busy_share == pytest.approx((0.5, 0.25))
    assert state.whole_busy_share == pytest.approx((0.5, 0.25))
    assert state.queue == QUEUE


def test_busy_share_follows_the_last_interval_only() -> None:
    clock = Clock()
    meter = meter_at(clock)
    clock.now_s += 10.0
    meter.add([stats(10.0)])
    clock.now_s += 10.0
    meter.add([stats(10.0)])
    state = meter.state()
    assert state.busy_share == pytest.approx((0.0,))
    assert state.whole_busy_share == pytest.approx((0.5,))


def test_a_restarted_stage_counts_from_zero_again() -> None:
    clock = Clock()
    meter = meter_at(clock)
    for busy_s, tokens in ((4.0, 40), (8.0, 80), (1.0, 5), (2.0, 10)):
        clock.now_s += 10.0
        meter.add([stats(busy_s, tokens)])
    state = meter.state()
    assert state.tokens == 90
    assert state.whole_busy_share == pytest.approx((0.25,))
    assert state.tokens_per_s > 0


def test_latencies_are_added_where_a_first_stage_counts_from_zero_again() -> None:
    clock = Clock()
    meter = meter_at(clock)
    for seconds in ([1.0], [1.0, 2.0], [9.0]):
        queue = replace(QUEUE, latencies=LatencyCounts.of(seconds))
        meter.add([stats(1.0, queue=queue), stats(1.0)])
    meter.begin()  # another plan's stages
    meter.add([stats(1.0, queue=replace(QUEUE, latencies=LatencyCounts.of([5.0, 5.0])))])
    assert meter.state().latencies == LatencyCounts.of([1.0, 2.0, 9.0, 5.0, 5.0])


def test_time_to_go_is_told_by_tokens_where_answers_have_their_full_length() -> None:
    clock = Clock()
    meter = meter_at(clock, prompts=100, most=1000)
    clock.now_s += 10.0
    meter.add([stats(1.0, 200)])
    for _ in range(20):
        meter.end(10, 10)
    time_left = meter.state().time_left
    assert time_left is not None
    assert time_left.by == "tokens"
    assert time_left.seconds == pytest.approx(800 / 20)


def test_time_to_go_is_told_by_prompts_once_enough_ended_early() -> None:
    clock = Clock()
    meter = meter_at(clock, prompts=100, most=1000)
    clock.now_s += 16.0
    meter.add([stats(1.0, 80)])
    for _ in range(EARLY_PROMPTS - 1):
        meter.end(4, 10)
    early = meter.state().time_left
    assert early is not None
    assert early.by == "tokens"
    assert early.seconds == pytest.approx((1000 - 6 * 15 - 80) / 5)  # what ended gives no more
    meter.end(4, 10)
    time_left = meter.state().time_left
    assert time_left is not None
    assert time_left.by == "prompts"
    assert time_left.seconds == pytest.approx((100 * 4 - 80) / 5)  # 5 tokens/s


def test_rows_that_cannot_run_are_not_waited_for() -> None:
    clock = Clock()
    meter = meter_at(clock, prompts=100, most=1000)
    clock.now_s += 10.0
    meter.add([stats(1.0, 200)])
    for _ in range(60):
        meter.leave_out()
    state = meter.state()
    assert (state.total_prompts, state.max_tokens) == (40, 400)
    assert state.time_left is not None
    assert state.time_left.seconds == pytest.approx(200 / 20)
    unknown = meter_at(clock, prompts=None, most=None)
    unknown.leave_out()
    assert unknown.state().max_tokens is None


def test_nothing_is_foretold_of_a_run_without_an_end_or_a_beginning() -> None:
    clock = Clock()
    assert meter_at(clock, prompts=None, most=None).state().time_left is None
    state = meter_at(clock).state()
    assert state.time_left is None
    assert state.busy_share == ()
    assert "measuring" in next(state_lines(state))
    unknown = meter_at(clock, prompts=None, most=None).state()
    assert "not known" in next(state_lines(unknown))


def test_the_monitor_polls_until_the_run_ends_and_a_failed_poll_harms_nothing() -> None:
    clock, polled, seen = Clock(), threading.Event(), []
    answers = [None, [stats(1.0, 5)], None]

    def poll() -> list[StageStats] | None:
        clock.now_s += 1.0
        if answers:
            return answers.pop(0)
        polled.set()
        return None

    with monitor(meter_at(clock), poll, [seen.append], interval_s=0.001):
        assert polled.wait(30)
    assert not [t for t in threading.enumerate() if t.name == "llmpq-monitor"]
    assert [state.tokens for state in seen[:3]] == [0, 5, 5]


def run_state(tokens: int = 50) -> RunState:
    return RunState(5.0, 2, 10, tokens, 100, 12.5, (0.9, 0.456), (0.8, 0.4), QUEUE, None)


def test_a_log_has_a_line_soon_and_then_one_a_minute() -> None:
    clock = Clock()
    times, due = LogTimes(clock), []
    for second in range(301):
        if times.is_due():
            due.append(second)
        clock.now_s += 1.0
    assert due == [*FIRST_S, 80, 140, 200, 260]
    clock.now_s += 10 * EVERY_S  # the machine slept
    assert times.is_due()
    assert not times.is_due()


def test_a_log_has_its_lines_whoever_comes() -> None:
    clock, out = Clock(), StringIO()
    progress = RunProgress(Console(file=out, width=40), 10, clock)
    result = Result("a", "text", (1, 2), "stop")
    with progress:
        progress.count(result)
        progress.show(run_state())
        assert out.getvalue().count("\n") == 1
        clock.now_s += FIRST_S[0]
        progress.show(run_state())
        progress.show(replace(run_state(), tokens=51))
        clock.now_s += FIRST_S[1] - FIRST_S[0]
        progress.count(result)
    lines = out.getvalue().splitlines()
    assert len(lines) == 4, "loading, two while it ran, the last"
    assert lines[1] == (
        "1 of 10 prompts, 50 of at most 100 tokens, 12.5 tokens/s, time to go: measuring, "
        "busy 90%/46% (in all 80%/40%), 7 requests queued, 3 in 4 slots, 2 micro-batches under way"
    )
    assert lines[2].startswith("2 of 10 prompts, 51 of")
    assert lines[3] == "2 of 10 prompts, 4 tokens, 20 s"


def test_a_terminal_shows_bar_and_stages() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with RunProgress(console, 10, Clock()) as progress:
        progress.show(run_state())
    text = out.getvalue()
    assert "50 tokens" in text
    assert "busy 90%/46%" in text
    assert "7 requests queued" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3723, "1:02:03")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "a few seconds"), (43, "about 40 s"), (190, "about 3 min"), (8000, "about 2 h")],
)
def test_estimates_are_worded_as_such(seconds: float, text: str) -> None:
    assert about(seconds) == text
