"""The processes of a stage's ranks: loading, joining, handing over, noticing that one has died."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.messages import KvPart
from actors.processes.device import local_device, use_threads
from actors.processes.health import BatchFailure, Health, RankSigns, RunReport
from actors.stage.handed_over import HeldKeysValues
from actors.stage.spec import StageSpec
from actors.stage_figures import LayersLoaded, StageStats
from actors.transport.collectives import ALONE, Meeting, RankGroup
from actors.transport.pipelines import RayMessage, from_ray
from actors.transport.rendezvous import CONTROL, HANDOVER
from quant.checkpoint.model_reference import resolve
from quant.common.errors import DeviceError, StageLostError
from quant.devices import local_processor
from quant.loading.cache_settings import CacheSettings
from quant.loading.loader import noting_layers
from quant.rounding.importance import LayerImportance

if TYPE_CHECKING:  # drivers know of actors without transformers
    from actors.stage.stage import Stage

Handed = tuple[RayMessage, float]
"""A message with keys and values, and when an emulated link has brought it, by the monotonic clock
of the machine (0: there is none)."""


class KeysValuesKeeper:
    """Hands over and takes over host memory between `open_handover` and `close_handover`."""

    def __init__(self) -> None:
        self._handing = Lock()  # around what must not be done half when its run ends
        self._keys_values: HeldKeysValues | None = None
        self._handed_epoch = 0
        self._link_free_s = 0.0  # by a clock that all processes of the machine share

    def open_handover(self, keys_values: HeldKeysValues, epoch: int) -> None:
        """Take and give from now on, as of this `epoch` of the stage's pipeline."""
        with self._handing:
            self._keys_values, self._handed_epoch = keys_values, epoch

    def close_handover(self) -> None:
        """Take nothing more: what was taken is forgotten."""
        with self._handing:
            self._keys_values = None

    @ray.method(concurrency_group=HANDOVER)
    def hand_over(
        self, keys: Sequence[int], part: KvPart, as_part: KvPart, modelled_s: float
    ) -> Handed:
        """Run `HeldKeysValues.hand_over`; the message travels for `modelled_s` seconds over an
        emulated link, one after the other (0: over a real one).

        Raises `StageLostError` where the stage has left its run.
        """
        message = self._open().hand_over(keys, part, as_part)
        arrival_s = 0.0
        if modelled_s:
            arrival_s = max(time.monotonic(), self._link_free_s) + modelled_s
            self._link_free_s = arrival_s
        content: RayMessage = message.numpy()
        return content, arrival_s

    @ray.method(concurrency_group=HANDOVER)
    def take_over(self, epoch: int, sent: Sequence[ObjectRef[Handed]]) -> tuple[int, ...]:
        """Run `HeldKeysValues.take_over` with what other stages have `sent`, once that is there.

        Returns nothing where a stage that sends is lost. Raises `StageLostError` where `epoch` is
        over: what was handed over in it is forgotten.
        """
        try:
            handed = ray.get(list(sent))
        except RayError:
            return ()
        messages = [from_ray(message) for message, _ in handed]
        wait_s = max((arrival_s for _, arrival_s in handed), default=0.0) - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        with self._handing:
            if epoch != self._handed_epoch:
                raise StageLostError(
                    f"keys and values of epoch {epoch} came in epoch {self._handed_epoch}"
                )
            return self._open().take_over(messages)

    @ray.method(concurrency_group=HANDOVER)
    def forget_keys(self, keys: Sequence[int]) -> None:
        """Free what lies under `keys`, as far as something does."""
        with self._handing:
            if self._keys_values is not None:
                self._keys_values.forget(keys)

    def _open(self) -> HeldKeysValues:
        if self._keys_values is None:
            raise StageLostError("a stage that has left its run has no keys and values")
        return self._keys_values


class ShardLoader:
    """Loads the shard of `spec` to this process's device; any thread may read `progress`."""

    def __init__(
        self, spec: StageSpec, checkpoint: str, cache: CacheSettings, health: Health
    ) -> None:
        self.progress = LayersLoaded()
        self._spec = spec
        self._checkpoint = checkpoint
        self._cache = cache
        self._health = health

    def measure(self, hidden: torch.Tensor | None) -> tuple[torch.Tensor, list[LayerImportance]]:
        """Run `measure_stage` over the stage's whole layers, also where it has several ranks."""
        from actors.importance import measure_stage

        device = self._health.device = local_device(self._spec)
        folder = resolve(self._checkpoint)
        with self._counting_layers("importance"):
            found = measure_stage(self._spec, folder, device, local_processor(device), hidden)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the weights that come now
        return found

    def load(self, importance: Sequence[LayerImportance] | None) -> Stage:
        """Quantize and keep the shard, or take it from the cache; raises as `Stage`."""
        from actors.stage.stage import Stage

        device = self._health.device = local_device(self._spec)
        folder, processor = resolve(self._checkpoint), local_processor(device)
        with self._counting_layers("weights"):
            return Stage(self._spec, folder, device, processor, self._cache, importance)

    def _counting_layers(
        self, what: Literal["importance", "weights"]
    ) -> AbstractContextManager[None]:
        """Count the layers that are loaded meanwhile."""
        self.progress = LayersLoaded(what, 0, len(self._spec.layers))
        return noting_layers(self._note_layer)

    def _note_layer(self) -> None:
        self.progress = replace(self.progress, done=self.progress.done + 1)


