"""Stages that break where a test wants them to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from actors.messages import MicroBatch, Sampled, StageStats
from actors.processes.stage_actor import StageActor

LARGEST = 2  # requests of a decode micro-batch for which there is memory
ASKED_BYTES = 2 * 2**30
DEATHS = "deaths-left"


class FaultyActor(StageActor):
    """Breaks at requests by what their `custom_id` begins with, as stage 1 only.

    "kills": its process ends, as it does when the kernel is short of memory. "raises": an error
    like those of kernels. Requests that begin with "large" only fit in twos.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._ids: dict[int, str] = {}

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        """Break, or compute."""
        self._ids |= {admission.slot: admission.custom_id for admission in batch.admitted}
        ids = [self._ids[slot] for slot in batch.slots.tolist()]
        if self._spec.index == 1:
            with self._health.computing(batch):
                break_at(ids)
        return super().compute(batch, inputs)


class DyingActor(StageActor):
    """Stage 1 dies while it loads, as often as a file in its cache folder says."""

    def load(self) -> StageStats:
        """Die, or load."""
        left = Path(str(self._cache.folder), DEATHS)
        if self._spec.index == 1 and int(left.read_text()):
            left.write_text(str(int(left.read_text()) - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load()


def break_at(ids: list[str]) -> None:
    """As the class says."""
    if any(custom_id.startswith("kills") for custom_id in ids):
        os.kill(os.getpid(), signal.SIGKILL)
    if any(custom_id.startswith("raises") for custom_id in ids):
        raise ValueError("a shape that no kernel takes")
    if sum(custom_id.startswith("large") for custom_id in ids) > LARGEST:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
