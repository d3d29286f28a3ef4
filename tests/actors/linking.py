"""Ends of links that meet, as threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from actors.transport.gloo_links import Links, LocalBoard
from actors.transport.nccl_links import NcclLinks
from actors.transport.rendezvous import Rendezvous

HOST = "192.0.2.7"  # of no machine (RFC 5737): ends on one node do not listen there

GPU, CPU = "cpu", "meta"  # types of devices that stand for them, with a pretend NCCL


def meet(ends: int, rendezvous: Rendezvous | None = None) -> list[Links]:
    rendezvous = rendezvous or Rendezvous((HOST,) * ends, 20.0)
    board = LocalBoard(ends)
    with ThreadPoolExecutor(ends) as pool:
        return list(pool.map(lambda index: Links(rendezvous, index, board), range(ends)))


def meet_on_gpus(
    devices: Sequence[str], hosts: Sequence[str] = (), nccl: bool = True
) -> list[NcclLinks]:
    """Ends with these kinds of devices, on one node unless their `hosts` are given."""
    board = LocalBoard(len(devices))
    rendezvous = Rendezvous(tuple(hosts) or (HOST,) * len(devices), 20.0, nccl=nccl)

    def end(index: int) -> NcclLinks:
        return NcclLinks(rendezvous, index, board, torch.device(devices[index]))

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(end, range(len(devices))))