class RankActor(KeysValuesKeeper):
    """A rank of a stage in its own process, which rank 0 calls; made at little cost."""

    def __init__(
        self, spec: StageSpec, checkpoint: str, threads: int, cache: CacheSettings
    ) -> None:
        super().__init__()
        use_threads(threads)
        self._spec = spec
        self._health = Health()
        self._loader = ShardLoader(spec, checkpoint, cache, self._health)
        self._stage: Stage | None = None
        self._group: RankGroup = ALONE

    def load(self, importance: Sequence[LayerImportance] | None) -> StageStats:
        """Load the rank's part of the shard; raises what `Stage` raises."""
        self._stage = self._loader.load(importance)
        return self._stage.stats()

    @ray.method(concurrency_group=CONTROL)
    def layers_loaded(self) -> LayersLoaded:
        """Give a sign of life: how far it is with what it loads."""
        return self._loader.progress

    def join(self, meeting: Meeting, epoch: int) -> None:
        """Meet the other ranks in `epoch`; `DeviceError` where they do not come."""
        stage, spec = self._loaded(), self._spec
        self._group = meeting.join(spec.rank, spec.degree, stage.device)
        stage.join(self._group)
        self.open_handover(stage.keys_values, epoch)

    def follow(self) -> None:
        """Compute along with rank 0 until it leaves, or this rank fails: `leave_run` tells why."""
        from actors.stage.ranks import follow as follow_orders

        try:
            follow_orders(self._loaded(), self._group, self._health.computing)
        except StageLostError:  # the others have left
            pass
        finally:
            self._leave()

    def leave_run(self) -> RunReport:
        """Leave a broken run, once `follow` is over; the shard stays loaded."""
        self.close_handover()
        self._leave()
        if self._stage is not None:
            self._stage.forget_parked()
        return RunReport(self._health.take_failure(), None)

    def _leave(self) -> None:
        self._group = ALONE
        if self._stage is not None:
            self._stage.leave()

    def _loaded(self) -> Stage:
        if self._stage is None:
            raise RuntimeError(f"{self._spec.name} was used before it was loaded")
        return self._stage


T = TypeVar("T")

LEAVE_S = 15.0
"""Ranks that rank 0 has left end what they compute within this time, or their stage is lost: the
driver waits a little longer."""


class Followers:
    """Ranks 1 and up of the stage `index`, whose `actors` are `RankActor`; there may be none."""

    def __init__(self, index: int, actors: Sequence[Any]) -> None:
        self._index = index
        self._actors = list(actors)
        self._meeting: Meeting | None = None
        self._layers = [LayersLoaded()] * len(actors)
        self._ranks = RankSigns()
        self._asked: dict[int, tuple[ObjectRef[LayersLoaded], float]] = {}
        self._met: set[int] = set()  # a process that gave no sign yet may still be starting

    def wait(self) -> None:
        """Return when all have devices and processes; `StageLostError` where one dies."""
        self.get([actor.layers_loaded.remote() for actor in self._actors])

    def load(self, importance: Sequence[LayerImportance] | None) -> list[ObjectRef[StageStats]]:
        kept = ray.put(importance) if self._actors else None
        return [actor.load.remote(kept) for actor in self._actors]

    def meet(self, stage: Stage, epoch: int) -> None:
        """Have all ranks join a group in `epoch`. Raises `DeviceError` or `StageLostError`."""
        self._meeting = meeting = Meeting.on_this_node()
        joining = [actor.join.remote(meeting, epoch) for actor in self._actors]
        try:
            stage.join(meeting.join(0, stage.spec.degree, stage.device))
        except DeviceError:
            self.get(ray.wait(joining, num_returns=len(joining), timeout=0)[0])
            raise
        self.get(joining)
        if stage.device.type == "cpu":
            meeting.end()
        for actor in self._actors:
            actor.follow.remote()

    def leave(self, stage: Stage | None) -> BatchFailure | None:
        """End the group of `stage`; return what another rank failed at. Raises `StageLostError`."""
        if not self._actors:
            return None
        if stage is not None:
            stage.leave()
        if self._meeting is not None:
            self._meeting.end()
            self._meeting = None
        reports: list[RunReport] = self.get(
            [actor.leave_run.remote() for actor in self._actors], LEAVE_S
        )
        return next((each.failure for each in reports if each.failure is not None), None)

    def layers_loaded(self, own: LayersLoaded) -> LayersLoaded:
        """Progress of the rank that has loaded least, or rank 0 by its `own`; for `signs`."""
        self.signs()
        if own.what != "weights":
            return own
        return replace(own, done=min([own.done, *(each.done for each in self._layers)]))

    def signs(self) -> RankSigns:
        """What is known of their lives by now; takes answers and asks again; for one thread."""
        died, silent, longest_s = self._ranks.died, None, 0.0
        now_s = time.monotonic()
        for number, actor in enumerate(self._actors):
            if number in self._asked:
                reference, asked_s = self._asked[number]
                if not ray.wait([reference], timeout=0)[0]:
                    if number in self._met and now_s - asked_s > longest_s:
                        silent, longest_s = number + 1, now_s - asked_s
                    continue
                try:
                    self._layers[number] = ray.get(reference)
                except RayActorError:
                    died = number + 1
                self._met.add(number)
            self._asked[number] = actor.layers_loaded.remote(), now_s
        self._ranks = RankSigns(died, silent, longest_s)
        return self._ranks

    def get(self, references: Sequence[ObjectRef[T]], limit_s: float | None = None) -> list[T]:
        """All answers; `StageLostError` where a rank has died, or does not answer in time."""
        try:
            return ray.get(list(references), timeout=limit_s)
        except RayActorError as error:
            raise StageLostError(f"a rank of stage {self._index} died: {error}") from error
        except GetTimeoutError as error:
            raise StageLostError(
                f"a rank of stage {self._index} did not come to rest within {limit_s:g} s"
            ) from error
