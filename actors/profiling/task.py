"""Measuring a design of layer workloads on the device of this process."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from actors.attention.timer import AttentionTimer
from actors.processes.device import device_here
from actors.profiling.head import TimedHead
from actors.profiling.layers import TimedLayers
from actors.stage.model_config import config_of_values
from planner.profiles.design import LayerWorkload
from planner.scheduling import Phase
from quant.backends.table import backend_name
from quant.devices import local_processor
from quant.linear import LayerForm

# Products of 1.4 ms on one core with AVX512-BF16, 2 ms on a T4; sums of 64 and 512 MiB, more than
# the caches of processors and of GPUs hold. A core with AVX2 alone takes 1.5 s for the product in
# bfloat16 and 7 ms in float32, which is taken there.
_CPU_ROWS, _CPU_WIDTH, _CPU_ELEMENTS = 256, 1024, 16 * 2**20
_GPU_ROWS, _GPU_WIDTH, _GPU_ELEMENTS = 2048, 4096, 128 * 2**20


@dataclass(frozen=True)
class ReferenceTimes:
    """Seconds of the two parts of the reference work."""

    compute_s: float
    memory_s: float

    def seconds(self, phase: Phase) -> float:
        """Seconds in proportion to which passes of `phase` become slower or faster.

        Decode is held up by memory as the sum is; prefill by both (on a shared machine whose
        memory became a quarter slower, prefill took an eighth longer).
        """
        if phase == "decode":
            return self.memory_s
        return math.sqrt(self.compute_s * self.memory_s)


class ReferenceWork:
    """The reference work on `device`, which also empties the device's caches of weights.

    A CPU that computes in `dtype` float32 multiplies in it here too.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._on_gpu = device.type == "cuda"
        rows, width, elements = (
            (_GPU_ROWS, _GPU_WIDTH, _GPU_ELEMENTS)
            if self._on_gpu
            else (_CPU_ROWS, _CPU_WIDTH, _CPU_ELEMENTS)
        )
        if self._on_gpu:
            dtype = torch.float16
        elif dtype != torch.float32:
            has_products = "avx512_bf16" in local_processor(device).instruction_sets
            dtype = torch.bfloat16 if has_products else torch.float32
        self._left = torch.full((rows, width), 0.5, dtype=dtype, device=device)
        self._right = torch.full((width, width), 0.5, dtype=dtype, device=device)
        self._memory = torch.ones(elements, device=device)

    def run(self) -> ReferenceTimes:
        began = self.now()
        torch.mm(self._left, self._right)
        between = self.now()
        self._memory.sum()
        return ReferenceTimes(between - began, self.now() - between)

    def now(self) -> float:
        """Seconds of the clock, once everything that was started on the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize(self._left.device)
        return time.perf_counter()


# Workloads whose weights, keys and values take at most so many bytes together are measured in
# turns: the more of them, the less a slow moment of the machine falls on one of them, or on one
# bitwidth, alone.
_GROUP_BYTES = 1 << 30
LEAST_ROUNDS = 9
# A workload is known well enough when its median's relative standard error is below `_KNOWN`, or
# when it has been timed for long.
_KNOWN = 0.01
TELL_S = 2.0  # between two reports of a group of workloads, which may take minutes
# Standard error of a median, in interquartile ranges over the root of the number of samples (normal
# noise).
_ERROR_OF_MEDIAN = 0.93


@dataclass(frozen=True)
class ProfileTask:
    """A measurement: `todo` has the workloads of every bitwidth, `config` the model's values,
    `alike` the numbers of those of its layers that are meant, where not all are alike; with
    `is_head` its LM head is measured in place of layers. So many other processes of the node do the
    same meanwhile as there are `beside` (`actors.profiling.beside`).

    Each workload is passed `rounds` times in rounds of random order, less often where its times
    agree, or where it has taken `long_s` in `least_rounds`; `budget_s` ends the task between two
    rounds. `threads` None: as many as torch takes. Times are corrected to a machine on which the
    reference work of each phase takes `usual_reference_s`; None: its median during the task.
    """

    config: Mapping[str, Any]
    dtype: str
    todo: Mapping[int, tuple[LayerWorkload, ...]]
    device: str = "cpu"
    threads: int | None = None
    budget_s: float = float("inf")
    rounds: int = 100
    least_rounds: int = LEAST_ROUNDS
    long_s: float = 1.0
    seed: int = 0
    usual_reference_s: Mapping[Phase, float] | None = None
    alike: tuple[int, ...] = ()
    is_head: bool = False
    beside: int = 0


class Timed(Protocol):
    """What is passed through: layers or a head; what one has prepared is not for the other."""

    held_bytes: int
    """Of its weights, about."""

    def kv_bytes(self, workload: LayerWorkload) -> int: ...

    def prepare(self, workload: LayerWorkload) -> Any: ...

    def pass_through(
        self,
        prepared: Any,
        timer: AttentionTimer | None = None,
        experts: AttentionTimer | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class MeasuredLayer:
    """Median seconds of one layer, corrected by the reference work, and as they were (`raw_s`).

    `spread` is the interquartile range over the median. `attention_s` and `experts_s`: those of
    `seconds` in which attention and experts ran; None where that was not to be told, or there are
    none. `backend`: the kernel backend.
    """

    bits: int
    workload: LayerWorkload
    seconds: float
    raw_s: float
    spread: float
    repetitions: int
    backend: str
    attention_s: float | None = None
    experts_s: float | None = None


@dataclass(frozen=True)
class ProfileState:
    """Everything that a task has found so far; `left` workloads are not measured yet, of which
    `under_way` have been timed often enough, and come with the others of their group.

    `usual_reference_s`: seconds of the reference work that times are corrected to, by phase;
    `speed_spread`: interquartile range of its seconds over their median.
    """

    measured: tuple[MeasuredLayer, ...]
    left: int
    too_large: int
    usual_reference_s: Mapping[Phase, float]
    speed_spread: float
    torch_version: str
    under_way: int = 0


def median_and_spread(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float]:
    """The median, and the interquartile range over it."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(middle), float((high - low) / middle)


