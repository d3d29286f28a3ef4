"""All stages of a plan as Ray actors: placed, loaded, driven, and always given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.live_group import LiveGroup
from actors.processes.actor_calls import ProcessOptions, RankActor, StageActor
from actors.processes.answers import StageAnswers
from actors.processes.device import stage_environment
from actors.processes.handle import StageHandle
from actors.processes.meter import TelemetryOptions
from actors.processes.observer import Observer
from actors.processes.placement import place
from actors.processes.ray_head import has_stage_environment
from actors.processes.reservation import Reservation, ReservedPart
from actors.recovery.generation import LiveGeneration
from actors.recovery.pipeline import StagePipeline
from actors.recovery.policy import OnEvent, Recovery, ignore_event
from actors.recovery.repair import Repair
from actors.sample_text import what_is_seen
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import queue_sizes
from actors.stage.spec import (
    StageSpec,
    check_planned_memory,
    emulated_times,
    stage_spec,
    stand_in_spec,
)
from actors.transport import Transport
from actors.transport.rendezvous import CONTROL, HANDOVER
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec, StagePlan
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.loading.cache_settings import NO_CACHE, CacheSettings
from quant.rounding.importance_store import ImportanceStore

LOAD_S = 3600.0  # for shards to be loaded
MEETING_S = 30.0  # for the stages to meet


@dataclass(frozen=True)
class GroupOptions:
    """Options for starting and driving a group's stages.

    `cache` is where each node keeps packed layers. `transport` takes hidden states from stage to
    stage: "gloo" (torch.distributed), "ray", or "auto": gloo where the stages can be connected by
    it, with NCCL between GPUs. `telemetry`: what stages note; the sizes of its micro-batches are
    the plan's. `recovery` says how `generate` goes on after faults, which `on_event` is told of.
    `policy` schedules the requests. `importance`: where that of the model is found, or kept once it
    is measured, for this group and others. `placement_s`: seconds to wait for resources to be
    granted. `shares_heads`: a head that prompts share is computed once. `deterministic`,
    `cuda_graphs`, `adapter` and `adapters` as in `StageSpec`.
    """

    cache: CacheSettings = NO_CACHE
    transport: Transport = "auto"
    telemetry: TelemetryOptions = TelemetryOptions()  # noqa: RUF009  (frozen)
    recovery: Recovery = Recovery()  # noqa: RUF009  (frozen)
    on_event: OnEvent = ignore_event
    policy: PolicyOptions = PolicyOptions()  # noqa: RUF009  (frozen)
    placement_s: float = 60.0
    importance: ImportanceStore | None = None
    shares_heads: bool = True
    deterministic: bool = False
    cuda_graphs: bool = True
    adapter: str | None = None
    adapters: tuple[str, ...] = ()


@cache
def _remote(actor_class: Any) -> Any:
    """Ray's form of the class; it reads its code for each that is made, and sends it once."""
    make: Any = ray.remote  # its annotations lack concurrency groups
    return make(concurrency_groups={CONTROL: 1, HANDOVER: 1})(actor_class)


Reserve = Callable[[], Reservation | ReservedPart]
"""Reserves what the stages of a plan need."""


