"""A pipeline whose stages are all in this process, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.messages import MicroBatch, Sampled, TokenIds
from actors.processes.meter import StageMeter, TelemetryOptions
from actors.stage.stage import Stage


class LocalPipeline:
    """Stages that compute one after the other."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.stages = len(stages)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        """Compute the micro-batch now."""
        x: torch.Tensor | Sampled = torch.from_numpy(token_ids)
        for stage in self._stages:
            assert not isinstance(x, Sampled), "a stage before the last one sampled"
            x = stage.step(batch, x)
        return x if isinstance(x, Sampled) else self._stages[0].finish(batch, x)

    def result(self, handle: Sampled) -> Sampled:
        """What `submit` computed."""
        return handle


def metered(stage: Stage) -> StageMeter:
    """What `stage` computes from now on, counted as its process would."""
    meter, step, finish = StageMeter(TelemetryOptions()), stage.step, stage.finish

    def counted_step(batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        with meter.computing(batch):
            return step(batch, inputs)

    def counted_finish(batch: MicroBatch, last_hidden: torch.Tensor) -> Sampled:
        with meter.sampling():
            return finish(batch, last_hidden)

    stage.step, stage.finish = counted_step, counted_finish  # type: ignore[method-assign]
    return meter
