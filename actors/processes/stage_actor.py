"""The Ray actor around a stage; the first stage's actor also schedules and drives the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock
from typing import Literal

import ray
import torch
from ray.actor import ActorHandle

from actors.emulation.device import EmulatedDevice
from actors.emulation.stage import EmulatedStage
from actors.emulation.times import ScaledTimes
from actors.messages import BATCH_KINDS, Chunk, Finished, MicroBatch, Progress, Request, Sampled
from actors.processes.device import local_device
from actors.processes.health import Health, Heartbeat, RunReport, SlotTokens
from actors.schedule.driver import Pipeline, PipelineDriver
from actors.schedule.live import Inbox, LiveRun
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import make_scheduler
from actors.stage.importance import measure_stage
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from actors.stage_figures import NO_SUPERVISION, LayersLoaded, QueueDepth, StageStats, Supervision
from actors.telemetry.meter import Spans, StageMeter, TelemetryOptions
from actors.telemetry.metrics import MetricsPublisher
from actors.transport.gloo_links import Links
from actors.transport.message_format import Codec, PlainCodec
from actors.transport.message_limits import Limits
from actors.transport.pipelines import (
    GlooPipeline,
    RayMessage,
    RayPipeline,
    from_ray,
    relay,
    serve,
)
from actors.transport.rendezvous import CONTROL, BoardKeeper, RemoteBoard, Rendezvous
from quant.cache.settings import CacheSettings
from quant.checkpoint.model_reference import resolve
from quant.common.errors import StageLostError
from quant.importance.statistics import LayerImportance
from quant.loading.layer_notes import noting_layers
from quant.processor import local_processor


class StageActor(BoardKeeper):
    """One pipeline stage in its own process, made at little cost: `load` does the work.

    `emulated` are the times that stand for a device which is not there; None: a real device.
    """

    def __init__(
        self,
        spec: StageSpec,
        checkpoint: str,
        threads: int,
        emulated: ScaledTimes | None,
        cache: CacheSettings,
        telemetry: TelemetryOptions = TelemetryOptions(),  # noqa: B008  (frozen)
    ) -> None:
        torch.set_num_threads(threads)
        self._spec = spec
        self._checkpoint = checkpoint
        self._emulated = None if emulated is None else EmulatedDevice(emulated)
        self._cache = cache
        self._meter = StageMeter(telemetry)
        self._stage: Stage | EmulatedStage | None = None
        self._links: Links | None = None
        self._codec = self._make_codec()
        self._leader: _Leader | None = None
        self._supervised = NO_SUPERVISION  # by the leaders before
        self._inbox: Inbox | None = None
        self._inbox_lock = Lock()
        self._health = Health()
        self._layers_loaded = LayersLoaded()
        self._epoch: int | None = 0  # calls of other stages must be of the same one

    @ray.method(num_returns=2)
    def measure_importance(
        self, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[LayerImportance]]:
        """Pass random tokens through the stage's plain layers, before it is loaded.

        `hidden` are the states that the stage before gave, None on the first one. Returns those of
        the next stage, and what was seen. Raises what `measure_stage` raises.
        """
        device = self._health.device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        with self._counting_layers("importance"):
            found = measure_stage(self._spec, folder, device, local_processor(device), hidden)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the weights that come now
        return found

    def load(self, importance: Sequence[LayerImportance] | None = None) -> StageStats:
        """Read, quantize and keep the stage's shard, or take it from this node's cache.

        `importance`: one a layer, where the plan needs it. Raises what `Stage` raises.
        """
        device = self._health.device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        processor = local_processor(device)
        with self._counting_layers("weights"):
            stage = Stage(self._spec, folder, device, processor, self._cache, importance)
        self._stage = stage if self._emulated is None else self._emulated.stage(stage)
        self._publish()
        return self._stage.stats()

    def _counting_layers(
        self, what: Literal["importance", "weights"]
    ) -> AbstractContextManager[None]:
        """Count the layers that are loaded meanwhile, for `layers_loaded`."""
        self._layers_loaded = LayersLoaded(what, 0, len(self._spec.layers))
        return noting_layers(self._note_layer)

    def _note_layer(self) -> None:
        so_far = self._layers_loaded
        self._layers_loaded = replace(so_far, done=so_far.done + 1)

    @ray.method(concurrency_group=CONTROL)
    def layers_loaded(self) -> LayersLoaded:
        """Return how far it is with what it loads; answered meanwhile."""
        return self._layers_loaded

    def _make_codec(self, limits: Limits | None = None) -> Codec:
        plain = PlainCodec(limits)
        return plain if self._emulated is None else self._emulated.link(plain)

    def _publish(self) -> None:
        tags = {
            "stage": str(self._spec.index),
            "device": self._spec.device_name,
            "job": self._meter.options.job,
        }
        MetricsPublisher(self._meter, self._figures, tags, self._spec.has_head).start()

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        """Run `Stage.step`, counted and timed."""
        with self._health.computing(batch), self._meter.computing(batch):
            return self._loaded().step(batch, inputs)

    def finish(self, batch: MicroBatch, last_hidden: torch.Tensor) -> Sampled:
        """LM head and sampling of the hidden states that came back from the last stage."""
        with self._health.computing(batch), self._meter.sampling():
            return self._loaded().finish(batch, last_hidden)

    def sent(self) -> None:
        """Note that the last result was passed on."""
        self._meter.sent()

    def step(self, message: RayMessage, epoch: int) -> RayMessage:
        """Compute a micro-batch that Ray brought from the stage before."""
        if epoch != self._epoch:
            raise StageLostError(f"a micro-batch of epoch {epoch} came in epoch {self._epoch}")
        answer: RayMessage = relay(self, from_ray(message), self._codec).numpy()
        self.sent()
        return answer

    def connect(
        self, rendezvous: Rendezvous, first: ActorHandle[StageActor], sizes: QueueSizes
    ) -> None:
        """Link this stage to all others, which connect at the same time, over the board that the
        `first` stage keeps.
        """
        mine = self._spec.is_first  # a call to itself would wait for this one
        board = self.board(rendezvous.secret) if mine else RemoteBoard(first, rendezvous)
        spec, columns = self._spec, self._loaded().max_columns
        self._codec = self._make_codec(sizes.limits(spec.max_tokens, spec.kv_tokens, columns))
        self._links = Links(rendezvous, self._spec.index, board)

    def serve(self) -> None:
        """Compute what comes over the links until one breaks; for all but the first stage."""
        serve(self, self._linked(), self._codec)

    def leave_run(self) -> RunReport:
        """Leave a broken run; what it sent that still comes is refused. The shard stays loaded."""
        if self._stage is not None:
            self._stage.forget_parked()
        tokens = None
        if self._leader is not None:
            tokens = self._leader.slot_tokens()
            self._supervised = replace(self._leader.supervision, parked_now=0)
        self._leader = self._links = self._epoch = None
        self.close_rendezvous()
        return RunReport(self._health.take_failure(), tokens)

    def begin(self, epoch: int) -> str:
        """Enter `epoch`, in which all stages are linked again; returns the address of the node."""
        self._epoch = epoch
        return str(ray.util.get_node_ip_address())

    def lead(self, sizes: QueueSizes, following: Sequence[ActorHandle[StageActor]] | None) -> None:
        """Make the pipeline that `generate` drives: over `following` by Ray, or over links.

        For the first stage only.
        """
        pipeline: Pipeline
        if following is None:
            pipeline = GlooPipeline(self, self._linked(), self._codec)
        else:
            pipeline = RayPipeline(self, following, self._codec, self._epoch or 0)
        self._leader = _Leader(sizes, pipeline, self._supervised)

    def generate(self, chunk: Chunk) -> Iterator[tuple[Finished, ...]]:
        """Run until the queue wants more requests than `chunk` has; yields those that ended.

        For the first stage only. Micro-batches stay under way until the next call, which should be
        waiting by then. The last chunk of a run ends all of its requests. A chunk of another run
        drops the rest of the run before; after an error, the rest of its run is ignored.
        """
        yield from self._leading().generate(chunk)

    def live(self, run: int) -> Iterator[tuple[Progress, ...]]:
        """Run what comes by `submit` for the live run of this number until it is closed; yields
        the tokens of each micro-batch.

        For the first stage only, to which `submit` has to be called first.
        """
        inbox = self._inbox_of(run)
        if inbox is not None:
            yield from self._leading().live(inbox)

    @ray.method(concurrency_group=CONTROL)
    def submit(self, run: int, requests: Sequence[Request]) -> None:
        """Have `requests` join the live run of this number, which may begin later."""
        inbox = self._inbox_of(run)
        if inbox is not None:
            inbox.put(requests)

    @ray.method(concurrency_group=CONTROL)
    def cancel(self, run: int, custom_ids: Sequence[str]) -> None:
        """Have requests of a live run given up; their memory is free at the next iteration."""
        inbox = self._inbox_of(run)
        if inbox is not None:
            inbox.cancel(custom_ids)

    @ray.method(concurrency_group=CONTROL)
    def close_live(self, run: int) -> None:
        """Have the live run of this number end with the requests that it has."""
        inbox = self._inbox_of(run)
        if inbox is not None:
            inbox.close()

    def _inbox_of(self, run: int) -> Inbox | None:
        """The inbox of the live run of this number; None where a later one has begun."""
        with self._inbox_lock:
            if self._inbox is None or self._inbox.run < run:
                self._inbox = Inbox(run)
            return self._inbox if self._inbox.run == run else None

    @ray.method(concurrency_group=CONTROL)
    def stats(self) -> StageStats:
        """Work done and bytes held so far; answered while the stage computes.

        An emulated device is busy for its modelled time.
        """
        return self._figures()

    def _figures(self) -> StageStats:
        leader = self._leader
        works = {kind: self._meter.work(kind) for kind in BATCH_KINDS}
        tokens = self._meter.tokens()
        return replace(
            self._loaded().stats(),
            busy_s=self._meter.busy_s(),
            prefill_tokens=tokens["prefill"],
            decode_tokens=tokens["decode"],
            micro_batches=sum(work.micro_batches for work in works.values()),
            prefill=works["prefill"],
            decode=works["decode"],
            mixed=works["mixed"],
            queue=None if leader is None else leader.queue,
        )

    @ray.method(concurrency_group=CONTROL)
    def clock_s(self) -> float:
        """The present time of the clock of `spans`."""
        return time.perf_counter()

    @ray.method(concurrency_group=CONTROL)
    def spans(self) -> Spans | None:
        """The times of each micro-batch, where they are kept."""
        return self._meter.spans(self._spec.index)

    @ray.method(concurrency_group=CONTROL)
    def heartbeat(self, with_tokens: bool = False) -> Heartbeat:
        """Give a sign of life; the first stage's `with_tokens` of the requests in its slots."""
        leader = self._leader
        tokens = leader.slot_tokens() if with_tokens and leader is not None else None
        is_held = self._emulated is not None and self._emulated.is_waiting
        return replace(self._health.heartbeat(tokens), is_held=is_held)

    @ray.method(concurrency_group=CONTROL)
    def stop(self) -> None:
        """Tell the stage after this one that no more comes, so that it can `leave_run`, and end a
        live run, which may be waiting for requests.
        """
        if self._inbox is not None:
            self._inbox.abandon()
        links = self._links
        if links is not None:
            links.stop()

    def _linked(self) -> Links:
        if self._links is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was linked")
        return self._links

    def _leading(self) -> _Leader:
        if self._leader is None:
            raise RuntimeError(f"stage {self._spec.index} was not told to lead")
        return self._leader

    def _loaded(self) -> Stage | EmulatedStage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was loaded")
        return self._stage


