"""All stages of a plan as Ray actors: placed, loaded, driven, and always given back."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.emulation.stand_in import check_planned_memory, stand_in_spec
from actors.emulation.times import emulated_times
from actors.messages import Chunk, Finished, Request, StageStats, Transport
from actors.processes.environment import stage_environment
from actors.processes.placement import Placement, place
from actors.processes.ray_head import LOOK_S, check_head, ended_process, get_while_it_lives
from actors.processes.stage_actor import StageActor
from actors.recovery.generation import Generation
from actors.recovery.ledger import Ledger
from actors.recovery.liveness import Watch, get_watched
from actors.recovery.policy import OnEvent, Recovery, ignore_event
from actors.recovery.repair import bring_up
from actors.schedule.scheduler import QueueSizes
from actors.stage.spec import StageSpec, stage_spec
from actors.telemetry.meter import TelemetryOptions
from actors.telemetry.observer import Observer
from actors.transport.rendezvous import CONTROL, Rendezvous
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec, StagePlan
from quant.cache.settings import NO_CACHE, CacheSettings
from quant.common.errors import DeviceError, LlmpqError, StageLostError

MEETING_AGAIN_S = 10.0  # at most, when stages that have met before are linked again
NEIGHBOURS_S = 2.0  # after a failure: until the stages beside it have noticed, and reported


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for resources to be granted, for shards to be loaded, and for the stages to
    meet.
    """

    placement_s: float = 60.0
    load_s: float = 3600.0
    meeting_s: float = 30.0


