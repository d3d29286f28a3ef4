"""The Ray actor around a rank that follows rank 0 of its stage."""

from __future__ import annotations

from collections.abc import Sequence

import ray
import torch
from torch import Tensor

from actors.collectives.group import ALONE, RankGroup
from actors.collectives.meeting import Meeting
from actors.messages import MicroBatch, Sampled
from actors.processes.handing_over import KeysValuesKeeper
from actors.processes.health import Health, RunReport
from actors.processes.loading import ShardLoader
from actors.stage.ranks.orders import Order
from actors.stage.ranks.orders import follow as follow_orders
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from actors.stage_figures import LayersLoaded, StageStats
from actors.transport.rendezvous import CONTROL
from quant.cache.settings import CacheSettings
from quant.common.errors import StageLostError
from quant.importance.statistics import LayerImportance


class RankActor(KeysValuesKeeper):
    """A rank of a stage in its own process, which rank 0 calls; made at little cost."""

    def __init__(
        self, spec: StageSpec, checkpoint: str, threads: int, cache: CacheSettings
    ) -> None:
        super().__init__()
        torch.set_num_threads(threads)
        self._spec = spec
        self._health = Health()
        self._loader = ShardLoader(spec, checkpoint, cache, self._health)
        self._stage: Stage | None = None
        self._group: RankGroup = ALONE

    def load(self, importance: Sequence[LayerImportance] | None) -> StageStats:
        """Load the rank's part of the shard; raises what `Stage` raises."""
        self._stage = self._loader.load(importance)
        return self._stage.stats()

    @ray.method(concurrency_group=CONTROL)
    def layers_loaded(self) -> LayersLoaded:
        """Give a sign of life: how far it is with what it loads."""
        return self._loader.progress

    def join(self, meeting: Meeting, epoch: int) -> None:
        """Meet the other ranks in `epoch`; `DeviceError` where they do not come."""
        stage, spec = self._loaded(), self._spec
        self._group = meeting.join(spec.rank, spec.degree, stage.device)
        stage.join(self._group)
        self.open_handover(stage.keys_values, epoch)

    def follow(self) -> None:
        """Compute along with rank 0 until it leaves the group, or this rank fails.

        The others notice the end of it, and `leave_run` tells why.
        """
        try:
            follow_orders(self, self._group)
        except StageLostError:  # the others have left
            pass
        finally:
            self._leave()

    def step(self, batch: MicroBatch, inputs: Tensor) -> Tensor | Sampled:
        """Run `Stage.step`, noting why it fails."""
        with self._health.computing(batch):
            return self._loaded().step(batch, inputs)

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        """Run `Stage.finish`, noting why it fails."""
        with self._health.computing(batch):
            return self._loaded().finish(batch, last_hidden)

    def forget_parked(self) -> None:
        """Free all host memory of requests."""
        self._loaded().forget_parked()

    def empty_inputs(self, batch: MicroBatch, order: Order) -> Tensor:
        """Run `Stage.empty_inputs`."""
        return self._loaded().empty_inputs(batch, order)

    def leave_run(self) -> RunReport:
        """Leave a broken run, once `follow` is over; the shard stays loaded."""
        self.close_handover()
        self._leave()
        if self._stage is not None:
            self._stage.forget_parked()
        return RunReport(self._health.take_failure(), None)

    def _leave(self) -> None:
        self._group = ALONE
        if self._stage is not None:
            self._stage.leave()

    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"{self._spec.name} was used before it was loaded")
        return self._stage
