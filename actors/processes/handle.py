"""A stage as the driver sees it: typed calls to its actor, whichever process that has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle

from actors.messages import KvPart, Request
from actors.processes.health import Heartbeat, RunReport
from actors.processes.meter import Spans
from actors.processes.request_log import RequestTimes
from actors.schedule.scheduler import QueueSizes
from actors.stage_figures import LayersLoaded, StageStats
from actors.transport.rendezvous import Rendezvous
from planner.plan.spec import StagePlan
from planner.scheduling import RequestSchedule

if TYPE_CHECKING:  # drivers know of stages without torch
    from torch import Tensor

    from actors.processes.ranks import Handed
    from quant.rounding.importance import LayerImportance


class StageHandle:
    """A stage of a plan, whose `index` and `devices` it has. `start_actors` makes an actor for each
    of its ranks, and `has_device` says whether the cluster has what the stage needs, free or not.

    The calls to the actor do what its methods of these names do; they return at once, with a
    reference for the answer.
    """

    def __init__(
        self,
        stage: StagePlan,
        start_actors: Callable[[], tuple[ActorHandle[Any], ...]],
        has_device: Callable[[], bool],
    ) -> None:
        self.index = stage.index
        self.devices = stage.device_names
        self.name = f"stage {stage.index} ({stage.label})"  # and its devices, for messages
        self.has_device = has_device
        self._start_actors = start_actors
        self._actors: tuple[ActorHandle[Any], ...] = ()
        self._importance: ObjectRef[Sequence[LayerImportance]] | None = None

    def start(self) -> None:
        """Put new processes in the old ones' place, which start once there are devices."""
        self.kill()
        self._actors = self._start_actors()

    def kill(self) -> None:
        """End the processes of all ranks, where there are any, without waiting for that."""
        for actor in self._actors:
            ray.kill(actor)

    @property
    def actor(self) -> Any:
        """Ray's handle of rank 0, which knows the actor's methods only when it runs."""
        return self._ranks()[0]

    def _ranks(self) -> tuple[Any, ...]:
        if not self._actors:
            raise RuntimeError(f"{self.name} was not started")
        return self._actors

    @property
    def actor_ids(self) -> tuple[str, ...]:
        """Ray's names for the actors of all ranks; none before they are started."""
        return tuple(actor._actor_id.hex() for actor in self._actors)

    def _ask(self, method: str, *arguments: object, rank: int = 0) -> ObjectRef[Any]:
        answer: ObjectRef[Any] = getattr(self._ranks()[rank], method).remote(*arguments)
        return answer

    def ready(self) -> ObjectRef[None]:
        return self._ask("ready")

    def use_importance(
        self, layers: Sequence[LayerImportance] | ObjectRef[Sequence[LayerImportance]]
    ) -> None:
        """Have the stage round by this at every `load`, also of a process that comes later."""
        self._importance = layers if isinstance(layers, ObjectRef) else ray.put(layers)

    def find_importance(
        self, place: tuple[Path, str, str], seen: str, parts: Sequence[slice]
    ) -> tuple[ObjectRef[bool], list[ObjectRef[Sequence[LayerImportance]]]]:
        """Read what an `ImportanceStore(*place)` has; whether it has it, and those `parts`."""
        method = self.actor.find_importance.options(num_returns=1 + len(parts))
        is_there, *layers = method.remote(place, seen, parts)
        return is_there, layers

    def measure_importance(
        self, hidden: ObjectRef[Tensor] | None
    ) -> tuple[ObjectRef[Tensor], ObjectRef[list[LayerImportance]]]:
        """`hidden` may still be computed by the stage before; it goes from process to process."""
        following, layers = self.actor.measure_importance.remote(hidden)
        return following, layers

    def load(self) -> ObjectRef[StageStats]:
        return self._ask("load", self._importance)

    def begin(self, epoch: int) -> ObjectRef[str]:
        return self._ask("begin", epoch)

    def open_rendezvous(self, rendezvous: Rendezvous) -> ObjectRef[None]:
        return self._ask("open_rendezvous", rendezvous)

    def connect(
        self, rendezvous: Rendezvous, first: StageHandle, sizes: QueueSizes
    ) -> ObjectRef[None]:
        return self._ask("connect", rendezvous, first.actor, sizes)

    def lead(self, sizes: QueueSizes, following: Sequence[StageHandle] | None) -> ObjectRef[None]:
        actors = None if following is None else [stage.actor for stage in following]
        return self._ask("lead", sizes, actors)

    def serve(self) -> ObjectRef[None]:
        return self._ask("serve")

    def live(self, run: int, told_every: int, waits: bool) -> ObjectRefGenerator:
        """The stream's items are tuples of `Progress`."""
        stream: ObjectRefGenerator = self.actor.live.options(num_returns="streaming").remote(
            run, told_every, waits
        )
        return stream

    def submit(self, run: int, requests: Sequence[Request]) -> ObjectRef[None]:
        return self._ask("submit", run, requests)

    def cancel(self, run: int, custom_ids: Sequence[str]) -> ObjectRef[None]:
        return self._ask("cancel", run, custom_ids)

    def close_live(self, run: int) -> ObjectRef[None]:
        return self._ask("close_live", run)

    def hand_over(
        self, rank: int, keys: Sequence[int], parts: tuple[KvPart, KvPart], modelled_s: float
    ) -> ObjectRef[Handed]:
        """`parts`: the part of keys and values that the rank gives, and as which it tells of it."""
        return self._ask("hand_over", keys, *parts, modelled_s, rank=rank)

    def take_over(
        self, rank: int, epoch: int, sent: Sequence[ObjectRef[Handed]]
    ) -> ObjectRef[tuple[int, ...]]:
        """What was `sent` goes from process to process."""
        return self._ask("take_over", epoch, sent, rank=rank)

    def forget_keys(self, keys: Sequence[int]) -> None:
        """Have all ranks do so, some time soon."""
        for actor in self._ranks():
            actor.forget_keys.remote(keys)

    def follow(self, schedule: RequestSchedule) -> ObjectRef[None]:
        return self._ask("follow", schedule)

    def stop(self) -> ObjectRef[None]:
        return self._ask("stop")

    def leave_run(self) -> ObjectRef[RunReport]:
        return self._ask("leave_run")

    def heartbeat(self, with_tokens: bool) -> ObjectRef[Heartbeat]:
        return self._ask("heartbeat", with_tokens)

    def layers_loaded(self) -> ObjectRef[LayersLoaded]:
        return self._ask("layers_loaded")

    def stats(self) -> ObjectRef[StageStats]:
        return self._ask("stats")

    def clock_s(self) -> ObjectRef[float]:
        return self._ask("clock_s")

    def spans(self) -> ObjectRef[Spans | None]:
        return self._ask("spans")

    def take_requests(self, custom_ids: Sequence[str]) -> ObjectRef[dict[str, RequestTimes]]:
        return self._ask("take_requests", custom_ids)
