"""How many copies of a plan a server starts."""

from __future__ import annotations

import pytest
import ray

from actors.processes import placement, reservation
from actors.processes.placement import Placement
from llmpq.errors import DeviceError, SpecError
from llmpq.serve.options import count_replicas, parse_replicas

Bundle = dict[str, float]


def counted(text: str, free: int, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> int:
    """Copies that are started where Ray grants `free` of them, which take `bundle` each."""
    granted = [Placement(bundle, 0.0, 0.0, 1)] * 4
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(placement, "place", lambda stages, offered: granted)
    monkeypatch.setattr(reservation, "copies_granted", lambda placements, most: min(free, most))
    return count_replicas([None] * 4, parse_replicas(text))


@pytest.mark.parametrize(
    ("text", "free", "expected"),
    [
        ("1", 0, 1),
        ("2", 3, 2),
        ("auto", 3, 3),
        ("3", 2, "free devices for 2 copies of the plan, 4 each; give --replicas 2, add nodes"),
        ("2", 0, "free devices for 0 copies of the plan, 4 each; add nodes"),
        ("auto", 0, "--replicas auto: there are free devices for 0"),
        ("0", 3, "--replicas is '0'; give 1 to 64, or auto"),
        ("two", 3, "--replicas is 'two'"),
        ("65", 100, "--replicas is '65'"),
    ],
)
def test_as_many_are_started_as_have_devices(
    text: str, free: int, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(expected, int):
        assert counted(text, free, {"T4": 1.0}, monkeypatch) == expected
        return
    with pytest.raises((SpecError, DeviceError), match=expected):
        counted(text, free, {"T4": 1.0}, monkeypatch)


def test_emulated_stages_have_no_devices_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted("3", 3, {}, monkeypatch) == 3
    with pytest.raises(SpecError, match="emulated; give a number"):
        counted("auto", 64, {}, monkeypatch)
