"""Long tasks tell how far they are: in a log a line now and then, in a terminal a bar."""

from __future__ import annotations

import threading
from io import StringIO

from rich.console import Console

from llmpq.cli.terminal import TaskProgress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def log() -> tuple[StringIO, Console]:
    out = StringIO()
    return out, Console(file=out, width=80)


def test_a_log_has_a_line_soon_and_then_one_a_minute() -> None:
    clock, (out, console) = Clock(), log()
    with TaskProgress("calibrating", screen=console, clock=clock) as progress:
        for layer in range(48):
            clock.now_s += 4.0
            progress.report(layer + 1, 48)
    assert out.getvalue().splitlines() == [
        "calibrating: 2 of 48 layers, 0:08, about 3 min to go",
        "calibrating: 5 of 48 layers, 0:20, about 3 min to go",
        "calibrating: 20 of 48 layers, 1:20, about 2 min to go",
        "calibrating: 35 of 48 layers, 2:20, about 50 s to go",
    ]


def test_a_first_part_that_takes_long_is_measured_meanwhile() -> None:
    """The thread that ticks is played by the test."""
    clock, (out, console) = Clock(), log()
    with TaskProgress("measuring", screen=console, clock=clock) as progress:
        progress.report(0, 4)
        clock.now_s += 30.0
        progress.tick()
        progress.tick()
    assert out.getvalue() == "measuring: 0 of 4 layers, 0:30, time to go: measuring\n"


def test_a_second_pass_is_timed_by_itself() -> None:
    clock, (out, console) = Clock(), log()
    with TaskProgress("measuring", screen=console, clock=clock) as progress:
        for done in (1, 2):
            clock.now_s += 1.0
            progress.report(done, 2)
        progress.report(0, 10)
        clock.now_s += 60.0
        progress.report(2, 10)
    assert out.getvalue() == "measuring: 2 of 10 layers of pass 2, 1:02, about 4 min to go\n"


def test_a_search_tells_its_limit_and_a_short_task_tells_nothing() -> None:
    clock, (out, console) = Clock(), log()
    with TaskProgress("searching a plan", limit_s=60.0, screen=console, clock=clock) as progress:
        clock.now_s += 4.0
        progress.tick()
        assert out.getvalue() == ""
        clock.now_s += 2.0
        progress.tick()
    assert out.getvalue() == "searching a plan: 0:06 of at most 1:00\n"
    assert not [each for each in threading.enumerate() if each.name == "llmpq-progress"]


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    out, clock = StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=100)
    with TaskProgress("calibrating", screen=console, clock=clock) as progress:
        clock.now_s += 10.0
        progress.report(3, 6)
    text = out.getvalue()
    assert "3 of 6 layers, 0:10, about 10 s to go" in text
    assert "\x1b[2K" in text, "the line is erased at the end"
    assert not [each for each in threading.enumerate() if each.name == "llmpq-progress"]
