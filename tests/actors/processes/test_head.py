"""The loss of a local Ray is noticed, against pretend processes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from actors.processes.answers import StageAnswers, get_answer, get_streamed
from actors.processes.ray_head import check_head, ended_process
from quant.common.errors import HeadLostError


@dataclass
class Process:
    """As `subprocess.Popen`: None while it lives."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@dataclass
class Head:
    raylet: Process = field(default_factory=lambda: Process(11))
    gcs_server: Process = field(default_factory=lambda: Process(12))
    dashboard: Process = field(default_factory=lambda: Process(13))

    @property
    def all_processes(self) -> dict[str, list[Any]]:
        """As Ray's node has them."""
        kinds = vars(self).items()
        return {kind: [SimpleNamespace(process=process)] for kind, process in kinds}


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    head = Head()
    monkeypatch.setattr("ray._private.worker._global_node", head)
    return head


def test_without_raylet_or_gcs_there_is_no_going_on(head: Head) -> None:
    check_head()
    head.dashboard.returncode = 1  # no run needs it
    assert ended_process() is None
    head.raylet.returncode = -9
    with pytest.raises(HeadLostError, match=r"raylet \(process 11\) has ended with signal 9;"):
        check_head()
    head.raylet.returncode, head.gcs_server.returncode = None, 1
    with pytest.raises(HeadLostError, match=r"GCS\) \(process 12\) has ended with exit code 1;"):
        check_head()


def test_a_ray_that_others_started_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (None, SimpleNamespace(all_processes={})):
        monkeypatch.setattr("ray._private.worker._global_node", node)
        assert ended_process() is None


def test_nobody_waits_for_what_a_lost_head_owes(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def wait(timeout: float) -> None:
        waits.append(timeout)
        if len(waits) % 3 == 0:
            head.raylet.returncode = -9

    def get(references: object, timeout: float) -> None:
        wait(timeout)
        raise GetTimeoutError

    def wait_for(references: list[Any], timeout: float, fetch_local: bool) -> Any:
        wait(timeout)
        return [], references

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait_for)
    with pytest.raises(HeadLostError):
        get_answer("reference")  # type: ignore[arg-type]
    head.raylet.returncode = None
    with pytest.raises(HeadLostError):
        next(get_streamed("stream"))  # type: ignore[arg-type]
    head.raylet.returncode = None
    answers = StageAnswers([])
    assert [answers.ready(["reference"], 1.0) for _ in range(2)] == [[], []]  # type: ignore[list-item]
    with pytest.raises(HeadLostError):
        answers.ready(["reference"], 1.0)  # type: ignore[list-item]
    assert waits == [1.0] * 9
