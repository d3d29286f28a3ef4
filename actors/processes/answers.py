"""Waiting for what stages answer: where the driver blocks on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from actors.processes.handle import StageHandle
from actors.processes.ray_head import LOOK_S, check_head
from quant.common.errors import LlmpqError, StageLostError

T = TypeVar("T")
Waitable = TypeVar("Waitable", bound=ObjectRef[Any] | ObjectRefGenerator)


class StageDiedError(StageLostError):
    """A stage's process ended while an answer of it was awaited."""


def get_answer(reference: ObjectRef[T]) -> T:
    return get_answers([reference])[0]


def get_answers(references: Sequence[ObjectRef[T]]) -> list[T]:
    """Return what `references` stand for, as `ray.get`, but `HeadLostError` if Ray is gone."""
    while True:
        try:
            return ray.get(references, timeout=LOOK_S)
        except GetTimeoutError:
            check_head()


def get_streamed(stream: ObjectRefGenerator) -> Iterator[ObjectRef[Any]]:
    """Yield references to a streaming task's items; `HeadLostError` where its Ray is gone."""
    while True:
        while not ray.wait([stream], timeout=LOOK_S, fetch_local=False)[0]:
            check_head()
        try:
            reference = next(stream)
        except StopIteration:
            return
        yield reference


class StageAnswers:
    """Waits for answers of `stages`, by the driver's clock; errors name the stage they are of."""

    def __init__(self, stages: Sequence[StageHandle]) -> None:
        self._stages = stages

    def now_s(self) -> float:
        return time.monotonic()

    def ready(
        self, references: Sequence[Waitable], timeout_s: float, fetch: bool = True
    ) -> list[Waitable]:
        """Those that have come within `timeout_s`, `fetch`ed to this node; or `HeadLostError`."""
        done, _ = ray.wait(list(references), timeout=timeout_s, fetch_local=fetch)
        check_head()
        return [reference for reference in references if reference in done]

    def streamed(self, stream: ObjectRefGenerator) -> Iterator[ObjectRef[Any]]:
        return get_streamed(stream)

    def get(self, reference: ObjectRef[T]) -> T:
        """Return the answer that `reference` stands for.

        Raises the user's own mistake (`LlmpqError`) as the stage raised it, `StageDiedError` for
        processes that died, `StageLostError` for answers that were lost otherwise, `RayTaskError`
        for faults of the stage's code, and `HeadLostError`.
        """
        try:
            return get_answer(reference)
        except RayTaskError as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__
        except RayActorError as error:
            raise self._death(error) from error
        except OutOfMemoryError as error:  # the actor is dead, but this is no RayActorError
            raise StageDiedError(f"a stage's process was killed: {error}") from error
        except ObjectLostError as error:
            raise StageLostError(f"a stage's results were lost with its node: {error}") from error

    def _cause_of(self, error: RayTaskError) -> BaseException:
        """What the user should see of an actor's error: their mistake bare, ours with its trace."""
        cause: BaseException | None = error.cause
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, LlmpqError | StageLostError):
            return cause
        return self._death(cause) if isinstance(cause, RayActorError) else error

    def _death(self, error: RayActorError) -> StageDiedError:
        named = [stage.index for stage in self._stages if error.actor_id in stage.actor_ids]
        stage = f"stage {named[0]}" if named else "a stage"
        died = StageDiedError(f"{stage}'s process died: {error}")
        died.__cause__ = error
        return died
