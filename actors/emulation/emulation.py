"""Emulated devices: a stage computes for real and holds its result until the modelled time is over.

A stage is busy from when its input is there, by the model and in truth, until the modelled seconds
of this micro-batch are over. Its result travels for the modelled seconds of the transfer while the
stage goes on: the message says when it arrives by the model, and the next stage does not begin
before. What is measured so is the schedule, with hops, driver and all that they really take; that
a sleep ends late is not counted. Clocks of different machines do not agree, so an emulated
pipeline runs on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.messages import Admission, MicroBatch, Sampling
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from planner.model.finding import ModelShape
from planner.plan.modelled_times import ModelledTimes
from planner.plan.spec import PlanSpec, StagePlan
from quant.common.errors import DeviceError, SpecError

SPIN_S = 2e-4
"""Before the end of a wait, which is not slept: sleeps of 1 to 10 ms ended 0.1 ms late (median)."""

OVERRUN_SHARE = 0.01
"""Of the modelled seconds of a stage so far, what computing may have outlasted single holds by in
all: stalls by other programs, which then show in the measured latency."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Hold:
    """What an emulated stage is held to: `time_scale` times its modelled seconds; 0: to nothing."""

    times: ModelledTimes | None = None
    time_scale: float = 0.0

    @property
    def active(self) -> bool:
        """Whether anything is held."""
        return self.times is not None and self.time_scale > 0


def hold_of(plan: PlanSpec, stage: StagePlan) -> Hold:
    """The hold of a stage; plans without modelled times have those of full micro-batches."""
    if not (stage.emulated and plan.time_scale):
        return Hold()
    times = stage.modelled or ModelledTimes.constant(stage.prefill_s, stage.decode_s)
    return Hold(times, plan.time_scale)


