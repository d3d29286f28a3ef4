"""Errors that a stage's answer raises: Ray's name the stage, the user's own come unchanged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from actors.processes.answers import StageAnswers, StageDiedError
from quant.common.errors import CheckpointError, StageLostError

STAGES: Any = [SimpleNamespace(index=i, actor_ids=(f"{i}" * 4,)) for i in range(3)]


def death_of(actor_id: str) -> RayActorError:
    error = ActorDiedError()
    error.actor_id = actor_id
    return error


def task_error(cause: Exception) -> RayTaskError:
    """As of a method that raised, or was handed what another actor failed to compute."""
    return RayTaskError("step", "a traceback", cause)


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (death_of("1111"), StageDiedError, "stage 1's process died"),
        (death_of("4444"), StageDiedError, "a stage's process died"),
        (task_error(death_of("2222")), StageDiedError, "stage 2's process died"),
        (task_error(task_error(death_of("2222"))), StageDiedError, "stage 2's process died"),
        (OutOfMemoryError("the node is short of it"), StageDiedError, "was killed.*short of it"),
        (ObjectLostError("00" * 28, "node", ""), StageLostError, "lost with its node"),
        (task_error(CheckpointError("cut off")), CheckpointError, "^cut off$"),
        (task_error(StageLostError("no link")), StageLostError, "^no link$"),
        (task_error(ValueError("a shape")), RayTaskError, "a traceback"),
    ],
)
def test_errors_name_the_stage_or_are_the_users_own(
    raised: Exception,
    expected: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(references: object, timeout: float) -> None:
        raise raised

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(expected, match=said) as found:
        StageAnswers(STAGES).get("reference")  # type: ignore[arg-type]
    assert (type(found.value) is StageDiedError) is (expected is StageDiedError)
