"""The Ray actor around a stage, and the chain of actors as the first stage's scheduler sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from actors.device import local_device
from actors.messages import Finished, MicroBatch, Request, Sampled, StageStats, TokenIds
from actors.pipeline import drive
from actors.scheduler import StaticBatchScheduler
from actors.stage import Stage
from actors.stage_spec import StageSpec
from actors.transport import PackedTensor, pack, unpack
from quant.cache.settings import CacheSettings
from quant.checkpoint import resolve
from quant.processor import local_processor


@dataclass(frozen=True)
class Hold:
    """Modelled seconds of an emulated device's full micro-batch, already scaled; 0: compute at own
    pace.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def wait(self, batch: MicroBatch, began: float) -> None:
        """Sleep until the modelled time since `began` has passed."""
        modelled = self.decode_s if batch.is_decode else self.prefill_s
        time.sleep(max(0.0, began + modelled - time.perf_counter()))


class StageActor:
    """One pipeline stage in its own process. Made cheaply; `load` does the work and reports what is
    held.
    """

    def __init__(
        self, spec: StageSpec, checkpoint: str, threads: int, hold: Hold, cache: CacheSettings
    ) -> None:
        torch.set_num_threads(threads)
        self._spec = spec
        self._checkpoint = checkpoint
        self._hold = hold
        self._cache = cache
        self._stage: Stage | None = None

    def load(self) -> StageStats:
        """Read, quantize and keep the stage's shard, or take it from this node's cache; raises what
        `Stage` raises.
        """
        device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        self._stage = Stage(self._spec, folder, device, local_processor(device), self._cache)
        return self._stage.stats()

    def step(self, batch: MicroBatch, inputs: PackedTensor) -> PackedTensor | Sampled:
        """Compute a micro-batch that came from the stage before."""
        began = time.perf_counter()
        result = self._loaded().step(batch, unpack(inputs))
        self._hold.wait(batch, began)
        return result if isinstance(result, Sampled) else pack(result)

    def finish(self, batch: MicroBatch, last_hidden: PackedTensor) -> Sampled:
        """LM head and sampling, of what came back from the last stage."""
        return self._loaded().finish(batch, unpack(last_hidden))

    def generate(
        self,
        requests: Sequence[Request],
        prefill_micro_batch: int,
        decode_micro_batch: int,
        following: Sequence[ActorHandle[StageActor]],
    ) -> Iterator[tuple[Finished, ...]]:
        """First stage only: schedule one global batch over the chain; yields what ended."""
        scheduler = StaticBatchScheduler(requests, prefill_micro_batch, decode_micro_batch)
        for finished in drive(scheduler, ActorChain(self, following)):
            if finished:
                yield finished

    def stats(self) -> StageStats:
        """Work done and bytes held so far."""
        return self._loaded().stats()

    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was loaded")
        return self._stage


class ActorChain:
    """The pipeline from the first stage on: hidden states go down it, tokens come back."""

    def __init__(self, first: StageActor, following: Sequence[ActorHandle[StageActor]]) -> None:
        self._first = first
        self._following = following
        self.stages = 1 + len(following)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Any:
        """Compute the first stage here and hand the result down the chain."""
        passed: Any = self._first.step(batch, pack(torch.from_numpy(token_ids)))
        for actor in self._following:
            passed = actor.step.remote(batch, passed)
        return batch, passed

    def result(self, handle: Any) -> Sampled:
        """The sampled tokens; the first stage samples them where the LM head lives there."""
        batch, answer = handle
        if isinstance(answer, ray.ObjectRef):
            answer = ray.get(answer)
        return answer if isinstance(answer, Sampled) else self._first.finish(batch, answer)
