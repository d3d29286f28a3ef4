"""How far the stages of a run are while they load, by layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from actors.stage_figures import LayersLoaded

if TYPE_CHECKING:
    from actors.live_group import LiveGroup

INTERVAL_S = 1.0
WAIT_AT_END_S = 10.0  # for a question in progress, which waits 5 s for the stages


@dataclass(frozen=True)
class LoadingState:
    """What all stages do together: `done` of `layers`; None before their processes have begun."""

    what: str | None
    done: int
    layers: int

    @classmethod
    def of(cls, stages: Sequence[LayersLoaded | None], layers: int) -> LoadingState:
        """The state of stages that have `layers` together, None for one that does not answer yet.

        Importance is measured by one stage after another, and by all before one loads.
        """
        known = [stage for stage in stages if stage is not None and stage.what is not None]
        kinds = {stage.what for stage in known}
        if not kinds:
            return cls(None, 0, layers)
        what = "weights" if "weights" in kinds else "importance"
        done = sum(stage.done for stage in known if stage.what == what)
        return cls(what, done, layers)

    def __str__(self) -> str:
        if self.what is None:
            return "starting stages"
        kind = "loading" if self.what == "weights" else "measuring importance"
        return f"{kind}: {self.done} of {self.layers} layers"


class Loading(Protocol):
    """The stages of a group before they generate."""

    def loading(self) -> Sequence[LayersLoaded | None]:
        """How far each one is; None for one that does not answer."""


class LoadingWatch:
    """Context manager that asks `stages`, with `layers` together, every `interval_s` how far they
    are, and calls each of `show`.
    """

    def __init__(
        self,
        stages: Loading,
        layers: int,
        show: Sequence[Callable[[LoadingState], None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._stages, self._layers, self._show = stages, layers, tuple(show)
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llmpq-loading", daemon=True)

    def __enter__(self) -> LoadingWatch:
        if self._show:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(WAIT_AT_END_S)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.look()

    def look(self) -> None:
        """Ask once, and show what was said."""
        state = LoadingState.of(self._stages.loading(), self._layers)
        if not self._ended.is_set():
            for show in self._show:
                show(state)


def loading_watch(
    group: LiveGroup, show: Sequence[Callable[[LoadingState], None]]
) -> AbstractContextManager[object]:
    """Watch the stages of `group` load, and tell `show` how far they are."""
    if not show:
        return nullcontext()
    layers = sum(len(stage.layers) for stage in group.plan.stages)
    return LoadingWatch(group.observer, layers, show)
