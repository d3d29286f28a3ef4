"""The watch over stages against pretend stages and a pretend clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.processes.health import Pulse
from actors.recovery.liveness import HangError, Watch

HANG_S = 20.0


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Stage:
    """Answers with its pulse unless it is frozen; stands for its own actor handle."""

    done: int = 0
    computing_s: float = 0.0
    frozen: bool = False
    is_held: bool = False
    asked: list[bool] = field(default_factory=list)

    @property
    def pulse(self) -> Stage:
        return self

    def remote(self, with_tokens: bool) -> Stage:
        self.asked.append(with_tokens)
        return self


def watch_of(stages: list[Stage], clock: Clock) -> Watch:
    def answer(stage: Any) -> Pulse:
        return Pulse(stage.done, stage.computing_s, is_held=stage.is_held)

    return Watch(stages, HANG_S, answer, True, clock, lambda stage: not stage.frozen)


def look_for(watch: Watch, clock: Clock, seconds: float, moving: Stage | None = None) -> None:
    for _ in range(round(seconds * 2)):
        clock.now_s += 0.5
        if moving is not None:
            moving.done += 1
        watch.look()


def test_stages_that_move_are_left_alone_and_asked_about_once_a_second() -> None:
    clock, stages = Clock(), [Stage(), Stage()]
    watch = watch_of(stages, clock)
    look_for(watch, clock, 100.0, moving=stages[1])
    assert 90 <= len(stages[1].asked) <= 101
    assert all(stages[0].asked)
    assert not any(stages[1].asked), "only the first stage has tokens"


def test_a_stage_that_does_not_answer_is_named() -> None:
    clock, stages = Clock(), [Stage(), Stage(), Stage()]
    watch = watch_of(stages, clock)
    look_for(watch, clock, 5.0, moving=stages[0])
    stages[2].frozen = True
    look_for(watch, clock, HANG_S - 2.0, moving=stages[0])
    with pytest.raises(HangError, match=r"stage 2 gave no sign of life for 20 s") as error:
        look_for(watch, clock, 5.0, moving=stages[0])
    assert error.value.stage == 2


@pytest.mark.parametrize(("computing_s", "named"), [(30.0, 1), (0.0, None)])
def test_no_progress_names_the_stage_that_computes(computing_s: float, named: int | None) -> None:
    clock, stages = Clock(), [Stage(), Stage(computing_s=computing_s)]
    watch = watch_of(stages, clock)
    look_for(watch, clock, HANG_S - 2.0)
    with pytest.raises(HangError) as error:
        look_for(watch, clock, 5.0)
    assert error.value.stage == named


def test_an_emulated_device_that_takes_its_time_is_no_hang() -> None:
    clock, stages = Clock(), [Stage(), Stage(computing_s=500.0, is_held=True)]
    watch = watch_of(stages, clock)
    look_for(watch, clock, 10 * HANG_S)
    stages[1].is_held = False
    look_for(watch, clock, HANG_S - 2.0)
    with pytest.raises(HangError, match="stage 1 computes since 500 s and hangs"):
        look_for(watch, clock, 5.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """As when results are taken slowly: the answers are only late at the driver."""
    clock, stages = Clock(), [Stage(), Stage()]
    watch = watch_of(stages, clock)
    look_for(watch, clock, 3.0)
    stages[1].frozen = True
    watch.look()
    clock.now_s += 10 * HANG_S
    watch.look()
    look_for(watch, clock, 3.0)
    stages[1].frozen = False
    look_for(watch, clock, 100.0, moving=stages[0])
    assert clock.now_s > 11 * HANG_S  # and no look named a stage that hangs
