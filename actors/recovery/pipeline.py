"""The stages of a plan as one pipeline: linked, led by the first one, and looked at whether they
live wherever the driver waits for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from ray import ObjectRef
from ray.exceptions import RayTaskError

from actors.messages import SlotTokens
from actors.processes.answers import StageAnswers, StageDiedError
from actors.processes.handle import StageHandle
from actors.processes.health import Heartbeat, RankSigns
from actors.recovery.faults import HangError, RankLostError
from actors.schedule.scheduler import QueueSizes
from actors.transport import Transport
from actors.transport.rendezvous import CONNECT_S, Rendezvous
from planner.scheduling import RequestSchedule
from quant.common.errors import DeviceError, LlmpqError, StageLostError

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
    """All answers, by stage, or the first error; `HangError`, `OverdueError` after `limit_s`."""
    waiting = wait_for(answers, asked, limit_s, check.look, check.interval_s)
    return {stage: answers.get(reference) for stage, reference in waiting}


MEETING_AGAIN_S = 10.0  # at most, when stages that have met before are linked again
NEIGHBOURS_S = 2.0  # after a failure: until the stages beside it have noticed, and reported


class StagePipeline:
    """Links `stages`, hands requests to the first one, and numbers the runs.

    `sizes`: the queue and micro-batches that the first stage schedules by from the next link on.
    `serving`: what ends when a stage leaves the run, for each but the first where gloo links them.
    `epoch`: how often they were linked. They have to meet within `meeting_s`; one that gives no
    sign of life for `hang_s` hangs.
    """

    def __init__(
        self,
        stages: Sequence[StageHandle],
        answers: StageAnswers,
        sizes: QueueSizes,
        transport: Transport,
        meeting_s: float,
        hang_s: float,
    ) -> None:
        self.stages = tuple(stages)
        self.answers = answers
        self.sizes = sizes
        self.serving: list[ObjectRef[None]] = []
        self.epoch = 0
        self._transport, self._meeting_s, self._hang_s = transport, meeting_s, hang_s
        self._runs = 0

    def next_run(self) -> int:
        self._runs += 1
        return self._runs

    def follow(self, schedule: RequestSchedule) -> None:
        """Have the first stage go by another schedule, in the present run too, and after faults."""
        self.sizes = replace(self.sizes, schedule=schedule)
        self.stages[0].follow(schedule)

    def link(self) -> None:
        """Connect all stages; the first one leads. Raises `StageLostError` or `DeviceError`."""
        self.epoch += 1
        first, *following = self.stages
        limit_s = max(self._meeting_s, self._hang_s)
        hosts = self._get_all({i: s.begin(self.epoch) for i, s in enumerate(self.stages)}, limit_s)
        linked = self._connect(tuple(hosts[i] for i in range(len(self.stages))))
        self._get_all({0: first.lead(self.sizes, None if linked else following)}, limit_s)
        self.serving = [stage.serve() for stage in following] if linked else []

    def _connect(self, hosts: tuple[str, ...]) -> bool:
        """Connect the stages by gloo; where that fails and may, warn and leave it to Ray."""
        if self._transport == "ray" or len(self.stages) == 1:
            return False
        try:
            self._meet(hosts)
        except DeviceError as error:
            if self._transport == "gloo":
                raise
            warnings.warn(
                f"{error}; stages exchange tensors by Ray, which takes longer", stacklevel=4
            )
            return False
        return True

    def _meet(self, hosts: tuple[str, ...]) -> None:
        first = self.stages[0]
        timeout_s = self._meeting_s
        if self.epoch > 1:  # all are there and have met before
            timeout_s = min(timeout_s, MEETING_AGAIN_S)
        rendezvous = Rendezvous(hosts, timeout_s, nccl=self._transport == "auto")
        self._get_all({0: first.open_rendezvous(rendezvous)}, timeout_s)
        # The first to fail is the one to blame: the others wait for it.
        connecting = [stage.connect(rendezvous, first, self.sizes) for stage in self.stages]
        self._get_all(dict(enumerate(connecting)), 2 * (timeout_s + CONNECT_S))

    def _get_all(self, asked: dict[int, ObjectRef[T]], limit_s: float) -> dict[int, T]:
        check = LivenessCheck(self.stages, self.answers, self._hang_s)
        try:
            return get_all(self.answers, asked, limit_s, check)
        except OverdueError:
            raise DeviceError(f"stages were not ready within {limit_s:g} s") from None

    def raise_failure(self, *noticed: Exception) -> NoReturn:
        """Raise why stages do not serve: a death is the cause of what neighbours `noticed`."""
        errors = list(noticed)
        serving = dict(enumerate(self.serving))
        try:
            for _, reference in wait_for(self.answers, serving, NEIGHBOURS_S, lambda: None):
                try:
                    self.answers.get(reference)
                except (StageLostError, RayTaskError, LlmpqError) as error:
                    errors.append(error)
        except OverdueError:  # the others still serve
            pass
        raise next((error for error in errors if isinstance(error, StageDiedError)), errors[0])
