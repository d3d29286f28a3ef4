"""The Ray actor around a stage; the first stage's actor also schedules and drives the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import ray
import torch
from ray.actor import ActorHandle

from actors.messages import BATCH_KINDS, MicroBatch, Progress, Request, Sampled
from actors.processes.actor_calls import ProcessOptions
from actors.processes.device import use_threads
from actors.processes.health import Health, Heartbeat, RunReport
from actors.processes.meter import MetricsPublisher, Spans, StageMeter
from actors.processes.ranks import Followers, KeysValuesKeeper, RankActor, ShardLoader
from actors.processes.request_log import RequestTimes
from actors.schedule.driver import LatencyRecord, Pipeline
from actors.schedule.live_run import Inbox, Leader
from actors.schedule.scheduler import QueueSizes
from actors.stage.emulation import EmulatedClock, EmulatedLink, EmulatedStage, warm_up
from actors.stage.spec import StageSpec
from actors.stage_figures import LayersLoaded, QueueDepth, StageStats
from actors.transport.message_format import Codec
from actors.transport.message_limits import Limits
from actors.transport.nccl_links import NcclLinks
from actors.transport.pipelines import (
    BoardKeeper,
    GlooPipeline,
    RayMessage,
    RayPipeline,
    RemoteBoard,
    from_ray,
    relay,
    serve,
)
from actors.transport.rendezvous import CONTROL, Rendezvous
from planner.scheduling import RequestSchedule
from quant.common.errors import StageLostError
from quant.common.text import in_ascii
from quant.rounding.importance import LayerImportance
from quant.rounding.importance_store import ImportanceStore

if TYPE_CHECKING:  # drivers know of actors without transformers
    from actors.stage.stage import Stage


class StageActor(BoardKeeper, KeysValuesKeeper):
    """One pipeline stage in its own process, made at little cost: `load` does the work.

    It is rank 0 of a stage that is divided, and the only one that others know; `followers` are the
    actors of the other ranks.
    """

    def __init__(
        self,
        spec: StageSpec,
        checkpoint: str,
        options: ProcessOptions,
        followers: Sequence[ActorHandle[RankActor]],
    ) -> None:
        super().__init__()
        use_threads(options.threads)
        self._spec = spec
        self._emulated, self._clock = options.emulated, EmulatedClock()
        self._meter = StageMeter(options.telemetry)
        self._followers = Followers(spec.index, followers)
        self._stage: Stage | None = None
        self._held_back: EmulatedStage | None = None  # to modelled times, around the stage
        self._ranks_held: list[StageStats] = []
        self._links: NcclLinks | None = None
        self._codec = self._make_codec()
        self._leader: Leader | None = None
        self._left: QueueDepth | None = None  # by the leaders before
        self._latencies = LatencyRecord()
        self._schedule: RequestSchedule | None = None  # the latest that it was told of
        self._inbox: Inbox | None = None
        self._inbox_lock = Lock()
        self._health = Health()
        self._loader = ShardLoader(spec, checkpoint, options.cache, self._health)
        self._epoch: int | None = 0  # calls of other stages must be of the same one

    def ready(self) -> None:
        """Return when the processes of all ranks have come up; `StageLostError` where one dies."""
        self._followers.wait()

    @ray.method(num_returns=2)
    def measure_importance(
        self, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[LayerImportance]]:
        """Pass the sample text through the stage's plain layers, before it is loaded.

        `hidden` are the states that the stage before gave, None on the first one. Returns those of
        the next stage, and what was seen. Raises what `measure_stage` raises.
        """
        return self._loader.measure(hidden)

    def find_importance(
        self, place: tuple[Path, str, str], seen: str, parts: Sequence[slice]
    ) -> tuple[bool | Sequence[LayerImportance], ...]:
        """Read what an `ImportanceStore(*place)` has: whether it has it, and those `parts`."""
        found = ImportanceStore(*place).find(seen)
        layers = () if found is None else found.layers
        return found is not None, *(layers[part] for part in parts)

    def load(self, importance: Sequence[LayerImportance] | None = None) -> StageStats:
        """Read, quantize and keep the stage's shard, or take it from this node's cache; all ranks
        do so at once.

        `importance`: one a layer, where the plan needs it. Raises what `Stage` raises, on any rank.
        """
        loading = self._followers.load(importance)
        stage = self._loader.load(importance)
        self._ranks_held = self._followers.get(loading)
        if self._emulated is not None:
            warm_up(stage, self._emulated.times)
            self._held_back = EmulatedStage(stage, self._emulated, self._clock)
        self._stage = stage
        self._publish()
        return self._held()

    @ray.method(concurrency_group=CONTROL)
    def layers_loaded(self) -> LayersLoaded:
        """Return how far loading is, of several ranks the last one; answered meanwhile."""
        return self._followers.layers_loaded(self._loader.progress)

    def _make_codec(self, limits: Limits | None = None) -> Codec:
        times = self._emulated
        return Codec(limits) if times is None else EmulatedLink(times, self._clock, limits)

    def _publish(self) -> None:
        tags = {
            "stage": str(self._spec.index),
            "device": in_ascii(self._spec.device_name),
            "run": in_ascii(self._meter.options.job),
        }
        new_latencies = self._latencies.new_seconds
        samples = self._spec.has_head
        MetricsPublisher(self._meter, self._figures, tags, samples, new_latencies).start()

    def compute(self, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor | Sampled:
        with self._health.computing(batch), self._meter.computing(batch):
            return (self._held_back or self._loaded()).step(batch, inputs)

    def finish(self, batch: MicroBatch, last_hidden: torch.Tensor) -> Sampled:
        """LM head and sampling of the hidden states that came back from the last stage."""
        with self._health.computing(batch), self._meter.sampling():
            return self._loaded().finish(batch, last_hidden)

    def sent(self) -> None:
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
        """Link this stage to all others at once, over the board that the `first` stage keeps."""
        mine = self._spec.is_first  # a call to itself would wait for this one
        board = self.board(rendezvous.secret) if mine else RemoteBoard(first, rendezvous)
        spec, stage = self._spec, self._loaded()
        limits = sizes.limits(spec.max_tokens, spec.kv_tokens, stage.max_columns)
        self._codec = self._make_codec(limits)
        self._links = NcclLinks(rendezvous, spec.index, board, stage.device)

    def serve(self) -> None:
        """Compute what comes over the links until one breaks; for all but the first stage."""
        serve(self, self._linked(), self._codec)

    def leave_run(self) -> RunReport:
        """Leave a broken run, with the shard loaded; `StageLostError` where a rank is lost."""
        self.close_handover()
        failed = self._followers.leave(self._stage)
        if self._stage is not None:
            self._stage.forget_parked()
        tokens = None
        if self._leader is not None:
            tokens = self._leader.slot_tokens()
            if queue := self._leader.queue:
                counted = replace(queue.supervision, parked_now=0)
                self._left = QueueDepth(
                    0, 0, queue.slots, 0, counted, queue.latencies, queue.shared
                )
        if self._links is not None:
            self._links.close()
        self._leader = self._links = self._epoch = None
        self.close_rendezvous()
        return RunReport(self._health.take_failure() or failed, tokens)

    def begin(self, epoch: int) -> str:
        """Enter `epoch`, in which stages and ranks link again; return the node's address."""
        stage = self._loaded()
        if stage.spec.degree > 1:
            self._followers.meet(stage, epoch)
        self._epoch = epoch
        self.open_handover(stage.keys_values, epoch)
        return str(ray.util.get_node_ip_address())

    def lead(self, sizes: QueueSizes, following: Sequence[ActorHandle[StageActor]] | None) -> None:
        """Make the first stage's pipeline: over `following` by Ray, or over links."""
        pipeline: Pipeline
        if following is None:
            pipeline = GlooPipeline(self, self._linked(), self._codec)
        else:
            pipeline = RayPipeline(self, following, self._codec, self._epoch or 0)
        left = self._left or QueueDepth(0, 0, 0, 0)
        leader = Leader(sizes, pipeline, left.supervision, self._latencies, left.shared)
        self._leader = leader  # first: `follow` looks at it after it has noted the schedule
        if self._schedule is not None:
            leader.follow(self._schedule)

    def live(
        self, run: int, told_every: int = 1, waits: bool = False
    ) -> Iterator[tuple[Progress, ...]]:
        """Run what comes by `submit` for the live run of this number until it is closed; yields
        what `LiveRun` tells of.

        For the first stage only, to which `submit` has to be called first.
        """
        inbox = self._inbox_of(run)
        if inbox is self._inbox:
            yield from self._leading().live(inbox, told_every, waits)

    @ray.method(concurrency_group=CONTROL)
    def follow(self, schedule: RequestSchedule) -> None:
        """Have runs go by another schedule, the present one too; for the first stage only."""
        self._schedule = schedule
        leader = self._leader
        if leader is not None:
            leader.follow(schedule)

    @ray.method(concurrency_group=CONTROL)
    def submit(self, run: int, requests: Sequence[Request]) -> None:
        """Have `requests` join the live run of this number, which may begin later."""
        self._inbox_of(run).put(requests)

    @ray.method(concurrency_group=CONTROL)
    def cancel(self, run: int, custom_ids: Sequence[str]) -> None:
        """Have requests of a live run given up; their memory is free at the next iteration."""
        self._inbox_of(run).cancel(custom_ids)

    @ray.method(concurrency_group=CONTROL)
    def close_live(self, run: int) -> None:
        """Have the live run of this number end with the requests that it has."""
        self._inbox_of(run).close()

    def _inbox_of(self, run: int) -> Inbox:
        """The inbox of this live run; one that nobody reads where a later one has begun."""
        with self._inbox_lock:
            if self._inbox is None or self._inbox.run < run:
                if self._inbox is not None:
                    self._inbox.abandon()  # nobody reads its run any more
                self._inbox = Inbox(run)
            return self._inbox if self._inbox.run == run else Inbox(run)

    @ray.method(concurrency_group=CONTROL)
    def stats(self) -> StageStats:
        """Work done (modelled time of an emulated device) and bytes held so far, at any time."""
        return self._figures()

    def _figures(self) -> StageStats:
        leader = self._leader
        works = {kind: self._meter.work(kind) for kind in BATCH_KINDS}
        tokens = self._meter.tokens()
        return replace(
            self._held(),
            busy_s=self._meter.busy_s(),
            prefill_tokens=tokens["prefill"],
            decode_tokens=tokens["decode"],
            micro_batches=sum(work.micro_batches for work in works.values()),
            prefill=works["prefill"],
            decode=works["decode"],
            mixed=works["mixed"],
            queue=(leader and leader.queue) or self._left,
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
    def take_requests(self, custom_ids: Sequence[str]) -> dict[str, RequestTimes]:
        """The times of requests that have ended, by the same clock, where they are kept."""
        return self._meter.take_requests(custom_ids)

    @ray.method(concurrency_group=CONTROL)
    def heartbeat(self, with_tokens: bool = False) -> Heartbeat:
        """Give a sign of life; the first stage's `with_tokens` of the requests in its slots."""
        leader = self._leader
        tokens = leader.slot_tokens() if with_tokens and leader is not None else None
        ranks = self._followers.signs()
        sign = self._health.heartbeat(tokens)
        return replace(sign, is_held=self._clock.is_waiting, ranks=ranks)

    @ray.method(concurrency_group=CONTROL)
    def stop(self) -> None:
        """Tell the next stage that no more comes, so that it can `leave_run`; end a live run."""
        if self._inbox is not None:
            self._inbox.abandon()
        links = self._links
        if links is not None:
            links.stop()

    def _linked(self) -> NcclLinks:
        if self._links is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was linked")
        return self._links

    def _leading(self) -> Leader:
        if self._leader is None:
            raise RuntimeError(f"stage {self._spec.index} was not told to lead")
        return self._leader

    def _held(self) -> StageStats:
        """The figures of the stage that computes, with the bytes of the rank that holds most."""
        own = self._loaded().stats()
        every = [own, *self._ranks_held]
        return replace(
            own,
            weight_bytes=max(each.weight_bytes for each in every),
            kv_cache_bytes=max(each.kv_cache_bytes for each in every),
        )

    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"stage {self._spec.index} was used before it was loaded")
        return self._stage
