"""Hops between two GPUs, with a pretend NCCL; those of CPUs are measured in tests/llmpq/profile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.profiling import links
from actors.profiling.links import End
from actors.transport.rendezvous import Rendezvous
from tests.actors.pretend_nccl import PretendGpus


def test_hops_between_gpus_are_timed_over_nccl_and_over_gloo(
    gpus: PretendGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "NCCL_PAYLOADS_BYTES", (4 << 10, 1 << 20))
    threads, rendezvous = torch.get_num_threads(), Rendezvous(("here",) * 2, 20.0, nccl=True)
    ends = [End(on_gpu=False), End(on_gpu=False)]
    ends[0].open_rendezvous(rendezvous)
    board = ends[0].board(rendezvous.secret)
    monkeypatch.setattr(links, "RemoteBoard", lambda first, rendezvous: board)
    with ThreadPoolExecutor(2) as pool:
        connecting = [pool.submit(end.connect, rendezvous, i, None) for i, end in enumerate(ends)]
        assert [each.result(20) for each in connecting] == [("nccl", "gloo")] * 2
        for way in ("nccl", "gloo"):
            before = gpus.groups[0].wire.done
            serving = pool.submit(ends[1].serve, way, 1)
            hops = ends[0].by_links(way, turns=1)
            serving.result(20)
            assert [(hop.way, hop.payload_bytes) for hop in hops] == [
                (way, size) for size in links._payloads(way)
            ]
            moved = gpus.groups[0].wire.done - before
            assert moved == (way == "nccl") * 2 * (1 + links._WARM_UP) * len(hops)
    torch.set_num_threads(threads)


def test_copies_to_a_host_are_timed_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "NCCL_PAYLOADS_BYTES", (4 << 10, 8 << 20))
    threads = torch.get_num_threads()
    small, large = End(on_gpu=False).by_copies(turns=5)
    torch.set_num_threads(threads)
    assert (small.way, small.payload_bytes, large.payload_bytes) == ("copy", 4 << 10, 8 << 20)
    assert large.seconds > 5 * small.seconds > 0
