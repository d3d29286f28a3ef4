"""Stages and links of devices that are not here: this machine computes, and holds each result until
its modelled time is over.

A stage is busy from when its input is there, by the model and in truth, until the modelled seconds
of the micro-batch are over. Its result then travels over an emulated link while the stage goes on.
So a run measures the schedule with the hops and the driver as they really are; how late a sleep
ends is not counted. Clocks of different machines do not agree, so an emulated pipeline runs on one
machine.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from actors.messages import Admission, MicroBatch, Sampled, Sampling
from actors.stage.spec import ScaledTimes
from actors.transport.message_format import Codec
from actors.transport.message_limits import Limits
from actors.transport.nccl import GpuLink
from planner.plan.modelled_times import ModelledTimes
from quant.common.errors import DeviceError

if TYPE_CHECKING:  # drivers know of emulated times without transformers
    from actors.stage.stage import Stage

SPIN_S = 2e-4
"""The last part of a wait is a busy loop: sleeps of 1 to 10 ms ended 0.1 ms late (median)."""


class EmulatedClock:
    """The modelled time that one process has reached. How late it really is does not add up.

    `now_s` must be a clock that all processes of the machine share; `sleep` may end late.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now_s = now_s
        self._sleep = sleep
        self.reached_s = 0.0
        self._late_s = 0.0  # from `reached_s` until the process woke up
        self.is_waiting = False  # may be read by any thread

    def wait_until(self, ready_at_s: float) -> None:
        """Wait for something that takes its modelled time."""
        now_s = self.now_s()
        if now_s < ready_at_s:
            self.is_waiting = True
            while now_s < ready_at_s:
                if ready_at_s - now_s > SPIN_S:
                    self._sleep(ready_at_s - now_s - SPIN_S)
                now_s = self.now_s()
            self.is_waiting = False
            self.reached_s, self._late_s = ready_at_s, now_s - ready_at_s
        elif ready_at_s > self.reached_s:
            self.reached_s, self._late_s = now_s, 0.0

    def modelled_s(self, now_s: float) -> float:
        """The modelled time at the clock's `now_s`: without the lateness of the last wait."""
        return max(self.reached_s, now_s - self._late_s)


_ARRIVAL = struct.Struct("<d")


class EmulatedLink(Codec):
    """A codec whose messages end with the time at which they arrive, and are held until then.

    A result leaves when its stage has computed it and the link is free, while the stage goes on.
    """

    def __init__(
        self, times: ScaledTimes, clock: EmulatedClock, limits: Limits | None = None
    ) -> None:
        super().__init__(limits)
        self._times = times
        self._clock = clock
        self._free_s = 0.0

    def encode(
        self, batch: MicroBatch, result: Tensor | Sampled, link: GpuLink | None = None
    ) -> Tensor:
        """The message of what the clock's stage has just computed, and its time of arrival."""
        sent_s = max(self._clock.reached_s, self._free_s)
        self._free_s = sent_s + self._times.transfer_s(batch)
        arrival = torch.frombuffer(bytearray(_ARRIVAL.pack(self._free_s)), dtype=torch.uint8)
        return torch.cat([super().encode(batch, result, link), arrival])

    def decode(
        self, message: Tensor, link: GpuLink | None = None
    ) -> tuple[MicroBatch, Tensor] | Sampled:
        """The content of `message`, once the link before this stage has brought it."""
        found = super().decode(message[: -_ARRIVAL.size], link)
        (arrival_s,) = _ARRIVAL.unpack(message[-_ARRIVAL.size :].numpy().data)
        self._clock.wait_until(arrival_s)
        return found

    def message_bytes(self, first_frame: Tensor) -> int:
        size = super().message_bytes(first_frame)
        return size + _ARRIVAL.size if size else 0


OVERRUN_SHARE = 0.01
"""The share of all modelled seconds so far by which computing may outlast the modelled times of
single micro-batches: stalls by other programs, which then show in the measured latency."""


class EmulatedStage:
    """A `Stage` of which every micro-batch takes its modelled time, but for what it finishes."""

    def __init__(self, stage: Stage, times: ScaledTimes, clock: EmulatedClock) -> None:
        self._stage = stage
        self._times = times
        self._clock = clock
        self._modelled_s = self._overrun_s = 0.0  # sums over micro-batches

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """Compute as `Stage.step`, and return when the modelled seconds are over.

        Raises `DeviceError` where computing takes longer than them, but for stalls of
        `OVERRUN_SHARE`.
        """
        computing_s = self._clock.now_s()
        began_s = self._clock.modelled_s(computing_s)
        result = self._stage.step(batch, inputs)
        modelled_s = self._times.compute_s(batch)
        self._check(batch, self._clock.now_s() - computing_s, modelled_s)
        self._clock.wait_until(began_s + modelled_s)
        return result

    def _check(self, batch: MicroBatch, computed_s: float, modelled_s: float) -> None:
        self._modelled_s += modelled_s
        self._overrun_s += max(0.0, computed_s - modelled_s)
        if self._overrun_s <= OVERRUN_SHARE * self._modelled_s:
            return
        scale = self._times.scale
        raise DeviceError(
            f"stage {self._stage.spec.index} computed a {batch.kind} micro-batch of "
            f"{len(batch.slots)} requests (first slot {int(batch.slots[0])}, "
            f"{int(batch.counts.sum())} tokens) in "
            f"{computed_s * 1e3:.2f} ms, but its emulated device takes {modelled_s * 1e3:.2f} ms "
            f"at time scale {scale:g}; emulate with a time_scale of at least "
            f"{1.2 * scale * computed_s / modelled_s:.2g}, a smaller stand_in, or less else at the "
            "same time on this machine"
        )


def warm_up(stage: Stage, times: ModelledTimes) -> None:
    """Compute the largest micro-batches of `times`, so that nothing is compiled or allocated later.

    The room of a request is cleared when it is admitted, so that nothing is left of this.
    """
    spec = stage.spec
    most = min(times.decode[-1].requests, spec.slots, max(1, spec.kv_tokens // spec.max_tokens))
    size = min(times.prefill[-1].requests, most)
    prompt = max(1, spec.max_tokens - 2)
    for first in range(0, most, size):
        slots = np.arange(first, min(first + size, most))
        admitted = tuple(
            Admission(int(slot), "warm-up", 2, Sampling(ignore_eos=True)) for slot in slots
        )
        zeros, counts = np.zeros_like(slots), np.full_like(slots, prompt)
        _compute(stage, MicroBatch(slots, zeros, counts, slots * spec.max_tokens, admitted))
    slots = np.arange(most)
    starts, begins = np.full_like(slots, prompt), slots * spec.max_tokens
    _compute(stage, MicroBatch(slots, starts, np.ones_like(slots), begins))


def _compute(stage: Stage, batch: MicroBatch) -> None:
    tokens = int(batch.counts.sum())
    if stage.spec.is_first:
        stage.step(batch, torch.zeros(tokens, dtype=torch.int64))
    else:
        stage.step(batch, torch.zeros(tokens, stage.hidden_size))
