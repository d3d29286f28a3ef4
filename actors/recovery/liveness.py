"""Whether stages live: heartbeats and progress, looked at wherever the driver waits for stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from ray import ObjectRef

from actors.messages import SlotTokens
from actors.processes.answers import StageAnswers
from actors.processes.handle import StageHandle
from actors.processes.health import Heartbeat, RankSigns
from actors.recovery.faults import HangError, RankLostError

T = TypeVar("T")

SNAPSHOT_S = 1.0
"""How often the first stage is asked for tokens: what is computed in this time is lost with it."""

_AWAY_S = 5.0  # a longer time between two looks went to the caller, not to a stage


class OverdueError(Exception):
    """Answers that have not come in time."""


class LivenessCheck:
    """Asks every stage for its heartbeat, without waiting for it.

    A stage hangs when its answer takes longer than `hang_s`; with `may_start` only once it has
    given a first one, as its process may still be starting. With `needs_progress` a stage also
    hangs when no micro-batch is computed for `hang_s`. A rank that dies or hangs is its stage's
    loss. `tokens` are the latest of the first stage.
    """

    def __init__(
        self,
        stages: Sequence[StageHandle],
        answers: StageAnswers,
        hang_s: float,
        needs_progress: bool = False,
        may_start: bool = False,
    ) -> None:
        self._stages = stages
        self._answers = answers
        self._hang_s = hang_s
        self._needs_progress = needs_progress
        self._may_start = may_start
        self.interval_s = min(SNAPSHOT_S, hang_s / 4)
        self.tokens: SlotTokens | None = None
        self._heartbeats: dict[int, Heartbeat] = {}
        self._asked: dict[int, tuple[ObjectRef[Heartbeat], float]] = {}
        self._looked_s = self._moved_s = answers.now_s()
        self._done: dict[int, int] = {}

    def look(self, only: Collection[int] | None = None, is_idle: bool = False) -> None:
        """Take in answers and ask again, where it is time; of `only` these stages where given.
        Where the run `is_idle`, nothing has to progress.

        Raises `HangError`, its `RankLostError`, and what comes of a stage that died.
        """
        now_s = self._answers.now_s()
        since_s = now_s - self._looked_s
        if self._asked and since_s < self.interval_s:
            return
        if since_s > _AWAY_S:
            self._forgive(since_s)
        self._looked_s = now_s
        for stage in self._stages:
            if only is None or stage.index in only:
                self._take(stage.index, now_s)
                if stage.index not in self._asked:
                    self._asked[stage.index] = stage.heartbeat(stage.index == 0), now_s
        if is_idle:
            self._moved_s = now_s
        elif self._needs_progress:
            self._check_progress(now_s)

    def _forgive(self, seconds: float) -> None:
        """Leave out `seconds` in which nobody looked."""
        self._moved_s += seconds
        self._asked = {i: (ref, asked_s + seconds) for i, (ref, asked_s) in self._asked.items()}

    def _take(self, stage: int, now_s: float) -> None:
        if stage not in self._asked:
            return
        reference, asked_s = self._asked[stage]
        if self._answers.ready([reference], 0.0):
            del self._asked[stage]
            self._heartbeats[stage] = heartbeat = self._answers.get(reference)
            self.tokens = heartbeat.tokens or self.tokens
            self._check_ranks(stage, heartbeat.ranks)
        elif self._may_start and stage not in self._heartbeats:
            return
        elif now_s - asked_s > self._hang_s:
            raise HangError(f"stage {stage} gave no sign of life for {self._hang_s:g} s", stage)

    def _check_ranks(self, stage: int, ranks: RankSigns) -> None:
        if ranks.died is not None:
            raise RankLostError(stage, ranks.died)
        if ranks.silent_s > self._hang_s:
            rank, limit_s = ranks.silent, self._hang_s
            raise HangError(
                f"rank {rank} of stage {stage} gave no sign of life for {limit_s:g} s", stage
            )

    def _check_progress(self, now_s: float) -> None:
        done = {stage: heartbeat.done for stage, heartbeat in self._heartbeats.items()}
        held = any(heartbeat.is_held for heartbeat in self._heartbeats.values())
        if done != self._done or held:  # an emulated device that takes its time is no hang
            self._done, self._moved_s = done, now_s
        if not self._heartbeats or now_s - self._moved_s <= self._hang_s:
            return
        slowest = max(self._heartbeats, key=lambda stage: self._heartbeats[stage].computing_s)
        seconds = self._heartbeats[slowest].computing_s
        if seconds > self._hang_s / 2:
            raise HangError(f"stage {slowest} computes since {seconds:.0f} s and hangs", slowest)
        raise HangError(f"no micro-batch moved for {self._hang_s:g} s", None)


def wait_for(
    answers: StageAnswers,
    asked: dict[int, ObjectRef[T]],
    limit_s: float,
    look: Callable[[], None],
    interval_s: float = SNAPSHOT_S,
) -> Iterator[tuple[int, ObjectRef[T]]]:
    """Yield every stage of `asked`, and take it out, when its answer has come; `look` every
    `interval_s`, which may take out others and may raise.

    Raises `OverdueError` when answers are missing after `limit_s`.
    """
    ends_s = answers.now_s() + limit_s
    while asked:
        left_s = max(0.0, ends_s - answers.now_s())
        done = answers.ready(list(asked.values()), min(interval_s, left_s))
        for stage in [stage for stage, reference in asked.items() if reference in done]:
            yield stage, asked.pop(stage)
        if asked:
            look()
        if asked and not done and answers.now_s() >= ends_s:
            raise OverdueError


def get_all(
    answers: StageAnswers, asked: dict[int, ObjectRef[T]], limit_s: float, check: LivenessCheck
) -> dict[int, T]:
    """Return all answers, by stage; the first that fails raises.

    Raises `HangError` for a stage that gives no sign of life, `OverdueError` after `limit_s`.
    """
    waiting = wait_for(answers, asked, limit_s, check.look, check.interval_s)
    return {stage: answers.get(reference) for stage, reference in waiting}
