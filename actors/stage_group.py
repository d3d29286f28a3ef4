"""All stages of a plan as Ray actors: placed, loaded, driven, and always given back."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.messages import Chunk, Finished, Request, StageStats, Transport
from actors.placement import Placement, place
from actors.stage_actor import CONTROL, Hold, QueueSizes, StageActor
from actors.stage_spec import StageSpec
from planner.accelerators import find_accelerator
from planner.plan import Plan, StagePlan
from quant.cache.settings import NO_CACHE, CacheSettings
from quant.errors import DeviceError, LlmpqError, StageLostError

OPENMP_SPINS = "10000"
"""Some microseconds in which torch's idle threads wait awake: longer, and they take the core from
the threads of the decode attention (62 ms a step of a 170M model on two cores, 49 with this)."""

CHUNKS_AHEAD = 2  # one that the first stage works on, and one that waits there
NEIGHBOURS_S = 2.0  # after a failure: until the stages beside it have noticed, and reported
LEAST_CHUNK_REQUESTS = 64  # a call takes about a millisecond: spread over this many requests


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

    Raises `DeviceError` when devices are missing, `CheckpointError` and the like from the stages'
    loading, `StageLostError` when an actor dies.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: str,
        timeouts: Timeouts | None = None,
        cache: CacheSettings = NO_CACHE,
        transport: Transport = "auto",
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._cache = cache
        self._checkpoint = checkpoint
        self._timeouts = timeouts or Timeouts()
        self._actors: list[ActorHandle[StageActor]] = []
        self._groups: list[PlacementGroup] = []
        self._serving: list[Any] = []
        self._runs = 0

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
        placements = place(self._plan.stages, ray.cluster_resources())
        strategies = self._reserve(placements)
        for stage, placement, strategy in zip(
            self._plan.stages, placements, strategies, strict=True
        ):
            self._actors.append(self._start_actor(stage, placement, strategy))
        self._get([actor.load.remote() for actor in self._actors], self._timeouts.load_s)
        linked = self._link()
        sizes = self._plan.micro_batches
        queue = QueueSizes(self._plan.workload.global_batch, sizes.prefill, sizes.decode)
        first: Any = self._actors[0]
        following: list[Any] = self._actors[1:]
        self._get(first.lead.remote(queue, None if linked else following))
        self._serving = [actor.serve.remote() for actor in following] if linked else []

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
        meeting = self._get(first.open_meeting.remote(timeout_s), timeout_s)
        self._get([actor.connect.remote(meeting) for actor in self._actors], 2 * timeout_s)

    def _reserve(self, placements: Sequence[Placement]) -> list[Mapping[str, Any]]:
        """One placement group for the stages that need resources, so that two jobs cannot halve a
        cluster.
        """
        bundles = [placement.bundle for placement in placements if placement.bundle]
        if not bundles:
            return [{} for _ in placements]
        group = placement_group(bundles, strategy="PACK")
        self._groups.append(group)
        if not group.wait(self._timeouts.placement_s):
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

    def _start_actor(
        self, stage: StagePlan, placement: Placement, strategy: Mapping[str, Any]
    ) -> Any:
        plan = self._plan
        hold = Hold(stage.prefill_s * plan.time_scale, stage.decode_s * plan.time_scale)
        count = str(placement.threads)
        threads = {"OMP_NUM_THREADS": count, "NUMBA_NUM_THREADS": count}
        threads |= {"GOMP_SPINCOUNT": OPENMP_SPINS, "TOKENIZERS_PARALLELISM": "false"}
        make_remote: Any = ray.remote  # its annotations lack concurrency groups
        remote: Any = make_remote(concurrency_groups={CONTROL: 1})(StageActor).options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            resources=dict(placement.resources),
            runtime_env={"env_vars": threads},
            max_restarts=0,
            **strategy,
        )
        return remote.remote(
            stage_spec(plan, stage),
            self._checkpoint,
            placement.threads,
            hold if stage.emulated else Hold(),
            self._cache,
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[tuple[Finished, ...]]:
        """Any number of requests, taken in by chunks as they are needed; yields those that ended.

        Two chunks at most are on the first stage or before it, so that the next one is there when
        one is used up. An iterable that is slower than the pipeline makes the pipeline wait.
        """
        self._runs += 1
        streams: deque[Any] = deque()
        for chunk in self._chunks(requests):
            streams.append(self._generate(chunk))
            if len(streams) == CHUNKS_AHEAD:
                yield from self._finished(streams.popleft())
        for stream in streams:
            yield from self._finished(stream)

    def _chunks(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """The first one fills all slots."""
        rest = iter(requests)
        size = max(self._plan.workload.global_batch, LEAST_CHUNK_REQUESTS)
        last = False
        while not last:
            taken = tuple(islice(rest, size))
            last = len(taken) < size
            yield Chunk(self._runs, taken, last)

    def _generate(self, chunk: Chunk) -> Any:
        first: Any = self._actors[0]
        return first.generate.options(num_returns="streaming").remote(chunk)

    def _finished(self, stream: Any) -> Iterator[tuple[Finished, ...]]:
        """What the calls yields; raises as soon as any stage fails that it may be waiting for."""
        while True:
            done, _ = ray.wait([stream, *self._serving], num_returns=1, fetch_local=False)
            if stream not in done:
                self._raise_failure()
            try:
                finished = self._get(next(stream))
            except StopIteration:
                return
            except StageLostError as error:
                self._raise_failure(error)
            yield finished

    def _raise_failure(self, *noticed: Exception) -> NoReturn:
        """Of stages that no longer serve: a death is the cause of what its neighbours `noticed`."""
        failed = self._serving
        if failed:
            failed, _ = ray.wait(failed, num_returns=len(failed), timeout=NEIGHBOURS_S)
        errors = list(noticed)
        for reference in failed:
            try:
                self._get(reference)
            except (StageLostError, RayTaskError, LlmpqError) as error:
                errors.append(error)
        raise next((e for e in errors if isinstance(e.__cause__, RayActorError)), errors[0])

    def stats(self) -> tuple[StageStats, ...]:
        """Figures of every stage."""
        return tuple(self._get([actor.stats.remote() for actor in self._actors]))

    def _get(self, references: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(references, timeout=timeout_s)
        except RayTaskError as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__
        except RayActorError as error:
            raise self._lost(error) from error
        except GetTimeoutError as error:
            raise DeviceError(f"stages were not ready within {timeout_s:g} s") from error

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
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups, self._serving = [], [], []


def stage_spec(plan: Plan, stage: StagePlan) -> StageSpec:
    """What the actor of `stage` is told."""
    on_host = stage.emulated or find_accelerator(stage.accelerator).compute_capability is None
    return StageSpec(
        index=stage.index,
        stages=len(plan.stages),
        layers=stage.layers,
        bitwidths=stage.bitwidths,
        dtype=stage.dtype,
        slots=plan.workload.global_batch,
        max_tokens=plan.workload.total_length,
        backends=dict(stage.backends),
        memory_limit_bytes=stage.memory_limit_bytes,
        device_name=stage.device,
        accelerator=None if on_host else stage.accelerator,
        head_on_first=plan.head_on_first,
        rounding=plan.rounding,
    )
