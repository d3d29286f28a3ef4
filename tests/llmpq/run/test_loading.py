"""Loading is shown by layers, from what stages tell while they load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from actors.stage_figures import LayersLoaded
from llmpq.rows.results import Result
from llmpq.run.display import FIRST_S, RunProgress
from llmpq.run.monitor import LoadingState, loading_watch
from tests.llmpq.run.test_monitor import Clock, run_state

WEIGHTS = LayersLoaded("weights", 11, 24)


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([None, None], "starting stages"),
        ([LayersLoaded(), None], "starting stages"),
        ([LayersLoaded("importance", 24, 24), LayersLoaded("importance", 6, 24)],
         "measuring importance: 30 of 48 layers"),
        ([LayersLoaded("importance", 24, 24), WEIGHTS], "loading: 11 of 48 layers"),
        ([LayersLoaded("weights", 12, 24), WEIGHTS], "loading: 23 of 48 layers"),
    ],
)  # fmt: skip
def test_all_stages_are_told_together(stages: list[LayersLoaded | None], text: str) -> None:
    assert str(LoadingState.of(stages, 48)) == text


class Stages:
    """Stages that load a layer whenever they are asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.all_asked = threading.Event()

    def loading(self) -> Sequence[LayersLoaded | None]:
        self.asked += 1
        if self.asked >= 3:
            self.all_asked.set()
        return (LayersLoaded("weights", self.asked, 8),)


def group_of(stages: Stages) -> Any:
    plan = SimpleNamespace(stages=(SimpleNamespace(layers=range(8)),))
    return SimpleNamespace(plan=plan, observer=stages)


def test_stages_are_asked_until_they_are_loaded() -> None:
    stages, seen = Stages(), list[LoadingState]()
    with loading_watch(group_of(stages), [seen.append], interval_s=0.001):
        assert stages.all_asked.wait(30)
    assert [state.done for state in seen[:2]] == [1, 2]
    assert not [each for each in threading.enumerate() if each.name == "llmpq-loading"]


def test_nobody_is_asked_where_nobody_looks() -> None:
    stages = Stages()
    with loading_watch(group_of(stages), []):
        pass
    assert stages.asked == 0


def test_a_log_tells_of_layers_until_prompts_end() -> None:
    clock, out = Clock(), StringIO()
    with RunProgress(Console(file=out, width=40), 10, clock) as progress:
        clock.now_s += FIRST_S[0]
        progress.show_loading(LoadingState.of([WEIGHTS], 48))
        progress.show(run_state())
        clock.now_s += FIRST_S[1]
        progress.count(Result("a", "text", (1, 2), "stop"))
    lines = out.getvalue().splitlines()
    assert lines[1] == "loading: 11 of 48 layers, 0:05"
    assert lines[2].startswith("1 of 10 prompts, 50 of at most 100 tokens")


def test_a_terminal_shows_layers() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with RunProgress(console, 10, Clock()) as progress:
        progress.show_loading(LoadingState.of([WEIGHTS], 48))
    assert "loading: 11 of 48 layers" in out.getvalue()
