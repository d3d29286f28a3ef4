"""Which devices each pipeline of a fleet gets: blocks that were cut are handed to make-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.fleet.makeups import MakeUp, Pools
from planner.fleet.master import Cut, Division


@dataclass(frozen=True, eq=False)
class Placed:
    """A pipeline with the devices of each of its blocks; `column` is the number of its make-up."""

    column: int
    blocks: tuple[tuple[Device, ...], ...]


def place(division: Division, make_ups: Sequence[MakeUp], pools: Pools) -> list[Placed]:
    """The devices of every pipeline. Blocks of one pipeline are taken from one node if one has
    them.
    """
    free = _free_blocks(division, pools)
    placed = []
    for column, count in enumerate(division.counts):
        for _ in range(count):
            blocks: list[tuple[Device, ...]] = []
            for block in make_ups[column]:
                nodes = {devices[0].node for devices in blocks}
                left = free[block.kind, block.size]
                near = next((b for b in left if b[0].node in nodes), left[0])
                left.remove(near)
                blocks.append(near)
            placed.append(Placed(column, tuple(blocks)))
    return placed


def _free_blocks(
    division: Division, pools: Pools
) -> dict[tuple[int, int], list[tuple[Device, ...]]]:
    """The blocks that the nodes are cut into, by kind and size, in the order of the nodes."""
    waiting: dict[tuple[int, int], list[Cut]] = {
        pool: [cut for cut, count in cuts for _ in range(count)]
        for pool, cuts in division.cuts.items()
    }
    free: dict[tuple[int, int], list[tuple[Device, ...]]] = {}
    for pool in pools.pools:
        cuts = waiting.get((pool.kind, len(pool.devices)), [])
        first = 0
        for size in cuts.pop(0) if cuts else ():
            block = pool.devices[first : first + size]
            free.setdefault((pool.kind, size), []).append(block)
            first += size
    return free
