"""Requests that wait in memory or on disk, and a gate that leaves the others where they are."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from actors.messages import Request, Sampling
from llmpq.run.rows_in_flight import WaitingRequests, until
from quant.common.errors import InputError

SAMPLING = Sampling(temperature=0.5, seed=7, stop=("é", "\n"), logit_bias={3: -1.5})


@pytest.fixture(params=[1, 1 << 20], ids=["disk", "memory"])
def waiting(request: pytest.FixtureRequest) -> Iterator[WaitingRequests]:
    requests = WaitingRequests(memory_bytes=request.param)
    yield requests
    requests.close()


def test_requests_come_back_as_they_were(waiting: WaitingRequests) -> None:
    added = [
        Request(f"row é\n{i}", tuple(range(i)), 5 + i, SAMPLING, tuple(range(i % 3)))
        for i in range(1, 50)
    ]
    for request in added:
        waiting.add(request, {"topic": request.custom_id, "tags": [None, 1.5, {"é": 2**70}]})
    assert waiting.prompts == len(added)
    found = list(waiting.take_all())
    assert [each.request for each in found] == added
    tags = [None, 1.5, {"é": 2**70}]
    expected = [{"topic": each.custom_id, "tags": tags} for each in added]
    assert [each.columns for each in found] == expected
    assert waiting.prompts == 0


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingRequests()

    def full(_: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(waiting._file, "write", full)
    with pytest.raises(InputError, match="No space left on device; free space"):
        waiting.add(Request("a", (1,), 1, SAMPLING), {})


def test_a_closed_gate_leaves_the_others() -> None:
    requests = iter([Request(str(i), (1,), 1, SAMPLING) for i in range(5)])
    closed = threading.Event()
    gate = until(closed, requests)
    assert [each.custom_id for each in (next(gate), next(gate)) if each] == ["0", "1"]
    closed.set()
    assert list(gate) == []
    assert [each.custom_id for each in requests] == ["2", "3", "4"]
