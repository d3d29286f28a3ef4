"""After a fault: what is left of the stages comes to rest, and the dead ones are started again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import RayTaskError

from actors.messages import Chunk
from actors.processes.health import BatchFailure, Settled, SoFar
from actors.processes.ray_head import check_head
from actors.recovery.liveness import HangError, Watch
from actors.recovery.policy import OnEvent, Recovery, RecoveryEvent
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import DeviceError, DeviceLostError, StageLostError

SETTLE_S = 20.0  # at least: Ray takes 5 s to kill a stopped process, for which neighbours wait
_LOOK_S = 1.0  # between two looks at a device that is missing
_REPORT_S = 60.0
_LOAD_S = 3600.0  # of a shard, again
_STARTS = 2  # of a process that does not come up although its device is there


class Stages(Protocol):
    """The actors of a plan, as `actors.stage_group.StageGroup` has them."""

    sizes: QueueSizes

    @property
    def actors(self) -> list[Any]:
        """Of all stages, in their order."""

    @property
    def serving(self) -> list[Any]:
        """What ends when a stage leaves the run."""

    def raise_failure(self, *noticed: Exception) -> NoReturn:
        """Of stages that no longer serve."""

    def get(self, references: Any) -> Any:
        """`ray.get` with errors that name stages."""

    def name(self, stage: int) -> str:
        """Of the stage and its device, for messages."""

    def device(self, stage: int) -> str:
        """Name of its device."""

    def has_device(self, stage: int) -> bool:
        """Whether any node has what the stage needs."""

    def generate_chunk(self, chunk: Chunk) -> Any:
        """The stream of what finishes."""

    def next_run(self) -> int:
        """A number that no run had before."""

    def start_again(self, stage: int) -> None:
        """Put a new actor in the place of a dead one, as soon as it has a device."""

    def load(self, stages: Iterable[int]) -> list[Any]:
        """Begin to load the shards of `stages`."""

    def link(self) -> None:
        """Connect all stages, which are at rest, and let the first one lead."""


@dataclass
class Aftermath:
    """Stages that are dead and why, micro-batches that failed, and the tokens of what was in flight
    (None: the first stage is dead).
    """

    dead: dict[int, str] = field(default_factory=dict)
    failures: dict[int, BatchFailure] = field(default_factory=dict)
    so_far: SoFar | None = None


def settle(stages: Stages, hung: dict[int, str], recovery: Recovery) -> Aftermath:
    """Kill what is `hung`, and bring all others out of the run or kill them."""
    after = Aftermath()
    for stage, why in hung.items():
        _kill(stages, after, stage, why)
    stopped = {actor.stop.remote(): i for i, actor in enumerate(stages.actors)}
    settled = {actor.settle.remote(): i for i, actor in enumerate(stages.actors)}
    _answers(stages, after, stopped, recovery)
    for stage, answer in _answers(stages, after, settled, recovery).items():
        if stage == 0:
            after.so_far = answer.so_far
        if answer.failure is not None:
            after.failures[stage] = answer.failure
            if answer.failure.is_broken:
                _kill(stages, after, stage, f"cannot use its device again: {answer.failure.text}")
    return after


def _answers(
    stages: Stages, after: Aftermath, asked: dict[Any, int], recovery: Recovery
) -> dict[int, Any]:
    """By stage; those that do not answer are killed: first the others, for which the first stage
    may be waiting.
    """
    answers: dict[int, Settled] = {}
    vigil = _Vigil(stages, after, recovery.hang_s)
    limit_s = max(SETTLE_S, recovery.hang_s)
    ends_s = time.monotonic() + limit_s
    pending = list(asked)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=vigil.interval_s)
        for reference in done:
            try:
                answers[asked[reference]] = stages.get(reference)
            except StageLostError:
                after.dead.setdefault(asked[reference], "died")
        vigil.look([asked[reference] for reference in pending])
        pending = [reference for reference in pending if asked[reference] not in after.dead]
        if time.monotonic() < ends_s:
            continue
        ends_s += limit_s
        silent = [asked[reference] for reference in pending]
        for stage in [stage for stage in silent if stage] or silent:
            _kill(stages, after, stage, f"hung: it did not come to rest within {limit_s:g} s")
    return answers


class _Vigil:
    """Kills stages that are awaited and give no sign of life for `hang_s`."""

    def __init__(self, stages: Stages, after: Aftermath, hang_s: float) -> None:
        self._stages, self._after, self._hang_s = stages, after, hang_s
        self._awaited: list[int] = []
        self._watch = self._over([])
        self.interval_s = self._watch.interval_s

    def _over(self, awaited: list[int]) -> Watch:
        self._awaited = awaited
        actors = [self._stages.actors[stage] for stage in awaited]
        return Watch(actors, self._hang_s, self._stages.get, needs_progress=False)

    def look(self, awaited: list[int]) -> None:
        """At those."""
        if awaited != self._awaited:
            self._watch = self._over(awaited)
        try:
            self._watch.look()
        except HangError as error:
            why = f"hung: it gave no sign of life for {self._hang_s:g} s"
            _kill(self._stages, self._after, self._awaited[error.stage or 0], why)
        except StageLostError:  # what it was asked will tell
            self._watch = self._over(awaited)


def _kill(stages: Stages, after: Aftermath, stage: int, why: str) -> None:
    ray.kill(stages.actors[stage])
    after.dead[stage] = why


def bring_up(stages: Stages, recovery: Recovery, limit_s: float, tell: OnEvent) -> None:
    """Load new stages within `limit_s` and link them; those that die meanwhile are started again,
    unless `recovery` is off.
    """
    began_s = time.monotonic()
    after = _first_load(stages, limit_s, recovery)
    try:
        if not after.dead:
            stages.link()
            return
    except StageLostError as error:
        if not recovery.retries:
            raise
        after = settle(stages, hung_by(error), recovery)
    mend(stages, after, recovery, tell)
    lost_s = time.monotonic() - began_s
    names = ", ".join(f"{stages.name(i)} {why}" for i, why in after.dead.items()) or "a link broke"
    text = f"while the plan was loaded: {names}; started again, {lost_s:.1f} s in all"
    first = min(after.dead, default=None)
    tell(RecoveryEvent(time.time(), "died", first, lost_s, text))


def _first_load(stages: Stages, limit_s: float, recovery: Recovery) -> Aftermath:
    """Of all stages; who gives no sign of life is only asked once all processes are there."""
    after, ends_s = Aftermath(), time.monotonic() + limit_s
    everyone = range(len(stages.actors))
    starting = {actor.pulse.remote(): i for i, actor in enumerate(stages.actors)}
    pending = dict(zip(stages.load(everyone), everyone, strict=True))
    vigil = _Vigil(stages, after, recovery.hang_s)
    while pending:
        done, _ = ray.wait(list(pending), timeout=vigil.interval_s)
        check_head()
        if not done and time.monotonic() > ends_s:
            names = ", ".join(map(stages.name, pending.values()))
            raise DeviceError(f"{names} did not load within {limit_s:g} s")
        for reference in done:
            stage = pending.pop(reference)
            try:
                stages.get(reference)
            except StageLostError:
                if not recovery.retries:
                    raise
                after.dead.setdefault(stage, "died")
        if starting:
            _, left = ray.wait(list(starting), num_returns=len(starting), timeout=0)
            starting = {reference: starting[reference] for reference in left}
        elif recovery.retries:
            vigil.look(list(pending.values()))
        pending = {ref: stage for ref, stage in pending.items() if stage not in after.dead}
    return after


def mend(stages: Stages, after: Aftermath, recovery: Recovery, tell: OnEvent) -> None:
    """Start the dead again and link all; a stage may die meanwhile, but not for ever."""
    dead = set(after.dead)
    for left in reversed(range(recovery.restarts + 1)):
        try:
            replace_stages(stages, dead, recovery, tell)
            dead.clear()  # those that were started but not loaded would have to be started again
            _link(stages)
        except DeviceLostError:
            raise
        except StageLostError as error:
            if not left:
                raise
            dead |= set(settle(stages, hung_by(error), recovery).dead)
        else:
            return


def _link(stages: Stages) -> None:
    try:
        stages.link()
    except DeviceError as error:  # one that hangs, as all met before
        raise StageLostError(f"stages could not be linked again: {error}") from error


def hung_by(error: Exception) -> dict[int, str]:
    """The stage that `error` found to hang."""
    if isinstance(error, HangError) and error.stage is not None:
        return {error.stage: f"hung: {error}"}
    return {}


def replace_stages(stages: Stages, dead: Iterable[int], recovery: Recovery, tell: OnEvent) -> None:
    """Start the `dead` stages again and load them; raises `DeviceLostError` where a device stays
    away, and `StageLostError` when a stage dies or hangs meanwhile.
    """
    started = sorted(dead)
    began_s = time.monotonic()
    missing = _start(stages, started)
    for attempt in count(1):
        missing = _await(stages, missing, recovery, began_s, tell)
        if not missing:
            break
        waited_s = time.monotonic() - began_s
        if attempt >= _STARTS and recovery.on_device_loss != "wait":
            raise _lost(stages, missing.values(), waited_s)
        missing = _start(stages, missing.values())  # where the device is there, its process hangs
    _load(stages, started, recovery.hang_s)


def _start(stages: Stages, dead: Iterable[int]) -> dict[Any, int]:
    """What tells that a stage has a device and a process."""
    started = list(dead)
    for stage in started:
        stages.start_again(stage)
    return {stages.actors[stage].pulse.remote(): stage for stage in started}


def _await(
    stages: Stages,
    missing: dict[Any, int],
    recovery: Recovery,
    began_s: float,
    tell: OnEvent,
) -> dict[Any, int]:
    """Those that are still missing after `replace_s`."""
    reported_s = entered_s = time.monotonic()
    while missing and time.monotonic() - entered_s < recovery.replace_s:
        done, _ = ray.wait(list(missing), num_returns=len(missing), timeout=_LOOK_S)
        check_head()
        for reference in done:
            stages.get(reference)
        missing = {ref: stage for ref, stage in missing.items() if ref not in done}
        now_s = time.monotonic()
        gone = [stage for stage in missing.values() if not stages.has_device(stage)]
        if gone and recovery.on_device_loss == "fail":
            raise _lost(stages, gone, now_s - began_s)
        if now_s - reported_s > _REPORT_S:
            reported_s = now_s
            for stage in missing.values():
                name = stages.name(stage)
                text = f"{name} has waited {now_s - began_s:.0f} s for its device"
                tell(RecoveryEvent(time.time(), "waiting", stage, 0.0, text))
    gone = [stage for stage in missing.values() if not stages.has_device(stage)]
    if gone and recovery.on_device_loss != "wait":
        raise _lost(stages, gone, time.monotonic() - began_s)
    return missing


def _load(stages: Stages, started: Iterable[int], hang_s: float) -> None:
    """Load shards that were loaded before: what fails now is the device."""
    watch = Watch(stages.actors, hang_s, stages.get, needs_progress=False)
    ends_s = time.monotonic() + _LOAD_S
    started = list(started)
    pending = dict(zip(stages.load(started), started, strict=True))
    while pending:
        done, _ = ray.wait(list(pending), timeout=watch.interval_s)
        for reference in done:
            stage = pending.pop(reference)
            try:
                stages.get(reference)
            except (DeviceError, RayTaskError) as error:
                raise DeviceLostError(
                    f"{stages.name(stage)} cannot be used any more: {error}",
                    (stage,),
                    (stages.device(stage),),
                ) from error
        watch.look()
        if pending and time.monotonic() > ends_s:
            stage = next(iter(pending.values()))
            raise HangError(f"stage {stage} was not loaded again within {_LOAD_S:g} s", stage)


def _lost(stages: Stages, gone: Iterable[int], waited_s: float) -> DeviceLostError:
    lost = tuple(sorted(gone))
    names = ", ".join(stages.name(stage) for stage in lost)
    return DeviceLostError(
        f"{names}: no node has had a free one for {waited_s:.0f} s; plan again for those left",
        lost,
        tuple(stages.device(stage) for stage in lost),
    )
