"""Repairing a pipeline: what is left of a broken run is stopped, lost stages are started again, and
all are linked anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ray import ObjectRef
from ray.exceptions import RayTaskError

from actors.recovery.faults import HangError, Loss, StoppedRun, lost_by
from actors.recovery.pipeline import LivenessCheck, OverdueError, StagePipeline, get_all, wait_for
from actors.recovery.policy import OnEvent, Recovery, RecoveryEvent
from quant.common.errors import DeviceError, DeviceLostError, StageLostError

if TYPE_CHECKING:
    from quant.rounding.importance import LayerImportance

T = TypeVar("T")

LEAVE_S = 20.0  # at least: Ray takes 5 s to kill a stopped process, for which neighbours wait

STARTS = 2
"""Starts of a process that does not come up although its device is there, until the device is given
up."""

_REPORT_S = 60.0  # between two reports of a device that is waited for
_LOAD_S = 3600.0  # for loading a shard that was loaded before


class Repair:
    """Keeps `pipeline` working as `recovery` says; `on_event` is told of what happens."""

    def __init__(self, pipeline: StagePipeline, recovery: Recovery, on_event: OnEvent) -> None:
        self.pipeline = pipeline
        self.recovery = recovery
        self.on_event = on_event
        self._answers = pipeline.answers

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
                first = min(lost_by(error), default=None)
                self.on_event(RecoveryEvent("died", first, 0.0, text))
                for stage in self.pipeline.stages:
                    stage.start()
        raise AssertionError("the last attempt returns or raises")

    def find_importance(
        self, place: tuple[Path, str, str], seen: str, parts: Sequence[slice], limit_s: float
    ) -> bool:
        """Have the first stage read the file of an `ImportanceStore(*place)`, which is on its node:
        it has torch already. Returns whether the stages have their `parts` of it now.
        """
        stages = self.pipeline.stages
        is_there, layers = stages[0].find_importance(place, seen, parts)
        asked = {stages[0].index: is_there}
        check = LivenessCheck(stages, self._answers, self.recovery.hang_s, may_start=True)
        try:
            if not get_all(self._answers, asked, limit_s, check)[stages[0].index]:
                return False
        except (DeviceError, StageLostError):  # it is found, or measured, as ever
            return False
        for stage, own in zip(stages, layers, strict=True):
            stage.use_importance(own)
        return True

    def _measure(self, limit_s: float) -> tuple[LayerImportance, ...]:
        stages, hidden = self.pipeline.stages, None
        asked: dict[int, ObjectRef[list[LayerImportance]]] = {}
        for stage in stages:
            hidden, asked[stage.index] = stage.measure_importance(hidden)
        import_module("quant.rounding.importance")  # meanwhile: the answers are of it
        hang_s = self.recovery.hang_s
        check = LivenessCheck(stages, self._answers, hang_s, may_start=True)
        try:
            found = get_all(self._answers, asked, limit_s, check)
            return tuple(layer for stage in sorted(found) for layer in found[stage])
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
        text += f"{lost_s:.1f} s in all"
        self.on_event(RecoveryEvent("died", min(stopped.lost, default=None), lost_s, text))

    def _load(self, limit_s: float) -> StoppedRun:
        """Load all stages; those whose processes have come up must give signs of life."""
        stages, retries = self.pipeline.stages, self.recovery.retries
        stopper = RunStopper(self.pipeline, self.recovery.hang_s, may_start=True)
        loading = {stage.index: stage.load() for stage in stages}
        look = partial(stopper.kill_silent, loading) if retries else lambda: None
        try:
            for stage, reference in wait_for(
                self._answers, loading, limit_s, look, stopper.interval_s
            ):
                try:
                    self._answers.get(reference)
                except StageLostError:
                    if not retries:
                        raise
                    stopper.stopped.lost.setdefault(stage, Loss("died", "died"))
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
                StageRestart(self, lost).run()
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
                    self._kill(
                        stage, Loss("died", f"cannot use its device again: {report.failure.text}")
                    )
        return self.stopped

    def _answers(self, asked: dict[int, ObjectRef[T]]) -> Iterator[tuple[int, T]]:
        """Yield the answers that come. Stages that do not answer are killed, the first one last."""
        answers = self._pipeline.answers
        limit_s = max(LEAVE_S, self._hang_s)
        look = partial(self.kill_silent, asked)
        while asked:
            try:
                for stage, reference in wait_for(answers, asked, limit_s, look, self.interval_s):
                    try:
                        answer = answers.get(reference)
                    except StageLostError:
                        self.stopped.lost.setdefault(stage, Loss("died", "died"))
                    else:
                        yield stage, answer
            except OverdueError:
                loss = Loss("hung", f"hung: it did not come to rest within {limit_s:g} s")
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


class StageRestart:
    """Starts the `lost` stages of a pipeline again and loads them, as its `repair` is to do."""

    def __init__(self, repair: Repair, lost: Collection[int]) -> None:
        self._pipeline, self._recovery = repair.pipeline, repair.recovery
        self._on_event = repair.on_event
        self._lost = sorted(lost)
        self._began_s = self._reported_s = self._pipeline.answers.now_s()

    def run(self) -> None:
        """Return when all are loaded. Raises `DeviceLostError` or `StageLostError`."""
        missing = self._start(self._lost)
        for starts in count(1):
            self._wait_for_devices(missing)
            if not missing:
                break
            if starts >= STARTS and self._recovery.on_device_loss != "wait":
                raise self._device_lost(missing)
            missing = self._start(missing)  # where the device is there, its process hangs
        self._load()

    def _start(self, stages: Iterable[int]) -> dict[int, ObjectRef[None]]:
        """Start `stages`; the answers tell that they have devices and processes."""
        handles = [self._pipeline.stages[stage] for stage in stages]
        for handle in handles:
            handle.start()
        return {handle.index: handle.ready() for handle in handles}

    def _wait_for_devices(self, missing: dict[int, ObjectRef[None]]) -> None:
        """Take out of `missing` what comes within `replace_s`."""
        answers = self._pipeline.answers

        def look() -> None:
            if self._recovery.on_device_loss == "fail":
                self._check_devices(missing)
            self._report(missing)

        try:
            for _, reference in wait_for(answers, missing, self._recovery.replace_s, look):
                answers.get(reference)
        except OverdueError:
            if self._recovery.on_device_loss != "wait":
                self._check_devices(missing)

    def _check_devices(self, stages: Iterable[int]) -> None:
        gone = [stage for stage in stages if not self._pipeline.stages[stage].has_device()]
        if gone:
            raise self._device_lost(gone)

    def _report(self, missing: Iterable[int]) -> None:
        now_s = self._pipeline.answers.now_s()
        if now_s - self._reported_s <= _REPORT_S:
            return
        self._reported_s = now_s
        for stage in missing:
            name = self._pipeline.stages[stage].name
            text = f"{name} has waited {now_s - self._began_s:.0f} s for its device"
            self._on_event(RecoveryEvent("waiting", stage, 0.0, text))

    def _load(self) -> None:
        """Load shards that were loaded before: what fails now is the device."""
        answers, stages = self._pipeline.answers, self._pipeline.stages
        check = LivenessCheck(stages, answers, self._recovery.hang_s)
        loading = {stage: stages[stage].load() for stage in self._lost}
        try:
            for stage, reference in wait_for(
                answers, loading, _LOAD_S, check.look, check.interval_s
            ):
                try:
                    answers.get(reference)
                except (DeviceError, RayTaskError) as error:
                    text = f"{stages[stage].name} cannot be used any more: {error}"
                    raise DeviceLostError(text, (stage,), stages[stage].devices) from error
        except OverdueError:
            stage = min(loading)
            raise HangError(
                f"stage {stage} was not loaded again within {_LOAD_S:g} s", stage
            ) from None

    def _device_lost(self, gone: Iterable[int]) -> DeviceLostError:
        lost = tuple(sorted(gone))
        handles = [self._pipeline.stages[stage] for stage in lost]
        waited_s = self._pipeline.answers.now_s() - self._began_s
        return DeviceLostError(
            f"{', '.join(handle.name for handle in handles)}: no node has had a free one for "
            f"{waited_s:.0f} s; plan again for those left",
            lost,
            tuple(device for handle in handles for device in handle.devices),
        )
