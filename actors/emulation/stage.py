"""An emulated stage: it computes for real and holds each result until the modelled time is over.

A stage is busy from when its input is there, by the model and in truth, until the modelled seconds
of the micro-batch are over. Its result then travels over an emulated link while the stage goes on.
So a run measures the schedule with the hops and the driver as they really are; how late a sleep
ends is not counted. Clocks of different machines do not agree, so an emulated pipeline runs on one
machine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.emulation.clock import EmulatedClock
from actors.emulation.times import ScaledTimes
from actors.messages import Admission, MicroBatch, Sampled, Sampling
from actors.stage.handed_over import HeldKeysValues
from actors.stage.stage import Stage
from actors.stage_figures import StageStats
from planner.plan.modelled_times import ModelledTimes
from quant.common.errors import DeviceError

OVERRUN_SHARE = 0.01
"""The share of all modelled seconds so far by which computing may outlast the modelled times of
single micro-batches: stalls by other programs, which then show in the measured latency."""


class EmulatedStage:
    """A `Stage` of which every micro-batch takes its modelled time."""

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

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """Compute LM head and sampling as `Stage.finish`, in their real time."""
        return self._stage.finish(batch, last_hidden)

    @property
    def keys_values(self) -> HeldKeysValues:
        """What lies in the host memory of the stage that computes."""
        return self._stage.keys_values

    def forget_parked(self) -> None:
        """Free all host memory of requests, as `Stage.forget_parked`."""
        self._stage.forget_parked()

    def stats(self) -> StageStats:
        """Work done and bytes held so far by the stage that computes."""
        return self._stage.stats()

    @property
    def max_columns(self) -> int:
        """Most columns of hidden states between stages."""
        return self._stage.max_columns

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