class StageGroup(LiveGroup):
    """Context manager over the actors of `plan`; needs an initialised Ray.

    `checkpoint` is a folder that every node has under this absolute path, or a hub id. `reserve`
    reserves resources for the stages, where that is done for more than these.

    Raises `DeviceError` when devices are missing, `CheckpointError` and the like from the stages'
    loading, `StageLostError` when an actor dies meanwhile, or there is no point in going on.
    """

    actor_class: type[Any] = StageActor
    rank_class: type[Any] = RankActor

    def __init__(
        self,
        plan: PlanSpec,
        checkpoint: str,
        options: GroupOptions = GroupOptions(),
        reserve: Reserve | None = None,
    ) -> None:
        super().__init__(plan)
        self._reserve = reserve or self._reserve_own
        self._checkpoint = checkpoint
        self._options = options
        prefill_tokens, decode_requests = plan.timed_sizes
        self._telemetry = replace(
            options.telemetry,
            prefill_tokens=max(1, round(prefill_tokens)),
            decode_requests=max(1, round(decode_requests)),
        )
        self._reservation: Reservation | ReservedPart | None = None
        self.stages = tuple(
            StageHandle(
                stage, partial(self._start_actors, stage.index), partial(self._offers, stage.index)
            )
            for stage in plan.stages
        )
        self.observer = Observer(self.stages)
        self._pipeline = StagePipeline(
            self.stages,
            StageAnswers(self.stages),
            queue_sizes(plan, options.policy, options.shares_heads),
            options.transport,
            MEETING_S,
            options.recovery.hang_s,
        )
        self._repair = Repair(self._pipeline, options.recovery, options.on_event)

    def follow(self, plan: PlanSpec) -> None:
        """Go on by `plan`, of which nothing but the schedule differs: nothing is loaded again, and
        what is in flight goes on. Any thread may call this.

        More than the present slots are not in flight, nor more in a micro-batch than before: where
        the schedule wants that, its groups are more. Raises `SpecError` for a plan that has no
        schedule.
        """
        self._plan = plan
        self.follow_schedule(plan.policy.followed_schedule)

    def follow_schedule(self, schedule: RequestSchedule) -> None:
        """Go on by another schedule, also of a plan with other stages beside these."""
        self._pipeline.follow(schedule)

    def _start(self) -> None:
        check_planned_memory(self._plan)
        self._reservation = self._reserve()
        for stage in self.stages:
            stage.start()
        shape = model_shape(self._checkpoint)
        if self._plan.needs_importance(shape):
            self._hand_out_importance(what_is_seen(shape))
        self._repair.load_and_link(LOAD_S)

    def _reserve_own(self) -> Reservation:
        placements = place(self._plan.stages, ray.cluster_resources())
        return Reservation(placements, self._options.placement_s)

    def _hand_out_importance(self, seen: str) -> None:
        """Give each stage that of its layers: what is known already, or what they measure now."""
        store = self._options.importance or ImportanceStore()
        parts = [slice(stage.layers.start, stage.layers.stop) for stage in self._plan.stages]
        with store.turn:
            place = store.place_of(seen) if has_stage_environment() else None
            if place is not None and self._repair.find_importance(place, seen, parts, LOAD_S):
                return
            found = store.find(seen)
            if found is None:
                found = store.keep(self._repair.measure_importance(LOAD_S), seen)
        for handle, part in zip(self.stages, parts, strict=True):
            handle.use_importance(found.layers[part])

    def _start_actors(self, index: int) -> tuple[ActorHandle[Any], ...]:
        """Start the actor of each rank of a stage, and return them: those that follow rank 0 start
        first, as it calls them.

        They share what is reserved for the stage, each with a part of it.
        """
        reservation, stage = self._reserved(), self._plan.stages[index]
        spec, cache = self._spec(stage), self._options.cache
        threads = reservation.placements[index].threads
        own = has_stage_environment()
        environment = None if own else {"env_vars": stage_environment(threads)}

        def start(actor_class: Any, *arguments: Any) -> Any:
            remote = _remote(actor_class).options(
                runtime_env=environment, max_restarts=0, **reservation.actor_options(index)
            )
            return remote.remote(*arguments)

        ranks = [replace(spec, rank=rank) for rank in range(1, spec.degree)]
        followers = tuple(
            start(self.rank_class, rank, self._checkpoint, threads, cache) for rank in ranks
        )
        process = ProcessOptions(threads, cache, self._telemetry, emulated_times(self._plan, stage))
        return start(self.actor_class, spec, self._checkpoint, process, followers), *followers

    def _spec(self, stage: StagePlan) -> StageSpec:
        spec = replace(
            stage_spec(self._plan, stage),
            slots=self._pipeline.sizes.slots,
            parked_tokens=self._pipeline.sizes.host_tokens,
            deterministic=self._options.deterministic,
            cuda_graphs=self._options.cuda_graphs,
            adapter=self._options.adapter,
            adapters=self._options.adapters,
        )
        if self._plan.stand_in is None:
            return spec
        return stand_in_spec(spec, model_shape(self._checkpoint))

    def _offers(self, index: int) -> bool:
        return self._reserved().has_device(index)

    def _reserved(self) -> Reservation | ReservedPart:
        if self._reservation is None:
            raise RuntimeError("a stage group is used as a context manager")
        return self._reservation

    @property
    def epoch(self) -> int:
        """How often the stages were linked: again after every fault."""
        return self._pipeline.epoch

    @property
    def sizes(self) -> QueueSizes:
        """The queue and micro-batches by now: memory that runs short halves them."""
        return self._pipeline.sizes

    def live(self, told_every: int = 1) -> LiveGeneration:
        """Return a generation to which requests are submitted at any time, and whose tokens come as
        they are sampled, those of `told_every` micro-batches together, or with 0 those of a whole
        answer; its `events` have to be read to their end before anything else is generated.
        """
        return LiveGeneration(self._repair, told_every)

    def whole_answers(self, waits: bool = True) -> LiveGeneration:
        return LiveGeneration(self._repair, 0, waits)

    def abandon(self) -> None:
        self._repair.restore(self._repair.stop_run({}))
        self._whole = None

    def _release(self) -> None:
        for stage in self.stages:
            stage.kill()
        if self._reservation is not None:
            self._reservation.release()
        self._reservation = None
