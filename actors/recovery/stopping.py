"""Stopping a broken run: every stage leaves it, or is killed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

from ray import ObjectRef

from actors.recovery.faults import HangError, Loss, StoppedRun
from actors.recovery.liveness import LivenessCheck, OverdueError, wait_for
from actors.recovery.pipeline import StagePipeline
from quant.common.errors import StageLostError

T = TypeVar("T")

LEAVE_S = 20.0  # at least: Ray takes 5 s to kill a stopped process, for which neighbours wait


class RunStopper:
    """Brings the stages of `pipeline` out of a run; one that gives no sign of life for `hang_s` is
    killed. `stopped` tells what is known of the run, as far as that has come.
    """

    def __init__(self, pipeline: StagePipeline, hang_s: float, may_start: bool = False) -> None:
        self.stopped = StoppedRun()
        self._pipeline = pipeline
        self._hang_s = hang_s
        self._check = LivenessCheck(pipeline.stages, pipeline.answers, hang_s, may_start=may_start)
        self.interval_s = self._check.interval_s

    def stop(self, hung: dict[int, Loss]) -> StoppedRun:
        """Kill the `hung` stages, and have all others leave the run or kill them."""
        for stage, loss in hung.items():
            self._kill(stage, loss)
        stopped = {stage.index: stage.stop() for stage in self._pipeline.stages}
        reports = {stage.index: stage.leave_run() for stage in self._pipeline.stages}
        for _ in self._answers(stopped):
            pass
        for stage, report in self._answers(reports):
            if stage == 0:
                self.stopped.tokens = report.tokens
            if report.failure is not None:
                self.stopped.failures[stage] = report.failure
                if report.failure.kind == "device":
                    self._kill(stage, Loss.unusable_device(report.failure))
        return self.stopped

    def _answers(self, asked: dict[int, ObjectRef[T]]) -> Iterator[tuple[int, T]]:
        """Yield the answers that come. Stages that do not answer are killed: first the others, for
        which the first stage may be waiting.
        """
        answers = self._pipeline.answers
        limit_s = max(LEAVE_S, self._hang_s)
        look = partial(self.kill_silent, asked)
        while asked:
            try:
                for stage, reference in wait_for(answers, asked, limit_s, look, self.interval_s):
                    try:
                        answer = answers.get(reference)
                    except StageLostError:
                        self.stopped.lost.setdefault(stage, Loss.death())
                    else:
                        yield stage, answer
            except OverdueError:
                loss = Loss.hang(f"it did not come to rest within {limit_s:g} s")
                for stage in [stage for stage in asked if stage] or list(asked):
                    self._kill(stage, loss)
                    del asked[stage]

    def kill_silent(self, asked: dict[int, ObjectRef[T]]) -> None:
        """Kill a stage of `asked` that gives no sign of life, and take it out."""
        try:
            self._check.look(only=asked)
        except HangError as error:
            if error.stage is not None:
                self._kill(error.stage, error.loss)
        except StageLostError:  # its answer in `asked` will fail too
            pass
        for stage in [stage for stage in asked if stage in self.stopped.lost]:
            del asked[stage]

    def _kill(self, stage: int, loss: Loss) -> None:
        self._pipeline.stages[stage].kill()
        self.stopped.lost[stage] = loss
