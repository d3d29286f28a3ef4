"""All stages of a plan as Ray actors: placed, loaded, driven, and always given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.messages import Finished, Request, StageStats
from actors.placement import Placement, place
from actors.stage_actor import Hold, StageActor
from actors.stage_spec import StageSpec
from planner.accelerators import find_accelerator
from planner.plan import Plan, StagePlan
from quant.cache.settings import NO_CACHE, CacheSettings
from quant.errors import DeviceError, LlmpqError, StageLostError


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for resources to be granted and for shards to be loaded."""

    placement_s: float = 60.0
    load_s: float = 3600.0


class StageGroup:
    """Context manager over the actors of `plan`; needs an initialised Ray.

    `checkpoint` is a folder that every node has under this absolute path, or a hub id; `cache` is
    where each node keeps packed layers.

    Raises `DeviceError` when devices are missing, `CheckpointError` and the like from the stages'
    loading, `StageLostError` when an actor dies.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: str,
        timeouts: Timeouts | None = None,
        cache: CacheSettings = NO_CACHE,
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._checkpoint = checkpoint
        self._timeouts = timeouts or Timeouts()
        self._actors: list[ActorHandle[StageActor]] = []
        self._groups: list[PlacementGroup] = []

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
        threads = {"OMP_NUM_THREADS": str(placement.threads), "TOKENIZERS_PARALLELISM": "false"}
        remote: Any = ray.remote(StageActor).options(
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

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[Finished, ...]]:
        """One batch of at most `plan.workload.global_batch` requests; yields those that ended."""
        first: Any = self._actors[0]
        sizes = self._plan.micro_batches
        stream: Any = first.generate.options(num_returns="streaming").remote(
            requests, sizes.prefill, sizes.decode, self._actors[1:]
        )
        for reference in stream:
            yield self._get(reference)

    def stats(self) -> tuple[StageStats, ...]:
        """Figures of every stage."""
        return tuple(self._get([actor.stats.remote() for actor in self._actors]))

    def _get(self, references: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(references, timeout=timeout_s)
        except RayTaskError as error:
            raise _cause_of(error) from None
        except RayActorError as error:
            raise StageLostError(f"a stage's process died: {error}") from error
        except GetTimeoutError as error:
            raise DeviceError(f"stages were not ready within {timeout_s:g} s") from error

    def _release(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []


def _cause_of(error: RayTaskError) -> BaseException:
    """What the user should see of an error inside an actor: their own mistake bare, ours with its
    trace.
    """
    cause: BaseException | None = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, LlmpqError):
        return cause
    if isinstance(cause, RayActorError):
        return StageLostError(f"a stage's process died: {cause}")
    return error


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