class _Leader:
    """The first stage's scheduler and driver, which stay between two calls of a run."""

    def __init__(
        self, sizes: QueueSizes, pipeline: Pipeline, earlier: Supervision = NO_SUPERVISION
    ) -> None:
        self._sizes = sizes
        self._pipeline = pipeline
        self._run: int | None = None
        self._earlier = earlier  # of the runs before
        self._scheduler: Scheduler
        self._driver: PipelineDriver
        self._failed = False

    @property
    def queue(self) -> QueueDepth | None:
        """Requests and micro-batches in the queue; None before the first run."""
        if self._run is None:
            return None
        scheduler, slots = self._scheduler, self._sizes.slots
        under_way = self._driver.under_way
        return QueueDepth(scheduler.waiting, scheduler.in_slots, slots, under_way, self.supervision)

    @property
    def supervision(self) -> Supervision:
        """What was done about requests that outgrew their reservation, in all runs."""
        own = NO_SUPERVISION if self._run is None else self._scheduler.supervision
        return own.after(self._earlier)

    def slot_tokens(self) -> SlotTokens:
        """Requests in slots, and their tokens; for any thread."""
        run = self._run
        return SlotTokens(run, {} if run is None else self._driver.slot_tokens())

    def generate(self, chunk: Chunk) -> Iterator[tuple[Finished, ...]]:
        """Run `StageActor.generate`."""
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

    def live(self, inbox: Inbox) -> Iterator[tuple[Progress, ...]]:
        """Run `StageActor.live`."""
        self._begin(inbox.run)
        self._failed = True  # until it has come to its end
        yield from LiveRun(self._driver, inbox, self._sizes.slot_tokens).events()
        self._failed = False

    def _begin(self, run: int) -> None:
        if self._run is not None and not self._failed:
            self._driver.drop()
        earlier = self.supervision
        self._scheduler = make_scheduler(self._sizes, self._pipeline.stages)
        self._earlier = earlier  # after it: who reads meanwhile counts nothing twice
        self._driver = PipelineDriver(self._scheduler, self._pipeline)
        self._run = run  # last: `queue` looks at what comes before