@dataclass(frozen=True)
class _Planned:
    """A workload and the layers or the head, of `bits`, that it is to pass through."""

    layers: Timed
    bits: int
    backend: str
    workload: LayerWorkload


@dataclass
class _Passes:
    """Seconds of each pass of one workload, and of the reference work around the pass; `shares` of
    them are attention's and experts'.
    """

    bits: int
    workload: LayerWorkload
    backend: str
    seconds: list[float] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    shares: list[tuple[float, float]] = field(default_factory=list)

    def is_known(self, copies: int, task: ProfileTask) -> bool:
        """Whether more passes through `copies` layers would add little."""
        if len(self.seconds) < task.least_rounds:
            return False
        if sum(self.seconds) * copies > task.long_s:
            return True
        if len(self.seconds) < LEAST_ROUNDS:
            return False
        measured = self.measured(usual_reference_s=1.0)
        return _ERROR_OF_MEDIAN * measured.spread < _KNOWN * math.sqrt(measured.repetitions)

    def measured(self, usual_reference_s: float) -> MeasuredLayer:
        raw = np.array(self.seconds)
        median, spread = median_and_spread(raw / np.array(self.reference_s) * usual_reference_s)
        attention, experts = np.median(self.shares or [(0.0, 0.0)], axis=0).tolist()
        return MeasuredLayer(
            self.bits,
            self.workload,
            median,
            float(np.median(raw)),
            spread,
            len(raw),
            self.backend,
            attention * median if 0 < attention < 1 else None,
            experts * median if 0 < experts < 1 - attention else None,
        )


