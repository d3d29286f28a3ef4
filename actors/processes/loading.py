"""Loading a stage's shard into its process, and telling how far that is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import torch

from actors.processes.device import local_device
from actors.processes.health import Health
from actors.stage.importance import measure_stage
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from actors.stage_figures import LayersLoaded
from quant.cache.settings import CacheSettings
from quant.checkpoint.model_reference import resolve
from quant.devices import local_processor
from quant.importance.statistics import LayerImportance
from quant.loading.loader import noting_layers


class ShardLoader:
    """Loads the shard of `spec` to this process's device, of which `health` is told.

    `progress` may be read by any thread.
    """

    def __init__(
        self, spec: StageSpec, checkpoint: str, cache: CacheSettings, health: Health
    ) -> None:
        self.progress = LayersLoaded()
        self._spec = spec
        self._checkpoint = checkpoint
        self._cache = cache
        self._health = health

    def measure(self, hidden: torch.Tensor | None) -> tuple[torch.Tensor, list[LayerImportance]]:
        """Run `measure_stage` over the stage's whole layers, also where it has several ranks."""
        device = self._health.device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        with self._counting_layers("importance"):
            found = measure_stage(self._spec, folder, device, local_processor(device), hidden)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the weights that come now
        return found

    def load(self, importance: Sequence[LayerImportance] | None) -> Stage:
        """Read, quantize and keep the shard, or take it from this node's cache; raises what `Stage`
        raises.
        """
        device = self._health.device = local_device(self._spec)
        folder, processor = resolve(self._checkpoint), local_processor(device)
        with self._counting_layers("weights"):
            return Stage(self._spec, folder, device, processor, self._cache, importance)

    def _counting_layers(
        self, what: Literal["importance", "weights"]
    ) -> AbstractContextManager[None]:
        """Count the layers that are loaded meanwhile."""
        self.progress = LayersLoaded(what, 0, len(self._spec.layers))
        return noting_layers(self._note_layer)

    def _note_layer(self) -> None:
        self.progress = replace(self.progress, done=self.progress.done + 1)
