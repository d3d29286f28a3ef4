"""How far a run is: a live bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from llmpq.results import Result

LOG_INTERVAL_S = 5.0


class RunProgress:
    """Context manager that counts `total` results as they come."""

    def __init__(
        self, console: Console, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._total = total
        self._clock = clock
        self._done = self._tokens = 0
        self._began = self._logged = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading stages", total=total, tokens=0)

    def __enter__(self) -> RunProgress:
        """Show that loading has begun."""
        self._bar.start()
        if self._bar.disable:
            self._console.print(f"loading stages for {self._total} prompts")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state standing."""
        self._bar.stop()
        if self._bar.disable:
            self._log()

    def count(self, result: Result) -> None:
        """Take in one result."""
        self._done += 1
        self._tokens += len(result.token_ids)
        self._bar.update(self._task, advance=1, tokens=self._tokens, description="generating")
        if self._bar.disable and self._clock() - self._logged >= LOG_INTERVAL_S:
            self._log()

    def _log(self) -> None:
        self._logged = self._clock()
        elapsed_s = self._logged - self._began
        self._console.print(
            f"{self._done} of {self._total} prompts, {self._tokens} tokens, {elapsed_s:.0f} s"
        )
