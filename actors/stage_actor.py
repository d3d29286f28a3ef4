"""The Ray actor around a stage, and what the first stage's does beside: lead a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ray
import torch
from ray.actor import ActorHandle

from actors.device import local_device
from actors.messages import Chunk, Finished, MicroBatch, Sampled, StageStats
from actors.pipeline import Pipeline, PipelineDriver
from actors.scheduler import QueueScheduler
from actors.stage import Stage
from actors.stage_spec import StageSpec
from actors.transport.chains import LinkChain, RayChain, serve
from actors.transport.links import Links, Meeting, MeetingPlace
from actors.transport.packed import PackedTensor, pack, unpack
from quant.cache.settings import CacheSettings
from quant.checkpoint import resolve
from quant.processor import local_processor

CONTROL = "control"  # a thread of its own for calls that must not wait for the pipeline


@dataclass(frozen=True)
class QueueSizes:
    """KV slots, and the planned requests of a micro-batch of each phase."""

    slots: int
    prefill_micro_batch: int
    decode_micro_batch: int


@dataclass(frozen=True)
class Hold:
    """Modelled seconds of an emulated device's full micro-batch, already scaled; 0: compute at own
    pace.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0

    def wait(self, batch: MicroBatch, began: float) -> float:
        """Sleep until the modelled time since `began` has passed; seconds slept."""
        modelled = self.decode_s if batch.is_decode else self.prefill_s
        computed = time.perf_counter()
        time.sleep(max(0.0, began + modelled - computed))
        return time.perf_counter() - computed


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
        self._held_s = 0.0
        self._stage: Stage | None = None
        self._meeting_place: MeetingPlace | None = None
        self._links: Links | None = None
        self._leader: _Leader | None = None

    def load(self) -> StageStats:
        """Read, quantize and keep the stage's shard, or take it from this node's cache; raises what
        `Stage` raises.
        """
        device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        self._stage = Stage(self._spec, folder, device, local_processor(device), self._cache)
        return self._stage.stats()

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        """As `Stage.step`, within the modelled time where the device is emulated."""
        began = time.perf_counter()
        result = self._loaded().step(batch, inputs)
        self._held_s += self._hold.wait(batch, began)
        return result

    def finish(self, batch: MicroBatch, last_hidden: torch.Tensor) -> Sampled:
        """LM head and sampling, of what came back from the last stage."""
        return self._loaded().finish(batch, last_hidden)

    def step(self, batch: MicroBatch, inputs: PackedTensor) -> PackedTensor | Sampled:
        """Compute a micro-batch that Ray brought from the stage before."""
        result = self.compute(batch, unpack(inputs))
        return result if isinstance(result, Sampled) else pack(result)

    def open_meeting(self, timeout_s: float) -> Meeting:
        """First stage only: listen for the others."""
        address = ray.util.get_node_ip_address()
        self._meeting_place = MeetingPlace(address, self._spec.stages, timeout_s)
        return self._meeting_place.meeting

    def connect(self, meeting: Meeting) -> None:
        """Link this stage to all others, which do the same at this time."""
        address = ray.util.get_node_ip_address()
        self._links = Links(meeting, self._spec.index, self._spec.stages, address)

    def serve(self) -> None:
        """All but the first stage: compute what comes over the links, until one of them breaks."""
        serve(self, self._linked())

    def lead(self, sizes: QueueSizes, following: Sequence[ActorHandle[StageActor]] | None) -> None:
        """First stage only: what `generate` schedules, over `following` by Ray or over links."""
        chain = LinkChain(self, self._linked()) if following is None else RayChain(self, following)
        self._leader = _Leader(sizes, chain)

    def generate(self, chunk: Chunk) -> Iterator[tuple[Finished, ...]]:
        """First stage only: run until the queue wants more than `chunk` has; yields what ended.

        Micro-batches stay under way until the next call, which should be waiting by then. The last
        chunk of a run ends all of its requests. A chunk of another run drops what is left of the
        one before; after an error, what is left of its run is ignored.
        """
        if self._leader is None:
            raise RuntimeError(f"stage {self._spec.index} was not told to lead")
        yield from self._leader.generate(chunk)

    @ray.method(concurrency_group=CONTROL)
    def stats(self) -> StageStats:
        """Work done and bytes held so far; answered while the stage computes.

        An emulated device is busy for its modelled time.
        """
        own = self._loaded().stats()
        return replace(own, busy_s=own.busy_s + self._held_s)

    def _linked(self) -> Links:
        if self._links is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was linked")
        return self._links

    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was loaded")
        return self._stage


class _Leader:
    """The first stage's part of a run: its scheduler, and what is under way between two calls."""

    def __init__(self, sizes: QueueSizes, pipeline: Pipeline) -> None:
        self._sizes = sizes
        self._pipeline = pipeline
        self._run: int | None = None
        self._scheduler: QueueScheduler
        self._driver: PipelineDriver
        self._failed = False

    def generate(self, chunk: Chunk) -> Iterator[tuple[Finished, ...]]:
        """As `StageActor.generate`."""
        if chunk.run != self._run:
            self._begin(chunk.run)
        elif self._failed:
            return
        self._failed = True  # until this call has come to its end
        self._scheduler.add(chunk.requests, chunk.last)
        for finished in self._driver.run():
            if finished:
                yield finished
        self._failed = False

    def _begin(self, run: int) -> None:
        if self._run is not None and not self._failed:
            self._driver.drop()
        self._run = run
        self._scheduler = QueueScheduler(
            self._sizes.slots,
            self._sizes.prefill_micro_batch,
            self._sizes.decode_micro_batch,
            self._pipeline.stages,
        )
        self._driver = PipelineDriver(self._scheduler, self._pipeline)