class Pace:
    """The modelled course of stage `index`, whose process calls this around every micro-batch.

    The `clock` is one that all processes of the machine share; `sleep` may end late.
    """

    def __init__(
        self,
        hold: Hold,
        index: int,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._hold = hold
        self._index = index
        self._clock = clock
        self._sleep = sleep
        self._reached_s = 0.0  # how far this process has come by the model,
        self._late_s = 0.0  # and how much later it woke up then
        self._began_s = 0.0
        self._computing_s = 0.0
        self._link_free_s = 0.0
        self._modelled_s = self._overrun_s = 0.0  # sums over micro-batches
        self.is_holding = False  # for any thread: whether it waits, as the model asks

    def wait_for(self, ready_at_s: float) -> None:
        """Until something that takes its modelled time is there; 0: it takes none."""
        now = self._clock()
        if now < ready_at_s:
            self.is_holding = True
            while now < ready_at_s:
                if ready_at_s - now > SPIN_S:
                    self._sleep(ready_at_s - now - SPIN_S)
                now = self._clock()
            self.is_holding = False
            self._reached_s, self._late_s = ready_at_s, now - ready_at_s
        elif ready_at_s > self._reached_s:
            self._reached_s, self._late_s = now, 0.0

    def begin(self, batch: MicroBatch) -> None:
        """Before computing `batch`: wait until the modelled transfer has brought it."""
        if not self._hold.active:
            return
        self.wait_for(batch.ready_at_s)
        self._computing_s = self._clock()
        self._began_s = max(self._reached_s, self._computing_s - self._late_s)

    def end(self, batch: MicroBatch) -> float:
        """After it: hold the result until its time has come; when the next stage will have it.

        Raises `DeviceError` where computing takes longer than the modelled time, but for stalls
        of `OVERRUN_SHARE`.
        """
        times, scale = self._hold.times, self._hold.time_scale
        if times is None or not self._hold.active:
            return 0.0
        modelled_s = scale * times.compute_s(batch.is_decode, lengths_of(batch))
        computed_s = self._clock() - self._computing_s
        self._modelled_s += modelled_s
        self._overrun_s += max(0.0, computed_s - modelled_s)
        if self._overrun_s > OVERRUN_SHARE * self._modelled_s:
            raise self._too_slow(batch, computed_s, modelled_s)
        done_s = self._began_s + modelled_s
        self.wait_for(done_s)
        tokens = int(batch.counts.sum())
        sent_s = max(done_s, self._reached_s, self._link_free_s)
        self._link_free_s = sent_s + scale * times.transfer_s(tokens, len(batch.slots))
        return self._link_free_s

    def _too_slow(self, batch: MicroBatch, computed_s: float, modelled_s: float) -> DeviceError:
        kind = "decode" if batch.is_decode else "prefill"
        scale = self._hold.time_scale
        return DeviceError(
            f"stage {self._index} computed a {kind} micro-batch of {len(batch.slots)} requests "
            f"(first slot {int(batch.slots[0])}, {int(batch.counts.sum())} tokens) in "
            f"{computed_s * 1e3:.2f} ms, but its emulated device takes {modelled_s * 1e3:.2f} ms "
            f"at time scale {scale:g}; emulate with a time_scale of at least "
            f"{1.2 * scale * computed_s / modelled_s:.2g}, a smaller stand_in, or less else at the "
            "same time on this machine"
        )


def lengths_of(batch: MicroBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """What the latency model calls the length of each request: prompt, or context before."""
    lengths: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        batch.starts if batch.is_decode else batch.counts
    )
    return lengths


def warm_up(stage: Stage, hold: Hold) -> None:
    """Compute the largest micro-batches once, so that nothing is compiled or allocated later.

    Every slot is cleared when a request takes it, so that nothing is left of this.
    """
    if hold.times is None or not hold.active:
        return
    spec = stage.spec
    most = min(hold.times.decode[-1].requests, spec.slots)
    size = min(hold.times.prefill[-1].requests, spec.slots)
    prompt = max(1, spec.max_tokens - 2)
    for first in range(0, most, size):
        slots = np.arange(first, min(first + size, spec.slots))
        admitted = tuple(
            Admission(int(slot), "warm-up", 2, Sampling(ignore_eos=True)) for slot in slots
        )
        zeros, counts = np.zeros_like(slots), np.full_like(slots, prompt)
        _compute(stage, MicroBatch(slots, zeros, counts, admitted))
    slots = np.arange(most)
    batch = MicroBatch(slots, np.full_like(slots, prompt), np.ones_like(slots))
    _compute(stage, batch)


def _compute(stage: Stage, batch: MicroBatch) -> None:
    tokens = int(batch.counts.sum())
    if stage.spec.is_first:
        stage.step(batch, torch.zeros(tokens, dtype=torch.int64))
    else:
        stage.step(batch, torch.zeros(tokens, stage.hidden_size))


def stand_in_spec(spec: StageSpec, shape: ModelShape) -> StageSpec:
    """`spec` with one layer of a small model of this `shape` in place of the planned ones.

    Any number of stages can be played: they take the small model's layers by turns. `SpecError`
    where it has no room for the planned requests.
    """
    if spec.max_tokens > shape.max_positions:
        raise SpecError(
            f"stand-in {shape.name} has {shape.max_positions} positions, but requests of the plan "
            f"are up to {spec.max_tokens} tokens long; take one with more positions"
        )
    layer = spec.index % shape.layers
    return replace(
        spec,
        layers=range(layer, layer + 1),
        bitwidths=(16,),
        backends={},
        dtype="float32",
        memory_limit_bytes=0,
        kv_bits=16,
    )


def check_planned_memory(plan: PlanSpec) -> None:
    """Whether every stage that a stand-in plays would fit its device; `DeviceError` if not."""
    for stage in plan.stages:
        if plan.stand_in is not None and stage.memory_bytes > stage.memory_limit_bytes:
            raise DeviceError(
                f"stage {stage.index} needs {stage.memory_bytes} bytes by the plan, but the "
                f"emulated {stage.device} offers {stage.memory_limit_bytes}; plan again, with "
                "fewer bits or a smaller batch"
            )
