"""The actors around stages as drivers call them: without importing what they compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import ray

from actors.processes.meter import TelemetryOptions
from actors.stage.spec import ScaledTimes
from actors.transport.rendezvous import CONTROL, HANDOVER
from quant.loading.cache_settings import CacheSettings


@dataclass(frozen=True)
class ProcessOptions:
    """Options of a stage's process: its number of torch `threads`, where this node keeps packed
    layers, what the stage notes, and the `emulated` times that stand for a device which is not
    there (None: a real device).
    """

    threads: int
    cache: CacheSettings
    telemetry: TelemetryOptions
    emulated: ScaledTimes | None


def _calls(name: str, **options: Any) -> Callable[..., Any]:
    """Make a method of an actor that is the one of this name of what it stands for."""

    def call(self: Any, *arguments: Any) -> Any:
        return getattr(self.own, name)(*arguments)

    return ray.method(**options)(call) if options else call


def _at_once(name: str) -> Callable[..., Any]:
    return _calls(name, concurrency_group=CONTROL)


class RankActor:
    """Stands for `actors.processes.ranks.RankActor`, which its process imports."""

    made_of = "actors.processes.ranks"

    def __init__(self, *arguments: Any) -> None:
        self.own = getattr(import_module(self.made_of), type(self).__name__)(*arguments)

    load = _calls("load")
    join = _calls("join")
    follow = _calls("follow")
    leave_run = _calls("leave_run")
    layers_loaded = _at_once("layers_loaded")
    hand_over = _calls("hand_over", concurrency_group=HANDOVER)
    take_over = _calls("take_over", concurrency_group=HANDOVER)
    forget_keys = _calls("forget_keys", concurrency_group=HANDOVER)


class StageActor(RankActor):
    """Stands for `actors.processes.stage_actor.StageActor`, which its process imports."""

    made_of = "actors.processes.stage_actor"

    ready = _calls("ready")
    measure_importance = _calls("measure_importance", num_returns=2)
    find_importance = _calls("find_importance")
    step = _calls("step")
    connect = _calls("connect")
    serve = _calls("serve")
    begin = _calls("begin")
    lead = _calls("lead")
    follow = _at_once("follow")
    submit = _at_once("submit")
    cancel = _at_once("cancel")
    close_live = _at_once("close_live")
    stats = _at_once("stats")
    clock_s = _at_once("clock_s")
    spans = _at_once("spans")
    take_requests = _at_once("take_requests")
    heartbeat = _at_once("heartbeat")
    stop = _at_once("stop")
    open_rendezvous = _at_once("open_rendezvous")
    board_put = _at_once("board_put")
    board_read = _at_once("board_read")

    def live(self, *arguments: Any) -> Iterator[Any]:
        yield from self.own.live(*arguments)
