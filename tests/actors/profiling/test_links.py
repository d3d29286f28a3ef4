"""Hops between two GPUs, with a pretend NCCL; those of CPUs are measured in tests/llmpq/profile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.profiling import links
from actors.profiling.links import End
from actors.transport.rendezvous import Rendezvous
from tests.actors.pretend_nccl import WAIT_S, PretendGpus


def test_hops_between_gpus_are_timed_over_nccl_and_over_gloo(
    gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "NCCL_PAYLOADS_BYTES", (4 << 10, 1 << 20))
    threads, rendezvous = torch.get_num_threads(), Rendezvous(("here",) * 2, WAIT_S, nccl=True)
    ends = [End(on_gpu=False), End(on_gpu=False)]
    ends[0].open_rendezvous(rendezvous)
    board = ends[0].board(rendezvous.secret)
    monkeypatch.setattr(links, "RemoteBoard", lambda first, rendezvous: board)
    with ThreadPoolExecutor(2) as pool:
        connecting = [pool.submit(end.connect, rendezvous, i, None) for i, end in enumerate(ends)]
        assert [each.result(WAIT_S) for each in connecting] == [("nccl", "gloo")] * 2
        for way in ("nccl", "gloo"):
            before = gpus.groups[0].wire.done
            serving = pool.submit(ends[1].serve, way, 1)
            hops = ends[0].by_links(way, turns=1)
            serving.result(WAIT_S)
            assert [(hop.way, hop.payload_bytes) for hop in hops] == [
                (way, size) for size in links._payloads(way)
            ]
            moved = gpus.groups[0].wire.done - before
            assert moved == (way == "nccl") * 2 * (1 + links._WARM_UP) * len(hops)
    torch.set_num_threads(threads)


class CopiedBytes(TorchDispatchMode):
    count = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.count += args[1].nbytes
        return function(*args, **(kwargs or {}))


def test_copies_to_a_host_are_timed_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of two, on a clock that shows the bytes until now."""
    monkeypatch.setattr(links, "NCCL_PAYLOADS_BYTES", (4 << 10, 64 << 10))
    threads = torch.get_num_threads()
    with CopiedBytes() as copied:
        monkeypatch.setattr("actors.profiling.links.time.perf_counter", lambda: copied.count)
        found = End(on_gpu=False).by_copies(turns=5)
    torch.set_num_threads(threads)
    assert [(hop.way, hop.payload_bytes, hop.seconds) for hop in found] == [
        ("copy", size, size) for size in (4 << 10, 64 << 10)
    ]
