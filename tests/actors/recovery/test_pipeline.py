"""Signs of life and of progress, with pretend stages and a pretend clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from actors.processes.health import Heartbeat, RankSigns
from actors.recovery.faults import HangError, RankLostError, lost_by
from actors.recovery.pipeline import LivenessCheck

HANG_S = 20.0


@dataclass
class Clock:
    now_s: float = 1000.0


@dataclass
class Stage:
    """Answers with its heartbeat unless it is frozen; stands for what it is asked, too."""

    index: int
    done: int = 0
    computing_s: float = 0.0
    frozen: bool = False
    is_held: bool = False
    ranks: RankSigns = field(default_factory=RankSigns)
    asked: list[bool] = field(default_factory=list)

    def heartbeat(self, with_tokens: bool) -> Stage:
        self.asked.append(with_tokens)
        return self


@dataclass
class Answers:
    clock: Clock

    def now_s(self) -> float:
        return self.clock.now_s

    def ready(self, stages: list[Stage], timeout_s: float) -> list[Stage]:
        assert timeout_s == 0, "nobody waits for a sign of life"
        return [stage for stage in stages if not stage.frozen]

    def get(self, stage: Stage) -> Heartbeat:
        done, computing_s = stage.done, stage.computing_s
        return Heartbeat(done, computing_s, is_held=stage.is_held, ranks=stage.ranks)


def check_of(stages: list[Stage], clock: Clock) -> LivenessCheck:
    return LivenessCheck(stages, Answers(clock), HANG_S, needs_progress=True)  # type: ignore[arg-type]


def look_for(
    check: LivenessCheck, clock: Clock, seconds: float, moving: Stage | None = None
) -> None:
    for _ in range(round(seconds * 2)):
        clock.now_s += 0.5
        if moving is not None:
            moving.done += 1
        check.look()


def test_stages_that_move_are_left_alone_and_asked_about_once_a_second() -> None:
    clock, stages = Clock(), [Stage(0), Stage(1)]
    check = check_of(stages, clock)
    look_for(check, clock, 100.0, moving=stages[1])
    assert 90 <= len(stages[1].asked) <= 101
    assert all(stages[0].asked)
    assert not any(stages[1].asked), "only the first stage has tokens"


def test_a_stage_that_does_not_answer_is_named() -> None:
    clock, stages = Clock(), [Stage(0), Stage(1), Stage(2)]
    check = check_of(stages, clock)
    look_for(check, clock, 5.0, moving=stages[0])
    stages[2].frozen = True
    look_for(check, clock, HANG_S - 2.0, moving=stages[0])
    with pytest.raises(HangError, match=r"stage 2 gave no sign of life for 20 s") as error:
        look_for(check, clock, 5.0, moving=stages[0])
    assert error.value.stage == 2


@pytest.mark.parametrize(("computing_s", "named"), [(30.0, 1), (0.0, None)])
def test_no_progress_names_the_stage_that_computes(computing_s: float, named: int | None) -> None:
    clock, stages = Clock(), [Stage(0), Stage(1, computing_s=computing_s)]
    check = check_of(stages, clock)
    look_for(check, clock, HANG_S - 2.0)
    with pytest.raises(HangError) as error:
        look_for(check, clock, 5.0)
    assert error.value.stage == named


def test_an_emulated_device_that_takes_its_time_is_no_hang() -> None:
    clock, stages = Clock(), [Stage(0), Stage(1, computing_s=500.0, is_held=True)]
    check = check_of(stages, clock)
    look_for(check, clock, 10 * HANG_S)
    stages[1].is_held = False
    look_for(check, clock, HANG_S - 2.0)
    with pytest.raises(HangError, match="stage 1 computes since 500 s and hangs"):
        look_for(check, clock, 5.0)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """As when results are taken slowly: the answers are only late at the driver."""
    clock, stages = Clock(), [Stage(0), Stage(1)]
    check = check_of(stages, clock)
    look_for(check, clock, 3.0)
    stages[1].frozen = True
    check.look()
    clock.now_s += 10 * HANG_S
    check.look()
    look_for(check, clock, 3.0)
    stages[1].frozen = False
    look_for(check, clock, 100.0, moving=stages[0])
    assert clock.now_s > 11 * HANG_S  # and no look named a stage that hangs


def test_a_rank_that_died_is_its_stages_loss_at_once() -> None:
    clock, stages = Clock(), [Stage(0), Stage(1)]
    check = check_of(stages, clock)
    look_for(check, clock, 5.0, moving=stages[0])
    stages[1].ranks = RankSigns(died=3)
    with pytest.raises(RankLostError, match="rank 3 of stage 1 died") as error:
        look_for(check, clock, 2.5)
    loss = lost_by(error.value)[1]
    assert (loss.kind, loss.text) == ("died", "lost its rank 3, which died")


def test_a_rank_that_gives_no_sign_of_life_hangs_with_its_stage() -> None:
    """Also while nothing has to progress, as when stages are loaded."""
    clock, stages = Clock(), [Stage(0), Stage(1)]
    check = LivenessCheck(stages, Answers(clock), HANG_S)  # type: ignore[arg-type]
    stages[1].ranks = RankSigns(silent=1, silent_s=HANG_S - 1.0)
    look_for(check, clock, 5.0)
    stages[1].ranks = RankSigns(silent=1, silent_s=HANG_S + 1.0)
    with pytest.raises(HangError, match="rank 1 of stage 1 gave no sign of life") as error:
        look_for(check, clock, 2.5)
    assert lost_by(error.value)[1].kind == "hung"
