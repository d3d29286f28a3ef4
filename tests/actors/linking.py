"""Ends of links that meet, as threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from actors.transport.gloo_links import Links, LocalBoard, Rendezvous

HOST = "192.0.2.7"  # of no machine (RFC 5737): ends on one node do not listen there


def meet(ends: int, rendezvous: Rendezvous | None = None) -> list[Links]:
    rendezvous = rendezvous or Rendezvous((HOST,) * ends, 20.0)
    board = LocalBoard(ends)
    with ThreadPoolExecutor(ends) as pool:
        return list(pool.map(lambda index: Links(rendezvous, index, board), range(ends)))
