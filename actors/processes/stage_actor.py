"""The Ray actor around a stage, and what the first stage's does beside: lead a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ray
import torch
from ray.actor import ActorHandle

from actors.emulation.emulation import Hold, Pace, warm_up
from actors.messages import Chunk, Finished, MicroBatch, QueueDepth, Sampled, StageStats
from actors.processes.device import local_device
from actors.processes.health import Health, Heartbeat, RunReport, SlotTokens
from actors.schedule.pipeline import Pipeline, PipelineDriver
from actors.schedule.static import QueueScheduler
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from actors.telemetry.meter import Spans, StageMeter, TelemetryOptions
from actors.telemetry.metrics import MetricsPublisher
from actors.transport.chains import LinkChain, RayChain, serve
from actors.transport.links import Links
from actors.transport.meeting import CONTROL, BoardKeeper, Meeting, RemoteBoard
from actors.transport.packed import PackedTensor, pack, unpack
from actors.transport.wire import Limits
from quant.cache.settings import CacheSettings
from quant.checkpoint.model_reference import resolve
from quant.common.errors import StageLostError
from quant.processor import local_processor


@dataclass(frozen=True)
class QueueSizes:
    """KV slots, and the planned requests of a micro-batch of each phase."""

    slots: int
    prefill_micro_batch: int
    decode_micro_batch: int

    def limits(self, max_tokens: int, columns: int) -> Limits:
        """What messages may hold where a slot has room for `max_tokens`."""
        rows = max(self.prefill_micro_batch * max_tokens, self.decode_micro_batch)
        requests = max(self.prefill_micro_batch, self.decode_micro_batch)
        return Limits(requests, rows, columns, self.slots, max_tokens)


class StageActor(BoardKeeper):
    """One pipeline stage in its own process. Made cheaply; `load` does the work and reports what is
    held.
    """

    def __init__(
        self,
        spec: StageSpec,
        checkpoint: str,
        threads: int,
        hold: Hold,
        cache: CacheSettings,
        telemetry: TelemetryOptions = TelemetryOptions(),  # noqa: B008  (frozen)
    ) -> None:
        torch.set_num_threads(threads)
        self._spec = spec
        self._checkpoint = checkpoint
        self._hold = hold
        self._pace = Pace(hold, spec.index)
        self.ready_at_s = 0.0  # when an emulated link has brought on what was computed last
        self._cache = cache
        self._meter = StageMeter(telemetry)
        self._stage: Stage | None = None
        self._links: Links | None = None
        self._limits: Limits | None = None
        self._leader: _Leader | None = None
        self._health = Health()
        self._epoch: int | None = 0  # of what the other stages' calls belong to

    def load(self) -> StageStats:
        """Read, quantize and keep the stage's shard, or take it from this node's cache; raises what
        `Stage` raises.
        """
        device = self._health.device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        self._stage = Stage(self._spec, folder, device, local_processor(device), self._cache)
        warm_up(self._stage, self._hold)
        self._publish()
        return self._stage.stats()

    def _publish(self) -> None:
        tags = {
            "stage": str(self._spec.index),
            "device": self._spec.device_name,
            "job": self._meter.options.job,
        }
        MetricsPublisher(self._meter, self._figures, tags, self._spec.has_head).start()

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        """As `Stage.step`, within the modelled time where the device is emulated."""
        self._pace.begin(batch)
        with self._health.computing(batch), self._meter.computing(batch):
            result = self._loaded().step(batch, inputs)
            self.ready_at_s = self._pace.end(batch)
        return result

    def wait_for(self, ready_at_s: float) -> None:
        """Until an emulated link has brought what is `ready_at_s`."""
        self._pace.wait_for(ready_at_s)

    def finish(self, batch: MicroBatch, last_hidden: torch.Tensor) -> Sampled:
        """LM head and sampling, of what came back from the last stage."""
        with self._health.computing(batch), self._meter.sampling():
            return self._loaded().finish(batch, last_hidden)

    def sent(self) -> None:
        """What was computed last was passed on."""
        self._meter.sent()

    def step(self, batch: MicroBatch, inputs: PackedTensor, epoch: int) -> PackedTensor | Sampled:
        """Compute a micro-batch that Ray brought from the stage before."""
        if epoch != self._epoch:
            raise StageLostError(f"a micro-batch of epoch {epoch} came in epoch {self._epoch}")
        batch = replace(batch, ready_at_s=inputs.ready_at_s)
        result = self.compute(batch, unpack(inputs))
        self.sent()
        if isinstance(result, Sampled):
            return replace(result, ready_at_s=self.ready_at_s)
        return pack(result, self.ready_at_s)

    def connect(self, meeting: Meeting, first: ActorHandle[StageActor], sizes: QueueSizes) -> None:
        """Link this stage to all others, which do the same at this time, over the board that the
        `first` stage keeps.
        """
        mine = self._spec.is_first  # a call to itself would wait for this one
        board = self.board(meeting.secret) if mine else RemoteBoard(first, meeting)
        self._limits = sizes.limits(self._spec.max_tokens, self._loaded().widest)
        self._links = Links(meeting, self._spec.index, board)

    def serve(self) -> None:
        """All but the first stage: compute what comes over the links, until one of them breaks."""
        serve(self, self._linked(), self._limits)

    def leave_run(self) -> RunReport:
        """Leave a broken run; what it sent that still comes is refused. The shard stays loaded."""
        tokens = None if self._leader is None else self._leader.so_far()
        self._leader = self._links = self._epoch = None
        self.close_meeting()
        return RunReport(self._health.take_failure(), tokens)

    def begin(self, epoch: int) -> str:
        """All stages are about to be linked again, in the same `epoch`; the address of its node."""
        self._epoch = epoch
        return str(ray.util.get_node_ip_address())

    def lead(self, sizes: QueueSizes, following: Sequence[ActorHandle[StageActor]] | None) -> None:
        """First stage only: what `generate` schedules, over `following` by Ray or over links."""
        chain: Pipeline
        if following is None:
            chain = LinkChain(self, self._linked(), self._limits)
        else:
            chain = RayChain(self, following, self._epoch or 0)
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
        return self._figures()

    def _figures(self) -> StageStats:
        leader = self._leader
        prefill, decode = self._meter.work("prefill"), self._meter.work("decode")
        return replace(
            self._loaded().stats(),
            busy_s=self._meter.busy_s(),
            prefill_tokens=prefill.tokens,
            decode_tokens=decode.tokens,
            micro_batches=prefill.micro_batches + decode.micro_batches,
            prefill=prefill,
            decode=decode,
            queue=None if leader is None else leader.queue,
        )

    @ray.method(concurrency_group=CONTROL)
    def clock_s(self) -> float:
        """What the clock of `spans` shows now."""
        return time.perf_counter()

    @ray.method(concurrency_group=CONTROL)
    def spans(self) -> Spans | None:
        """When each micro-batch was computed, where that is kept."""
        return self._meter.spans(self._spec.index)

    @ray.method(concurrency_group=CONTROL)
    def heartbeat(self, with_tokens: bool = False) -> Heartbeat:
        """Give a sign of life; the first stage's `with_tokens` of the requests in its slots."""
        leader = self._leader
        tokens = leader.so_far() if with_tokens and leader is not None else None
        return replace(self._health.heartbeat(tokens), is_held=self._pace.is_holding)

    @ray.method(concurrency_group=CONTROL)
    def stop(self) -> None:
        """Tell the stage after this one that no more comes, so that it can `leave_run`."""
        links = self._links
        if links is not None:
            links.stop()

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

    @property
    def queue(self) -> QueueDepth | None:
        """What waits and what is under way; None before the first run."""
        if self._run is None:
            return None
        scheduler, slots = self._scheduler, self._sizes.slots
        under_way = self._driver.under_way
        return QueueDepth(scheduler.waiting, scheduler.in_slots, slots, under_way)

    def so_far(self) -> SlotTokens:
        """Requests in slots, and their tokens; for any thread."""
        run = self._run
        return SlotTokens(run, {} if run is None else self._driver.so_far())

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
        self._scheduler = QueueScheduler(
            self._sizes.slots,
            self._sizes.prefill_micro_batch,
            self._sizes.decode_micro_batch,
            self._pipeline.stages,
        )
        self._driver = PipelineDriver(self._scheduler, self._pipeline)
        self._run = run  # last: `queue` looks at what comes before
