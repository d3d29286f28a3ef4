"""The stages of a plan as one pipeline: linked by gloo or by Ray, and led by the first one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn, TypeVar

from ray import ObjectRef
from ray.exceptions import RayTaskError

from actors.messages import Transport
from actors.processes.answers import StageAnswers, StageDiedError
from actors.processes.handle import StageHandle
from actors.recovery.liveness import LivenessCheck, OverdueError, get_all, wait_for
from actors.schedule.scheduler import QueueSizes
from actors.transport.gloo_links import Rendezvous
from planner.scheduling import RequestSchedule
from quant.common.errors import DeviceError, LlmpqError, StageLostError

T = TypeVar("T")

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
        """Have the first stage go by another schedule, in the present run too, and after faults.

        It is told soon; one that is lost meanwhile is told when the stages are linked again.
        """
        self.sizes = replace(self.sizes, schedule=schedule)
        self.stages[0].follow(schedule)

    def link(self) -> None:
        """Connect all stages, none of which is in a run, and let the first one lead.

        Raises `StageLostError` where one dies or hangs, `DeviceError` where they do not get ready.
        """
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
        rendezvous = Rendezvous(hosts, timeout_s)
        self._get_all({0: first.open_rendezvous(rendezvous)}, timeout_s)
        # The first to fail is the one to blame: the others wait for it.
        connecting = [stage.connect(rendezvous, first, self.sizes) for stage in self.stages]
        self._get_all(dict(enumerate(connecting)), 2 * timeout_s)

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
