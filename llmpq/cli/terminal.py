"""A console that sends no control characters, and how far a long task is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment

from llmpq.cli.common import console
from llmpq.run.display import LogTimes, about, duration
from quant.common.text import printable

TICK_S = 1.0
SHORT_S = 5.0  # less is not worth a word

Report = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


class SafeConsole(Console):
    """A console that shows the control characters of names and messages and sends none."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Rich does, whose own control codes are in segments of their own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class TaskProgress:
    """Context manager that shows a task called `what`, told of its parts by `report`.

    A task that counts again from less than it had is in its next pass. The time to go is told once
    a part is done. `limit_s`: seconds within which a task without parts ends, where it has a limit.
    Whatever takes less than 5 s leaves no line in a log, and no bar in a terminal afterwards.
    """

    def __init__(
        self,
        what: str,
        unit: str = "layers",
        limit_s: float | None = None,
        screen: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._unit, self._limit_s = what, unit, limit_s
        self._screen = console(stderr=True) if screen is None else screen
        self._clock = clock
        self._times = LogTimes(clock)
        self._began_s = clock()
        self._done, self._total, self._passes = 0, 0, 1
        self._ended = threading.Event()
        self._ticks = threading.Thread(target=self._run, name="llmpq-progress", daemon=True)
        self._bar = Progress(
            TextColumn(what), BarColumn(), TextColumn("{task.fields[said]}"), console=self._screen
        )
        self._task = self._bar.add_task(what, total=None, said="")
        self._live = Live(console=self._screen, get_renderable=self._drawn, transient=True)

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        else:
            self._ticks.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing of the bar, and no thread."""
        self._ended.set()
        if self._live.is_started:
            self._live.stop()
        if self._ticks.is_alive():
            self._ticks.join()

    def report(self, done: int, total: int) -> None:
        """Note that `done` parts of `total` are done; for any thread."""
        if done < self._done:
            self._passes += 1
            self._began_s = self._clock()
        self._done, self._total = done, total
        self.tick()

    def say(self, line: str) -> None:
        self._screen.print(line, soft_wrap=True, highlight=False)

    def say_expected(self, seconds: float) -> None:
        """Say how long it will take, before it begins, unless that is next to nothing."""
        if seconds >= SHORT_S:
            self.say(f"{self._what}: {about(seconds)} on this machine")

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.tick()

    def tick(self) -> None:
        """Write a line if there is no terminal and one is due."""
        if not self._screen.is_terminal and self._times.is_due():
            self.say(f"{self._what}: {self._said()}")

    def _drawn(self) -> Progress:
        self._bar.update(
            self._task, total=self._total or None, completed=self._done, said=self._said()
        )
        return self._bar

    def _said(self) -> str:
        passed_s = self._times.passed_s
        if not self._total:
            if self._limit_s is None or passed_s > self._limit_s:  # what comes after the search
                return f"{duration(passed_s)} so far"
            return f"{duration(passed_s)} of at most {duration(self._limit_s)}"
        of_pass = f" of pass {self._passes}" if self._passes > 1 else ""
        parts = f"{self._done} of {self._total} {self._unit}{of_pass}, {duration(passed_s)}"
        if self._done >= self._total:
            return parts
        return f"{parts}, {self._to_go()}"

    def _to_go(self) -> str:
        if not self._done:
            return "time to go: measuring"
        left_s = (self._clock() - self._began_s) * (self._total - self._done) / self._done
        return f"{about(left_s)} to go"


@contextmanager
def finding(model: object) -> Iterator[None]:
    """Tell a log that a model is being found; a terminal has the hub library's own bars."""
    with nullcontext() if console(stderr=True).is_terminal else TaskProgress(f"finding {model}"):
        yield
