"""Looking at stages from the driver: clocks of other nodes, and stages that do not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from actors.processes.meter import SPAN, Spans
from actors.processes.observer import Observer, StageTrace
from actors.stage_figures import LayersLoaded

SKEW_S = 1000.0


class Wire:
    """A clock that both sides share, and hops of given lengths; stands for `ray.get`."""

    def __init__(self, hops: list[tuple[float, float]]) -> None:
        self.now_s = 50.0
        self.hops = hops
        self.skew_s = SKEW_S

    def clock(self) -> float:
        return self.now_s

    def get(self, ask: Any, timeout: float) -> Any:
        del timeout
        if isinstance(ask, list):
            return [self.get(each, 0) for each in ask]
        there_s, back_s = self.hops.pop(0) if self.hops else (0.0, 0.0)
        self.now_s += there_s
        answer = ask()
        self.now_s += back_s
        return answer


def stage_of(wire: Wire, **answers: Any) -> Any:
    def broken() -> Any:
        raise ActorUnavailableError("gone", None)

    names: dict[str, Any] = {"clock_s": lambda: wire.now_s + wire.skew_s, "spans": broken}
    names |= {"stats": broken} | answers
    return SimpleNamespace(**{name: lambda ask=ask: ask for name, ask in names.items()})


def test_the_fastest_ping_gives_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire([(0.5, 0.1), (0.002, 0.004), (0.3, 0.3), (0.01, 0.2), (0.1, 0.1)])
    monkeypatch.setattr(ray, "get", wire.get)
    spans = Spans(0, np.zeros(1, dtype=SPAN), 0)
    observer = Observer([stage_of(wire, spans=lambda: spans)], wire.clock)
    wire.hops += [(9.0, 9.0)] * 5  # at the end the net is slow: the first estimate stays
    observer.align()
    (trace,) = observer.traces()
    assert isinstance(trace, StageTrace)
    assert trace.clock.error_s == pytest.approx(0.003)
    assert abs(trace.clock.offset_s - SKEW_S) <= trace.clock.error_s
    assert trace.spans is spans


def test_a_stage_that_moved_to_another_node_has_its_new_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire([])
    monkeypatch.setattr(ray, "get", wire.get)
    spans = Spans(0, np.zeros(0, dtype=SPAN), 0)
    observer = Observer([stage_of(wire, spans=lambda: spans)], wire.clock)
    observer.align()
    wire.skew_s = -3.0
    (trace,) = observer.traces()
    assert trace is not None
    assert trace.clock.offset_s == pytest.approx(-3.0)


def test_stages_that_do_not_answer_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire([])
    monkeypatch.setattr(ray, "get", wire.get)
    observer = Observer([stage_of(wire)], wire.clock)
    assert observer.figures() is None
    assert observer.traces() == (None,)
    assert Observer([]).figures() is None


def test_loading_is_told_of_stages_whose_processes_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LayersLoaded("weights", 3, 8)
    stages = [
        stage_of(Wire([]), layers_loaded=lambda: loaded),
        stage_of(Wire([]), layers_loaded=lambda: LayersLoaded()),
    ]
    up = stages[0].layers_loaded()
    monkeypatch.setattr(ray, "wait", lambda asked, **_: ([up], [each for each in asked[1:]]))
    monkeypatch.setattr(ray, "get", Wire([]).get)
    assert Observer(stages).loading() == (loaded, None)


def test_stages_that_are_not_started_tell_nothing_of_loading() -> None:
    def unstarted() -> Any:
        raise RuntimeError("stage 0 was not started")

    stage: Any = SimpleNamespace(layers_loaded=unstarted)
    assert Observer([stage]).loading() == (None,)
