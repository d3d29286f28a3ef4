"""A progress bar over the layers of a model, for commands that work through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llmpq.cli.common import console
from llmpq.quality.perplexity import ReportProgress


@contextmanager
def layer_progress(what: str) -> Iterator[ReportProgress]:
    """Show a bar named `what` in a terminal, and nothing in a log."""
    screen = console(stderr=True)
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen,
        disable=not screen.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
