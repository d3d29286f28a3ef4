"""Make-ups of a pipeline: how many devices of which kind, in blocks that lie on one node each.

A cluster of hundreds of devices has few kinds of them, and nodes with few numbers of each. So a
pipeline is described without names: two nodes' worth of four T4, or one V100 with two T4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.cluster.groups import equal_devices, group_of
from planner.cluster.spec import ClusterSpec

FALLING = 0.97
"""Share of the most tokens per second and device below which no larger make-up is tried."""

MOST_DEVICES = 16
"""Devices of a pipeline that is not the whole cluster's, or its share of one of few."""


@dataclass(frozen=True)
class Block:
    """Equal devices of one node: `size` of kind number `kind`, in groups of `degree` ranks."""

    kind: int
    size: int
    degree: int = 1


MakeUp = tuple[Block, ...]


@dataclass(frozen=True)
class Pool:
    """The devices of one kind on one node."""

    kind: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, eq=False)
class Pools:
    """All devices of a cluster by node and kind; `kinds` has an example of each kind."""

    kinds: tuple[Device, ...]
    pools: tuple[Pool, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Pools:
        """The pools of a cluster, kinds in the order in which it names them."""
        numbers: dict[Hashable, int] = {}
        kinds: list[Device] = []
        pools = []
        for devices in equal_devices(cluster):
            kind = devices[0].cost_kind
            if kind not in numbers:
                numbers[kind] = len(kinds)
                kinds.append(devices[0])
            pools.append(Pool(numbers[kind], devices))
        return cls(tuple(kinds), tuple(pools))

    def counts(self) -> Counter[tuple[int, int]]:
        """Number of pools by kind and size."""
        return Counter((pool.kind, len(pool.devices)) for pool in self.pools)

    def devices_of(self, kind: int) -> int:
        """Number of devices of a kind."""
        return sum(len(pool.devices) for pool in self.pools if pool.kind == kind)

    def largest(self, kind: int) -> int:
        """Devices of a kind on the node that has most of them."""
        return max(len(pool.devices) for pool in self.pools if pool.kind == kind)

    def blocks(self, kind: int, count: int) -> MakeUp:
        """`count` devices of a kind in blocks as large as its nodes allow."""
        most = self.largest(kind)
        whole, rest = divmod(count, most)
        return (Block(kind, most),) * whole + ((Block(kind, rest),) if rest else ())


def example_devices(
    make_up: MakeUp, kinds: Sequence[Device] | Mapping[int, Device]
) -> tuple[Device, ...]:
    """Devices of this make-up on nodes of their own, named by the number of their block."""
    found: list[Device] = []
    for number, block in enumerate(make_up):
        kind = replace(kinds[block.kind], node=str(number))
        found += block_devices(block, [replace(kind, index=each) for each in range(block.size)])
    return tuple(found)


def block_devices(block: Block, devices: Sequence[Device]) -> list[Device]:
    """The devices of a block in groups of its degree."""
    degree = block.degree
    return [group_of(devices[first : first + degree]) for first in range(0, block.size, degree)]


def single_kind(
    pools: Pools, kind: int, least: int, speed: Callable[[MakeUp], float]
) -> Iterator[MakeUp]:
    """Yield make-ups of one kind: from the fewest devices that hold the model on ever twice as
    many, while tokens per second grow with the devices; then sizes around the best.

    `speed`: tokens per second of a make-up that was yielded, 0 where it has none.
    """
    most, node = pools.devices_of(kind), pools.largest(kind)
    each: dict[int, float] = {}
    size = least
    while size <= most:
        yield (make_up := pools.blocks(kind, size))
        each[size] = speed(make_up) / size
        if each[size] < FALLING * max(each.values()) or size == most:
            break
        size = min(most, -(-2 * size // node) * node if size >= node else 2 * size)
    best = max(each, key=lambda size: each[size], default=least)
    for size in (-(-best // node) * node, best + 1, best * 3 // 2):
        if size not in each and least <= size <= most:
            yield pools.blocks(kind, size)


def mixed_kinds(pools: Pools, one: int, least: Mapping[int, int]) -> Iterator[MakeUp]:
    """Yield make-ups of kind `one` with a later one: about the shares that hold the model together.

    `least`: devices of a kind that hold the model alone.
    """
    for other in range(one + 1, len(pools.kinds)):
        for share in (0.5, 0.25, 0.75):
            first = max(1, round(share * least[one]))
            second = max(1, -int(-(1 - first / least[one]) * least[other] // 1))
            fits = first <= pools.devices_of(one) and second <= pools.devices_of(other)
            if fits and first + second <= MOST_DEVICES:
                yield (*pools.blocks(one, first), *pools.blocks(other, second))


def even_shares(pools: Pools, numbers: Sequence[int], fastest: Sequence[int]) -> Iterator[MakeUp]:
    """Yield what each of these `numbers` of equal pipelines has: of all kinds, then without the
    slowest ones, at last of each kind alone. `fastest` orders the kinds.
    """
    for count in range(len(fastest), 1, -1):
        for number in numbers:
            shares = [(kind, pools.devices_of(kind) // number) for kind in fastest[:count]]
            if all(share for _, share in shares):
                yield tuple(block for kind, share in shares for block in pools.blocks(kind, share))
    for kind in fastest:
        for number in numbers:
            if share := pools.devices_of(kind) // number:
                yield pools.blocks(kind, share)


def grouped_make_ups(make_up: MakeUp, degrees: Sequence[int]) -> Iterator[MakeUp]:
    """Yield the make-up with its blocks in groups of each of these degrees that divides some."""
    for degree in degrees:
        if degree > 1 and any(block.size % degree == 0 for block in make_up):
            yield tuple(
                replace(block, degree=degree) if block.size % degree == 0 else block
                for block in make_up
            )
