"""A Ray that begins before stages are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmpq.remote.shared_stages import SharedStages
from quant.common.errors import DeviceError

MODULE = "llmpq.remote.shared_stages"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Rays are begun with: the way to give up, and what workers are forks of."""
    found: list[Any] = []

    @contextmanager
    def ray_session(address: str | None, give_up: Any, forks: Any) -> Iterator[None]:
        found.append(give_up)
        yield

    monkeypatch.setattr(f"{MODULE}.ray_session", ray_session)
    monkeypatch.setattr(f"{MODULE}.prepared_forks", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("ray.is_initialized", lambda: bool(found))
    return found


def test_a_ray_that_begins_early_is_joined_and_ended_as_another(begun: list[Any]) -> None:
    told: list[str] = []
    stages = SharedStages(cast(Any, None), None, kept=False)
    stages.begin()
    (give_up,) = begun
    give_up("nobody minds yet")
    with stages.joined(told.append):
        give_up("Ray is gone")
    assert len(begun) == 1
    assert told == ["Ray is gone"]
    assert stages.forks is None


def test_a_ray_that_does_not_start_is_told_when_it_is_joined(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ray(*_: object) -> Any:
        begun.append(None)
        raise DeviceError("Ray did not start")

    monkeypatch.setattr(f"{MODULE}.ray_session", no_ray)
    stages = SharedStages(cast(Any, None), None, kept=False)
    stages.begin()
    with pytest.raises(DeviceError, match="Ray did not start"), stages.joined():
        pass
    assert len(begun) == 1, "it is not tried again"


def test_none_begins_early_where_no_workers_are_prepared(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.prepared_forks", lambda _: None)
    SharedStages(cast(Any, None), None, kept=False).begin()
    assert not begun
