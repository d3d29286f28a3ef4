"""Repairing a pipeline: what is left of a broken run is stopped, lost stages are started again, and
all are linked anew.
"""

from __future__ import annotations

from functools import partial

from ray import ObjectRef

from actors.processes.answers import StageAnswers
from actors.recovery.faults import Loss, StoppedRun, lost_by
from actors.recovery.liveness import LivenessCheck, OverdueError, get_all, wait_for
from actors.recovery.pipeline import StagePipeline
from actors.recovery.policy import EventReporter, OnEvent, Recovery
from actors.recovery.restarting import StageRestart
from actors.recovery.stopping import RunStopper
from actors.stage.importance import as_tuple
from quant.common.errors import DeviceError, DeviceLostError, StageLostError
from quant.importance.statistics import LayerImportance


class Repair:
    """Keeps `pipeline` working as `recovery` says; `on_event` is told of what happens."""

    def __init__(self, pipeline: StagePipeline, recovery: Recovery, on_event: OnEvent) -> None:
        self.pipeline = pipeline
        self.recovery = recovery
        self.events = EventReporter(on_event)

    @property
    def _answers(self) -> StageAnswers:
        return self.pipeline.answers

    def measure_importance(self, limit_s: float) -> tuple[LayerImportance, ...]:
        """Measure the importance of all layers by the stages, none of which is loaded yet.

        All are started again, and measure again, where one dies or hangs, unless `recovery` is off.
        Raises what measuring raises, `DeviceError` where it takes longer than `limit_s`, and
        `StageLostError` when stages are lost again and again.
        """
        for left in reversed(range(self.recovery.restarts + 1)):
            try:
                return self._measure(limit_s)
            except StageLostError as error:
                if not left or not self.recovery.retries:
                    raise
                text = f"while importance was measured: {error}; all stages start again"
                self.events.tell("died", min(lost_by(error), default=None), 0.0, text)
                for stage in self.pipeline.stages:
                    stage.start()
        raise AssertionError("the last attempt returns or raises")

    def _measure(self, limit_s: float) -> tuple[LayerImportance, ...]:
        stages, hidden = self.pipeline.stages, None
        asked: dict[int, ObjectRef[list[LayerImportance]]] = {}
        for stage in stages:
            hidden, asked[stage.index] = stage.measure_importance(hidden)
        hang_s = self.recovery.hang_s
        check = LivenessCheck(stages, self._answers, hang_s, may_start=True)
        try:
            return as_tuple(get_all(self._answers, asked, limit_s, check))
        except OverdueError:
            raise DeviceError(f"importance was not measured within {limit_s:g} s") from None

    def load_and_link(self, limit_s: float) -> None:
        """Load the shards of stages that were just started, within `limit_s`, and link all; those
        that die or hang meanwhile are started again, unless `recovery` is off.

        Raises what loading raises, `DeviceError` where it takes too long, and what `restore` does.
        """
        began_s = self._answers.now_s()
        stopped = self._load(limit_s)
        try:
            if not stopped.lost:
                self.pipeline.link()
                return
        except StageLostError as error:
            if not self.recovery.retries:
                raise
            stopped = self.stop_run(lost_by(error))
        self.restore(stopped)
        lost_s = self._answers.now_s() - began_s
        stages = self.pipeline.stages
        names = ", ".join(f"{stages[i].name} {loss.text}" for i, loss in stopped.lost.items())
        text = f"while the plan was loaded: {names or 'a link broke'}; started again, "
        first = min(stopped.lost, default=None)
        self.events.tell("died", first, lost_s, f"{text}{lost_s:.1f} s in all")

    def _load(self, limit_s: float) -> StoppedRun:
        """Load all stages; those whose processes have come up must give signs of life."""
        stages, retries = self.pipeline.stages, self.recovery.retries
        stopper = RunStopper(self.pipeline, self.recovery.hang_s, may_start=True)
        loading = {stage.index: stage.load() for stage in stages}
        look = partial(stopper.kill_silent, loading) if retries else _ignore
        try:
            for stage, reference in wait_for(
                self._answers, loading, limit_s, look, stopper.interval_s
            ):
                try:
                    self._answers.get(reference)
                except StageLostError:
                    if not retries:
                        raise
                    stopper.stopped.lost.setdefault(stage, Loss.death())
        except OverdueError:
            names = ", ".join(stages[stage].name for stage in loading)
            raise DeviceError(f"{names} did not load within {limit_s:g} s") from None
        return stopper.stopped

    def stop_run(self, hung: dict[int, Loss]) -> StoppedRun:
        """Kill the `hung` stages, and have all others leave the run or kill them."""
        return RunStopper(self.pipeline, self.recovery.hang_s).stop(hung)

    def restore(self, stopped: StoppedRun) -> None:
        """Start the lost stages again and link all; a stage may be lost meanwhile, at most
        `restarts` times.

        Raises `DeviceLostError` where a device stays away, `StageLostError` when stages are lost
        again and again.
        """
        lost = set(stopped.lost)
        for left in reversed(range(self.recovery.restarts + 1)):
            try:
                StageRestart(self.pipeline, lost, self.recovery, self.events).run()
                lost.clear()  # those that were started but not loaded must be started once more
                self._link()
            except DeviceLostError:
                raise
            except StageLostError as error:
                if not left:
                    raise
                lost |= set(self.stop_run(lost_by(error)).lost)
            else:
                return

    def _link(self) -> None:
        try:
            self.pipeline.link()
        except DeviceError as error:  # one that hangs, as all met before
            raise StageLostError(f"stages could not be linked again: {error}") from error


def _ignore() -> None:
    """Look at nothing."""