class StageGroup:
    """Context manager over the actors of `plan`; needs an initialised Ray.

    `checkpoint` is a folder that every node has under this absolute path, or a hub id; `cache` is
    where each node keeps packed layers; `transport` takes hidden states from stage to stage: "gloo"
    (torch.distributed), "ray", or "auto", which is gloo where the stages can be connected by it.

    `recovery` says how `generate` goes on after faults, which `on_event` is told of.

    Raises `DeviceError` when devices are missing, `CheckpointError` and the like from the stages'
    loading, `StageLostError` when an actor dies meanwhile, or there is no point in going on.
    """

    actor_class = StageActor

    def __init__(
        self,
        plan: PlanSpec,
        checkpoint: str,
        timeouts: Timeouts | None = None,
        cache: CacheSettings = NO_CACHE,
        transport: Transport = "auto",
        telemetry: TelemetryOptions = TelemetryOptions(),  # noqa: B008  (frozen)
        recovery: Recovery = Recovery(),  # noqa: B008  (frozen)
        on_event: OnEvent = ignore_event,
    ) -> None:
        self._plan = plan
        sizes = plan.micro_batches
        self._telemetry = replace(
            telemetry,
            prefill_tokens=sizes.prefill * plan.workload.prompt_length,
            decode_requests=sizes.decode,
        )
        self.observer = Observer(lambda: tuple(self._actors))
        self._transport = transport
        self._cache = cache
        self._checkpoint = checkpoint
        self._timeouts = timeouts or Timeouts()
        self._actors: list[ActorHandle[StageActor]] = []
        self._groups: list[PlacementGroup] = []
        self._serving: list[Any] = []
        self._runs = self._epoch = 0
        self._hosts: tuple[str, ...] = ()  # addresses of the stages' nodes
        self._placements: Sequence[Placement] = ()
        self._strategies: Sequence[Mapping[str, Any]] = ()
        self.sizes = QueueSizes.of(plan)
        self._recovery = recovery
        self._on_event = on_event
        self._ledger: Ledger | None = None

    def __enter__(self) -> StageGroup:
        """Place and load all stages; on any error nothing stays behind."""
        try:
            self._start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free actors and placement groups."""
        self._release()

    def _start(self) -> None:
        check_planned_memory(self._plan)
        self._placements = place(self._plan.stages, ray.cluster_resources())
        self._strategies = self._reserve(self._placements)
        for stage, placement, strategy in zip(
            self._plan.stages, self._placements, self._strategies, strict=True
        ):
            self._actors.append(self._start_actor(stage, placement, strategy))
        bring_up(self, self._recovery, self._timeouts.load_s, self._on_event)

    def _link(self) -> bool:
        """Connect the stages by gloo; where that fails and may, warn and leave it to Ray."""
        if self._transport == "ray" or len(self._plan.stages) == 1:
            return False
        try:
            self._meet()
        except DeviceError as error:
            if self._transport == "gloo":
                raise
            warnings.warn(
                f"{error}; stages exchange tensors by Ray, which takes longer", stacklevel=4
            )
            return False
        return True

    def _meet(self) -> None:
        first: Any = self._actors[0]
        timeout_s = self._timeouts.meeting_s
        if self._epoch > 1:  # all are there and have met before
            timeout_s = min(timeout_s, MEETING_AGAIN_S)
        meeting = Rendezvous(self._hosts, timeout_s)
        self._get_watched([first.open_rendezvous.remote(meeting)], timeout_s)
        # The first to fail is the one to blame: the others wait for it.
        connecting = [a.connect.remote(meeting, first, self.sizes) for a in self._actors]
        self._get_watched(connecting, 2 * timeout_s)

    def _get_watched(self, references: Sequence[Any], limit_s: float) -> list[Any]:
        """As `get`; a stage that gives no sign of life meanwhile raises too."""
        watch = Watch(self._actors, self._recovery.hang_s, self.get, needs_progress=False)
        return get_watched(references, watch, limit_s)

    def _reserve(self, placements: Sequence[Placement]) -> list[Mapping[str, Any]]:
        """One placement group for the stages that need resources, so that two jobs cannot halve a
        cluster.
        """
        bundles = [placement.bundle for placement in placements if placement.bundle]
        if not bundles:
            return [{} for _ in placements]
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        if not _is_granted(group, self._timeouts.placement_s):
            raise DeviceError(
                f"Ray did not grant {bundles} within {self._timeouts.placement_s:g} s: the "
                f"devices exist but are in use; free now: {ray.available_resources()}"
            )
        options: list[Mapping[str, Any]] = []
        bundle_index = 0
        for placement in placements:
            strategy = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle_index
            )
            options.append({"scheduling_strategy": strategy} if placement.bundle else {})
            bundle_index += bool(placement.bundle)
        return options

    def _spec(self, stage: StagePlan) -> StageSpec:
        spec = stage_spec(self._plan, stage)
        if self._plan.stand_in is None:
            return spec
        return stand_in_spec(spec, model_shape(self._checkpoint))

    def _start_actor(
        self, stage: StagePlan, placement: Placement, strategy: Mapping[str, Any]
    ) -> Any:
        plan = self._plan
        make_remote: Any = ray.remote  # its annotations lack concurrency groups
        remote: Any = make_remote(concurrency_groups={CONTROL: 1})(self.actor_class).options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            resources=dict(placement.resources),
            runtime_env={"env_vars": stage_environment(placement.threads)},
            max_restarts=0,
            **strategy,
        )
        return remote.remote(
            self._spec(stage),
            self._checkpoint,
            placement.threads,
            emulated_times(plan, stage),
            self._cache,
            self._telemetry,
        )

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[Finished, ...]]:
        """Any number of requests, taken in by chunks as they are needed; yields those that ended,
        and nothing in return for a None, by which the iterable gets its turn while a chunk fills.

        Two chunks at most are on the first stage or before it, so that the next one is there when
        one is used up. An iterable that is slower than the pipeline makes the pipeline wait.
        """
        self._ledger = Ledger(requests, self._recovery.retries, self._recovery.restarts)
        return Generation(self, self._ledger, self._recovery, self._on_event).results()

    def unfinished(self) -> tuple[Request, ...]:
        """Of the last `generate`: requests that were taken from its iterable and not given out,
        with the tokens they have, for another group to go on with.
        """
        return () if self._ledger is None else self._ledger.unfinished

    @property
    def actors(self) -> list[Any]:
        """Of all stages, in their order."""
        return self._actors

    @property
    def serving(self) -> list[Any]:
        """What ends when a stage leaves the run."""
        return self._serving

    def next_run(self) -> int:
        """A number that no run had before."""
        self._runs += 1
        return self._runs

    def name(self, stage: int) -> str:
        """Of the stage and its device, for messages."""
        return f"stage {stage} ({self.device(stage)})"

    def device(self, stage: int) -> str:
        """Name of its device."""
        return self._plan.stages[stage].device

    def has_device(self, stage: int) -> bool:
        """Whether the cluster has what the stage needs, free or not."""
        offered = ray.cluster_resources()
        wanted: Counter[str] = Counter()  # by all stages: the others keep what they have
        for placement in self._placements:
            wanted.update(placement.bundle)
        mine = self._placements[stage].bundle
        return all(offered.get(name, 0.0) >= wanted[name] - 1e-9 for name in mine)

    def generate_chunk(self, chunk: Chunk) -> Any:
        """The stream of what finishes."""
        first: Any = self._actors[0]
        return first.generate.options(num_returns="streaming").remote(chunk)

    def start_again(self, stage: int) -> None:
        """Put a new actor in the place of a dead one, as soon as its place has a device again."""
        ray.kill(self._actors[stage])
        self._actors[stage] = self._start_actor(
            self._plan.stages[stage], self._placements[stage], self._strategies[stage]
        )

    def load(self, stages: Iterable[int]) -> list[Any]:
        """Begin to load the shards of `stages`; what is returned ends within `load_s`."""
        return [self._actors[i].load.remote() for i in stages]

    def link(self) -> None:
        """Connect all stages, which are at rest, and let the first one lead."""
        self._epoch += 1
        limit_s = max(self._timeouts.meeting_s, self._recovery.hang_s)
        begun = [actor.begin.remote(self._epoch) for actor in self._actors]
        self._hosts = tuple(self._get_watched(begun, limit_s))
        linked = self._link()
        first: Any = self._actors[0]
        following: list[Any] = self._actors[1:]
        led = first.lead.remote(self.sizes, None if linked else following)
        self._get_watched([led], limit_s)
        self._serving = [actor.serve.remote() for actor in following] if linked else []

    def raise_failure(self, *noticed: Exception) -> NoReturn:
        """Of stages that no longer serve: a death is the cause of what its neighbours `noticed`."""
        failed = self._serving
        if failed:
            failed, _ = ray.wait(failed, num_returns=len(failed), timeout=NEIGHBOURS_S)
        errors = list(noticed)
        for reference in failed:
            try:
                self.get(reference)
            except (StageLostError, RayTaskError, LlmpqError) as error:
                errors.append(error)
        raise next((e for e in errors if isinstance(e.__cause__, RayActorError)), errors[0])

    def stats(self) -> tuple[StageStats, ...]:
        """Figures of every stage."""
        return tuple(self.get([actor.stats.remote() for actor in self._actors]))

    def get(self, references: Any) -> Any:
        """`ray.get` with errors that name stages."""
        try:
            return get_while_it_lives(references)
        except RayTaskError as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__
        except RayActorError as error:
            raise self._lost(error) from error
        except OutOfMemoryError as error:  # the actor is dead, but this is no RayActorError
            raise StageLostError(f"a stage's process was killed: {error}") from error
        except ObjectLostError as error:
            raise StageLostError(f"a stage's results were lost with its node: {error}") from error

    def _cause_of(self, error: RayTaskError) -> BaseException:
        """What the user should see of an error inside an actor: their own mistake bare, ours with
        its trace.
        """
        cause: BaseException | None = error.cause
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, LlmpqError | StageLostError):
            return cause
        return self._lost(cause) if isinstance(cause, RayActorError) else error

    def _lost(self, error: RayActorError) -> StageLostError:
        ids = [actor._actor_id.hex() for actor in self._actors]
        named = error.actor_id in ids
        stage = f"stage {ids.index(error.actor_id)}" if named else "a stage"
        lost = StageLostError(f"{stage}'s process died: {error}")
        lost.__cause__ = error
        return lost

    def _release(self) -> None:
        if ended_process() is not None:  # there is nobody who could free them, nor any need
            self._groups = []
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups, self._serving = [], [], []


def _is_granted(group: PlacementGroup, limit_s: float) -> bool:
    ends_s = time.monotonic() + limit_s
    while not group.wait(min(LOOK_S, limit_s)):
        check_head()
        if time.monotonic() > ends_s:
            return False
    return True
