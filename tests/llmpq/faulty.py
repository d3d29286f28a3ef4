"""Stages that break where a test wants them to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.messages import MicroBatch, Sampled
from actors.processes.ranks import RankActor
from actors.processes.stage_actor import StageActor
from actors.stage_figures import StageStats
from quant.rounding.importance import LayerImportance

LARGEST = 2  # requests of a decode micro-batch for which there is memory
ASKED_BYTES = 2 * 2**30


class FaultyActor(StageActor):
    """Breaks at requests by what their `custom_id` begins with, as stage 1 only.

    "raises": an error like those of kernels. Requests that begin with "large" only fit in twos.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._ids: dict[int, str] = {}

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        self._ids |= {admission.slot: admission.custom_id for admission in batch.admitted}
        ids = [self._ids[slot] for slot in batch.slots.tolist()]
        if self._spec.index == 1:
            with self._health.computing(batch):
                break_at(ids)
        return super().compute(batch, inputs)


def break_at(ids: list[str]) -> None:
    """Raise what `FaultyActor` tells of."""
    if any(custom_id.startswith("raises") for custom_id in ids):
        raise ValueError("a shape that no kernel takes")
    if sum(custom_id.startswith("large") for custom_id in ids) > LARGEST:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class FaultyRank(RankActor):
    """Breaks as `FaultyActor`, as rank 1 of stage 0."""

    def load(self, importance: Sequence[LayerImportance] | None) -> StageStats:
        found = super().load(importance)
        stage, ids = self._loaded(), dict[int, str]()
        computed = stage.step

        def step(batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
            ids.update({each.slot: each.custom_id for each in batch.admitted})
            break_at([ids[slot] for slot in batch.slots.tolist()])
            return computed(batch, inputs)

        stage.step = step  # type: ignore[method-assign]
        return found
