"""Ends of links that meet, as threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from actors.transport.gloo_links import Links
from actors.transport.rendezvous import Board, LocalBoard, Meeting

HOST = "192.0.2.7"  # of no machine (RFC 5737): ends on one node do not listen there


def meet(ends: int, board: Board | None = None, meeting: Meeting | None = None) -> list[Links]:
    meeting = meeting or Meeting((HOST,) * ends, 20.0)
    board = board or LocalBoard(ends)
    with ThreadPoolExecutor(ends) as pool:
        return list(pool.map(lambda index: Links(meeting, index, board), range(ends)))
