"""A local Ray is looked after: against pretend processes and a pretend clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import ray

from llmpq.remote.local_ray import LEAVE_S, LocalHead
from llmpq.remote.session import ray_session
from quant.common.errors import DeviceError, HeadLostError, InputError, StageLostError

GONE = "Ray's raylet (process 7) has ended with signal 9"


@dataclass
class Process:
    ended: bool = False

    def kill(self) -> None:
        self.ended = True


@dataclass
class Ray:
    """What `LocalHead` sees, and what it does."""

    ended: str | None = None
    now_s: float = 100.0
    started: list[Process] = field(default_factory=lambda: [Process(), Process()])
    told: list[str] = field(default_factory=list)

    def head(self, give_up: bool = True) -> LocalHead:
        return LocalHead(
            self.told.append if give_up else None,
            lambda: self.ended,
            lambda: self.started,
            lambda: self.now_s,
        )


def test_a_run_that_a_lost_ray_blocks_is_given_up_and_its_processes_ended() -> None:
    ray = Ray()
    with ray.head() as head:
        for _ in range(100):
            ray.now_s += 1.0
            head.check()
        ray.ended = GONE
        for _ in range(int(LEAVE_S)):
            head.check()
            ray.now_s += 1.0
        assert ray.told == []
        assert not any(process.ended for process in ray.started)
        head.check()
        (told,) = ray.told
        assert told.startswith(GONE)
        assert all(process.ended for process in ray.started)


def test_without_a_way_to_give_up_the_caller_is_left_to_end() -> None:
    ray = Ray(ended=GONE)
    with ray.head(give_up=False) as head:
        head.check()
        ray.now_s += 10 * LEAVE_S
        head.check()
        assert not any(process.ended for process in ray.started)


def test_leaving_ends_what_was_there_at_first_and_what_came_later() -> None:
    ray = Ray()
    first = ray.started
    with ray.head() as head:
        ray.started = later = [Process()]
        head.note_started()
    assert all(process.ended for process in first + later)
    assert ray.told == []


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.mark.parametrize("error", [StageLostError, DeviceError, ray.exceptions.RaySystemError])
@pytest.mark.usefixtures("joined")
def test_what_a_lost_ray_makes_fail_is_blamed_on_it(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error), ray_session():
        raise error("lives")
    monkeypatch.setattr("actors.processes.ray_head.ended_process", lambda: GONE)
    with pytest.raises(HeadLostError, match="raylet") as found, ray_session():
        raise error("dead")
    assert isinstance(found.value.__context__, error)
    with pytest.raises(InputError), ray_session():
        raise InputError("a full disk is a full disk")
