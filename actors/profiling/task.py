"""Measuring a design of layer workloads on one device, in a Ray task started as stages are."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError

from actors.processes.answers import get_answer, get_streamed
from actors.processes.environment import stage_environment
from actors.processes.placement import place
from actors.profiling.layers import PreparedWorkload, TimedLayers
from actors.profiling.machine_speed import Pace
from actors.stage.library_config import library_config
from planner.cluster.accelerators import find_accelerator
from planner.cluster.device import Device
from planner.phases import Phase
from planner.profiles.design import LayerWorkload
from quant.cache.layer import LayerForm
from quant.common.errors import DeviceError, LlmpqError
from quant.processor import local_processor
from quant.scheme import backend_name

# Workloads whose keys and values together take no more are measured in turns: the more of them, the
# less a slow moment of the machine falls on one of them alone.
_GROUP_BYTES = 1 << 30
_LEAST_ROUNDS = 9
# A workload is known well enough when its median's standard error is so small, or when it has been
# timed for so long.
_KNOWN = 0.01
_LONG_S = 1.0
# Of a median, in interquartile ranges over the root of the number of samples (normal noise).
_ERROR_OF_MEDIAN = 0.93


@dataclass(frozen=True)
class ProfileTask:
    """What to measure: `todo` has the workloads of every bitwidth, `config` the model's values.

    Each workload is passed `rounds` times in rounds of random order, less often where it is long or
    its times agree; `budget_s` ends the task between two groups of workloads. `threads` None: as
    many as torch takes. `usual_pace_s`: pace by phase that times are put right to, None: the median
    of the task.
    """

    config: Mapping[str, Any]
    dtype: str
    todo: Mapping[int, tuple[LayerWorkload, ...]]
    device: str = "cpu"
    threads: int | None = None
    budget_s: float = float("inf")
    rounds: int = 100
    seed: int = 0
    usual_pace_s: Mapping[Phase, float] | None = None


@dataclass(frozen=True)
class MeasuredLayer:
    """Median seconds of one layer at the machine's usual pace, and as they were (`raw_s`).

    `spread` is the interquartile range over the median.
    """

    bits: int
    workload: LayerWorkload
    seconds: float
    raw_s: float
    spread: float
    repetitions: int


@dataclass(frozen=True)
class ProfileState:
    """All that a task has found so far; `left` workloads are not measured yet.

    `usual_pace_s`: what times are put right to; `pace_spread`: interquartile range of the machine's
    pace over its median. `backends`: kernel backend of each bitwidth.
    """

    measured: tuple[MeasuredLayer, ...]
    left: int
    too_large: int
    usual_pace_s: Mapping[Phase, float]
    pace_spread: float
    backends: Mapping[int, str]
    torch_version: str


@dataclass
class _Passes:
    """Seconds of the passes of one workload, and of the reference work around each."""

    bits: int
    workload: LayerWorkload
    seconds: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)

    def is_known(self, copies: int) -> bool:
        """Whether more passes through so many layers would be for little."""
        if sum(self.seconds) * copies > _LONG_S:
            return True
        measured = self.measured(usual_pace_s=1.0)
        return _ERROR_OF_MEDIAN * measured.spread < _KNOWN * math.sqrt(measured.repetitions)

    def measured(self, usual_pace_s: float) -> MeasuredLayer:
        raw = np.array(self.seconds)
        low, median, high = np.quantile(
            raw / np.array(self.paces) * usual_pace_s, (0.25, 0.5, 0.75)
        )
        return MeasuredLayer(
            self.bits,
            self.workload,
            float(median),
            float(np.median(raw)),
            float((high - low) / median),
            len(raw),
        )


class _Profiler:
    """The state of one task while it runs."""

    def __init__(self, task: ProfileTask) -> None:
        if task.threads is not None:
            torch.set_num_threads(task.threads)
        self._task = task
        self._device = torch.device(task.device)
        self._processor = local_processor(self._device)
        self._pace = Pace(self._device)
        self._random = random.Random(task.seed)
        self._passes: list[_Passes] = []
        self._too_large = 0

    def run(self) -> Iterator[ProfileState]:
        began = time.monotonic()
        for bits, workloads in self._task.todo.items():
            if not workloads or time.monotonic() - began > self._task.budget_s:
                continue
            layers = self._layers(bits)
            for group in self._groups(layers, workloads):
                if time.monotonic() - began > self._task.budget_s:
                    break
                self._measure(layers, bits, group)
                yield self._state()
        yield self._state()

    def _layers(self, bits: int) -> TimedLayers:
        task = self._task
        form = LayerForm(bits, self._processor, getattr(torch, task.dtype), self._device)
        return TimedLayers(library_config(task.config), form, task.seed)

    def _groups(
        self, layers: TimedLayers, workloads: Sequence[LayerWorkload]
    ) -> Iterator[list[LayerWorkload]]:
        """Workloads at random, together as far as their keys and values have room."""
        group: list[LayerWorkload] = []
        filled = 0
        for workload in self._random.sample(workloads, len(workloads)):
            size = layers.kv_bytes(workload)
            if group and filled + size > _GROUP_BYTES:
                yield group
                group, filled = [], 0
            group.append(workload)
            filled += size
        yield group

    def _measure(self, layers: TimedLayers, bits: int, group: Sequence[LayerWorkload]) -> None:
        """Every workload of `group` once a round, the reference work between any two passes."""
        ready: list[tuple[_Passes, PreparedWorkload]] = []
        for workload in group:
            try:
                ready.append((_Passes(bits, workload), layers.prepare(workload)))
            except torch.OutOfMemoryError:
                self._too_large += 1
        for turn in range(self._task.rounds):
            before = self._pace.probe()
            for passes, prepared in self._random.sample(ready, len(ready)):
                if turn >= _LEAST_ROUNDS and passes.is_known(prepared.copies):
                    continue
                began = self._pace.now()
                layers.pass_through(prepared)
                seconds = self._pace.now() - began
                after, phase = self._pace.probe(), passes.workload.phase
                passes.seconds.append(seconds / prepared.copies)
                passes.paces.append(math.sqrt(before.seconds(phase) * after.seconds(phase)))
                before = after
        self._passes += [passes for passes, _ in ready]

    def _median_paces(self) -> dict[Phase, float]:
        paces: dict[Phase, list[float]] = {}
        for passes in self._passes:
            paces.setdefault(passes.workload.phase, []).extend(passes.paces)
        return {phase: float(np.median(found)) for phase, found in paces.items()}

    def _state(self) -> ProfileState:
        usual = dict(self._task.usual_pace_s or self._median_paces())
        relative = [
            pace / usual[passes.workload.phase] for passes in self._passes for pace in passes.paces
        ]
        low, median, high = np.quantile(relative or [1.0], (0.25, 0.5, 0.75))
        planned = sum(len(workloads) for workloads in self._task.todo.values())
        dtype, processor = self._task.dtype, self._processor
        return ProfileState(
            measured=tuple(
                passes.measured(usual[passes.workload.phase]) for passes in self._passes
            ),
            left=planned - len(self._passes) - self._too_large,
            too_large=self._too_large,
            usual_pace_s=usual,
            pace_spread=float((high - low) / median),
            backends={bits: backend_name(processor, bits, dtype) for bits in self._task.todo},
            torch_version=torch.__version__,
        )


def measure(task: ProfileTask) -> Iterator[ProfileState]:
    """Measure on this process's device; yields all that is known after every group of workloads.

    Times are put right by the machine's pace: they are those of its median pace during the task.
    They are a stage's where the process was started as one (`actors.processes.environment`).
    """
    yield from _Profiler(task).run()


def measure_on_cluster(task: ProfileTask, device: Device) -> Iterator[ProfileState]:
    """The same as a Ray task on a node that has `device`, in a process that was started as a
    stage's; needs an initialised Ray.

    Raises `DeviceError` where no node offers the device.
    """
    (placement,) = place([Wanted.of(device)], ray.cluster_resources())
    environment = {"env_vars": stage_environment(placement.threads)}
    remote: Any = ray.remote(_measure_there).options(
        num_cpus=placement.num_cpus,
        num_gpus=placement.num_gpus,
        resources=dict(placement.resources),
        runtime_env=environment,
        num_returns="streaming",
        max_retries=0,
    )
    for reference in get_streamed(remote.remote(task, device.accelerator.name)):
        try:
            yield get_answer(reference)
        except RayTaskError as error:
            if isinstance(error.cause, LlmpqError):
                raise error.cause from None
            raise


def _measure_there(task: ProfileTask, accelerator: str) -> Iterator[ProfileState]:
    """In the Ray task: check the GPU, then measure."""
    if task.device == "cuda":
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
        if name == "no GPU" or find_accelerator(name).name != accelerator:
            raise DeviceError(f"the task was to measure a {accelerator}, but its node has {name}")
    yield from measure(task)


@dataclass(frozen=True)
class Wanted:
    """A device as placement asks for it."""

    index: int
    accelerator: str
    emulated: bool
    threads: int
    custom_resource: str | None

    @classmethod
    def of(cls, device: Device) -> Wanted:
        """What a stage on `device` asks for."""
        return cls(
            0, device.accelerator.name, device.emulated, device.threads or 1, device.custom_resource
        )
