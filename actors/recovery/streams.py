"""Waiting for what a run gives out, until any stage of it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ray import ObjectRefGenerator
from ray.exceptions import RayTaskError

from actors.recovery.pipeline import StagePipeline
from actors.recovery.policy import Recovery
from quant.common.errors import StageLostError

T = TypeVar("T")


class RunStreams(Generic[T]):
    """Reads the streams of the first stage of `pipeline`, whose items are tuples of `T`.

    `has_gap`: an item could not be read, but later ones may be.
    """

    def __init__(self, pipeline: StagePipeline, recovery: Recovery) -> None:
        self._pipeline = pipeline
        self._answers = pipeline.answers
        self._recovery = recovery
        self.has_gap = False

    def items(
        self, stream: ObjectRefGenerator, look: Callable[[], None], interval_s: float
    ) -> Iterator[tuple[T, ...]]:
        """Yield what `stream` has, and `look` meanwhile; raises as soon as any stage of the run
        fails.
        """
        while True:
            awaited = [stream, *self._pipeline.serving]
            ready = self._answers.ready(awaited, interval_s, fetch=False)
            look()
            if not ready:
                continue
            if stream not in ready:
                self._raise_failure()
            try:
                item: tuple[T, ...] = self._answers.get(next(stream))
            except StopIteration:
                return
            except (StageLostError, RayTaskError) as error:
                self.has_gap = True
                if isinstance(error, RayTaskError):
                    raise
                self._raise_failure(error)
            yield item

    def _raise_failure(self, *noticed: StageLostError) -> None:
        """Raise what was noticed: repair finds who is to blame, and where there is none, we do."""
        if not self._recovery.retries:
            self._pipeline.raise_failure(*noticed)
        raise noticed[0] if noticed else StageLostError("a stage left the run")

    def left_in(self, streams: Iterable[ObjectRefGenerator]) -> list[T]:
        """Return what a broken run gave out that was not read; raises a mistake of the user's."""
        left: list[T] = []
        for stream in streams:
            try:
                for reference in self._answers.streamed(stream):
                    left += self._answers.get(reference)
            except (StageLostError, RayTaskError):
                continue
        for served in self._pipeline.serving:
            try:
                self._answers.get(served)
            except (StageLostError, RayTaskError):
                continue
        return left