class _Profiler:
    """One task while it runs."""

    def __init__(self, task: ProfileTask) -> None:
        if task.threads is not None:
            torch.set_num_threads(task.threads)
        self._task = task
        self._device = device_here(task.device)
        self._processor = local_processor(self._device)
        self._reference = ReferenceWork(self._device, getattr(torch, task.dtype))
        self._timers = AttentionTimer(self._device), AttentionTimer(self._device)
        self._random = random.Random(task.seed)
        self._passes: list[_Passes] = []
        self._too_large = 0
        self._ends_s = math.inf

    def run(self) -> Iterator[ProfileState]:
        self._ends_s = time.monotonic() + self._task.budget_s
        for group in self._groups():
            if time.monotonic() > self._ends_s:
                break
            yield from self._measure(group)
            yield self._state()
        yield self._state()

    def _by_kernel(self) -> dict[tuple[int, str], list[LayerWorkload]]:
        """The workloads by bitwidth and kernel backend: that of a plan with such micro-batches."""
        found: dict[tuple[int, str], list[LayerWorkload]] = {}
        for bits, workloads in self._task.todo.items():
            for each in workloads:
                dtype, rows = self._task.dtype, each.decode_rows
                name = backend_name(self._processor, bits, dtype, decode_rows=rows)
                found.setdefault((bits, name), []).append(each)
        return found

    def _layers(self, bits: int, backend: str) -> Timed:
        task, dtype = self._task, getattr(torch, self._task.dtype)
        form = LayerForm(bits, self._processor, dtype, self._device, backend)
        config = config_of_values(task.config)
        if task.is_head:
            return TimedHead(config, form)
        return TimedLayers(config, form, task.seed, task.alike)

    def _groups(self) -> Iterator[list[_Planned]]:
        """All workloads, of one kernel in random order, together as far as there is room."""
        group: list[_Planned] = []
        filled = 0
        for (bits, backend), workloads in self._by_kernel().items():
            if filled > _GROUP_BYTES:
                yield group
                group, filled = [], 0
            try:
                layers = self._layers(bits, backend)
            except torch.OutOfMemoryError:
                self._too_large += len(workloads)
                continue
            filled += layers.held_bytes
            for workload in self._random.sample(workloads, len(workloads)):
                size = layers.kv_bytes(workload)
                if group and filled + size > _GROUP_BYTES:
                    yield group
                    group, filled = [], layers.held_bytes
                group.append(_Planned(layers, bits, backend, workload))
                filled += size
        yield group

    def _measure(self, group: Sequence[_Planned]) -> Iterator[ProfileState]:
        """Pass every workload of `group` once a round, with reference work between two passes;
        yields how far that is every `TELL_S`.
        """
        ready: list[tuple[_Passes, Timed, Any]] = []
        for each in group:
            passes = _Passes(each.bits, each.workload, each.backend)
            try:
                ready.append((passes, each.layers, each.layers.prepare(each.workload)))
            except torch.OutOfMemoryError:
                self._too_large += 1
        told_s = time.monotonic()
        for number in range(self._task.rounds):
            if number and time.monotonic() > self._ends_s:
                break
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                known = [one.is_known(p.copies, self._task) for one, _, p in ready]
                yield replace(self._state(), under_way=sum(known))
            before = self._reference.run()
            for passes, layers, prepared in self._random.sample(ready, len(ready)):
                if passes.is_known(prepared.copies, self._task):
                    continue
                seconds, attention_s, experts_s = self._timed(layers, prepared)
                after, phase = self._reference.run(), passes.workload.phase
                passes.seconds.append(seconds / prepared.copies)
                passes.shares.append((attention_s / seconds, experts_s / seconds))
                passes.reference_s.append(math.sqrt(before.seconds(phase) * after.seconds(phase)))
                before = after
        self._passes += [passes for passes, *_ in ready]

    def _timed(self, layers: Timed, prepared: Any) -> tuple[float, float, float]:
        """Seconds of a pass, and of attention and experts in it.

        Parts are timed where they run: alone, attention would find its keys and values in the
        caches, and as a difference it would have the noise of two passes, of which it may be a
        small part. On a GPU, where this slows a pass down, in a second pass.
        """
        on_cpu, began = self._device.type == "cpu", self._reference.now()
        layers.pass_through(prepared, *(self._timers if on_cpu else ()))
        seconds = self._reference.now() - began
        if not on_cpu:
            self._reference.run()  # which empties the caches as before the first pass
            layers.pass_through(prepared, *self._timers)
        return seconds, self._timers[0].take_s(), self._timers[1].take_s()

    def _median_reference_s(self) -> dict[Phase, float]:
        seconds: dict[Phase, list[float]] = {}
        for passes in self._passes:
            seconds.setdefault(passes.workload.phase, []).extend(passes.reference_s)
        return {phase: float(np.median(found)) for phase, found in seconds.items()}

    def _state(self) -> ProfileState:
        usual = dict(self._task.usual_reference_s or self._median_reference_s())
        relative = [
            seconds / usual[passes.workload.phase]
            for passes in self._passes
            for seconds in passes.reference_s
        ]
        planned = sum(len(workloads) for workloads in self._task.todo.values())
        return ProfileState(
            measured=tuple(
                passes.measured(usual[passes.workload.phase]) for passes in self._passes
            ),
            left=planned - len(self._passes) - self._too_large,
            too_large=self._too_large,
            usual_reference_s=usual,
            speed_spread=median_and_spread(relative or [1.0])[1],
            torch_version=torch.__version__,
        )


def measure(task: ProfileTask) -> Iterator[ProfileState]:
    """Measure on this process's device; yields everything known after every group of workloads.

    Times are those of a stage where the process was started as one
    (`actors.processes.device`).
    """
    yield from _Profiler(task).run()
