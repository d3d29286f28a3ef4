"""Starting lost stages again: a device and a process for each, then its shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count

from ray import ObjectRef
from ray.exceptions import RayTaskError

from actors.recovery.faults import HangError
from actors.recovery.liveness import LivenessCheck, OverdueError, wait_for
from actors.recovery.pipeline import StagePipeline
from actors.recovery.policy import EventReporter, Recovery
from quant.common.errors import DeviceError, DeviceLostError

STARTS = 2
"""Starts of a process that does not come up although its device is there, until the device is given
up."""

_REPORT_S = 60.0  # between two reports of a device that is waited for
_LOAD_S = 3600.0  # for loading a shard that was loaded before


class StageRestart:
    """Starts the `lost` stages of `pipeline` again and loads them, as `recovery` says."""

    def __init__(
        self,
        pipeline: StagePipeline,
        lost: Collection[int],
        recovery: Recovery,
        events: EventReporter,
    ) -> None:
        self._pipeline = pipeline
        self._lost = sorted(lost)
        self._recovery = recovery
        self._events = events
        self._began_s = self._reported_s = pipeline.answers.now_s()

    def run(self) -> None:
        """Return when all are loaded.

        Raises `DeviceLostError` where a device stays away, `StageLostError` when a stage dies or
        hangs meanwhile.
        """
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
            self._events.tell("waiting", stage, 0.0, text)

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
