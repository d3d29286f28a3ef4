"""Make-ups of a pipeline: how many devices of which kind, in blocks that lie on one node each;
without names, as a cluster of hundreds of devices has few kinds and sizes of nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from planner.cluster.device import Device
from planner.cluster.groups import equal_devices, group_of
from planner.cluster.spec import ClusterSpec

FALLING = 0.97
"""Share of the most tokens per second and device below which no larger make-up is tried."""

USUAL_DEVICES = 16
"""Most devices of a pipeline that is not the whole cluster's, or its share of one of few; where a
model needs so many, twice the fewest that hold it."""

MOST_SHARE = 32
"""Devices of a share of the whole cluster that is priced, beside smaller make-ups."""

FEW = (2, 1, 3, 4)
"""Numbers of pipelines for which the cluster is divided evenly, the most promising first."""


@dataclass(frozen=True)
class NodeBlock:
    """Equal devices of one node: `size` of kind number `kind`, in groups of `degree` ranks."""

    kind: int
    size: int
    degree: int = 1


MakeUp = tuple[NodeBlock, ...]


@dataclass(frozen=True)
class DevicePool:
    kind: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, eq=False)
class Pools:
    """All devices by node and kind, an example of each; whole groups of `degree` in pools."""

    kinds: tuple[Device, ...]
    pools: tuple[DevicePool, ...]
    degree: int = 1

    @classmethod
    def of(cls, cluster: ClusterSpec, degree: int = 1) -> Pools:
        numbers: dict[Hashable, int] = {}
        kinds: list[Device] = []
        pools = []
        for every in equal_devices(cluster):
            devices = every[: len(every) // degree * degree]
            if not devices:
                continue
            kind = devices[0].cost_kind
            if kind not in numbers:
                numbers[kind] = len(kinds)
                kinds.append(devices[0])
            pools.append(DevicePool(numbers[kind], devices))
        return cls(tuple(kinds), tuple(pools), degree)

    def counts(self) -> Counter[tuple[int, int]]:
        return Counter((pool.kind, len(pool.devices)) for pool in self.pools)

    def devices_of(self, kind: int) -> int:
        return sum(len(pool.devices) for pool in self.pools if pool.kind == kind)

    def largest(self, kind: int) -> int:
        return max(len(pool.devices) for pool in self.pools if pool.kind == kind)

    def in_groups(self, count: int) -> int:
        return -(-count // self.degree) * self.degree

    def blocks(self, kind: int, count: int) -> MakeUp:
        most = self.largest(kind)
        whole, rest = divmod(self.in_groups(count), most)
        last = (NodeBlock(kind, rest, self.degree),) if rest else ()
        return (NodeBlock(kind, most, self.degree),) * whole + last


def example_devices(
    make_up: MakeUp, kinds: Sequence[Device] | Mapping[int, Device]
) -> tuple[Device, ...]:
    found: list[Device] = []
    for number, block in enumerate(make_up):
        kind = replace(kinds[block.kind], node=str(number))
        devices = [replace(kind, index=each) for each in range(block.size)]
        firsts = range(0, block.size, block.degree)
        found += [group_of(devices[first : first + block.degree]) for first in firsts]
    return tuple(found)


def make_ups(
    pools: Pools,
    fastest: Sequence[int],
    number: int | None,
    fits: Callable[[MakeUp], bool],
    speed: Callable[[MakeUp], float],
) -> Iterator[MakeUp]:
    """Yield make-ups to price, most promising first: each kind alone, even shares of the cluster,
    then mixtures of two kinds. `fits`: whether the model does; `speed`: tokens per second of one
    that was yielded, 0 for none.
    """
    least = {kind: least_devices(pools, kind, fits) for kind in range(len(pools.kinds))}
    most = most_devices(pools, least)
    held = any(count <= pools.devices_of(kind) for kind, count in least.items())
    numbers = _numbers(pools, held) if number is None else (number,)
    phases = (
        [single_kind(pools, kind, least[kind], speed) for kind in fastest if least[kind] <= most],
        [even_shares(pools, numbers, fastest)],
        [mixed_kinds(pools, kind, least) for kind in fastest],
    )
    for phase in phases:
        for turn in zip_longest(*phase):
            yield from filter(None, turn)


def _numbers(pools: Pools, has_smaller: bool) -> Sequence[int]:
    """Numbers of even divisions: those with small shares, if the model has smaller make-ups."""
    devices = sum(len(pool.devices) for pool in pools.pools)
    return [each for each in FEW if devices <= MOST_SHARE * each or not has_smaller]


def least_devices(pools: Pools, kind: int, fits: Callable[[MakeUp], bool]) -> int:
    """The fewest devices of a kind that hold the model; more than there are where none do."""
    most = pools.devices_of(kind)
    unfit, count = 0, 1
    while count <= most and not fits(pools.blocks(kind, count)):
        unfit, count = count, min(2 * count, max(most, count + 1))
    between = range(unfit + 1, count)
    held = bisect_left(between, True, key=lambda each: fits(pools.blocks(kind, each)))
    return pools.in_groups(unfit + 1 + held)


def single_kind(
    pools: Pools, kind: int, least: int, speed: Callable[[MakeUp], float]
) -> Iterator[MakeUp]:
    """Yield make-ups of one kind: doubled while speed grows, then sizes around the best."""
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
    for size in (-(-best // node) * node, best + pools.degree, pools.in_groups(best * 3 // 2)):
        if size not in each and least <= size <= most:
            yield pools.blocks(kind, size)


def most_devices(pools: Pools, least: Mapping[int, int]) -> int:
    held = [count for kind, count in least.items() if count <= pools.devices_of(kind)]
    return max(USUAL_DEVICES, 2 * min(held, default=0))


def mixed_kinds(pools: Pools, one: int, least: Mapping[int, int]) -> Iterator[MakeUp]:
    most = most_devices(pools, least)
    for other in range(one + 1, len(pools.kinds)):
        for share in (0.5, 0.25, 0.75):
            first = pools.in_groups(max(1, round(share * least[one])))
            second = max(1, -int(-(1 - first / least[one]) * least[other] // 1))
            second = pools.in_groups(second)
            fits = first <= pools.devices_of(one) and second <= pools.devices_of(other)
            if fits and first + second <= most:
                yield (*pools.blocks(one, first), *pools.blocks(other, second))


def even_shares(pools: Pools, numbers: Sequence[int], fastest: Sequence[int]) -> Iterator[MakeUp]:
    """Yield equal shares of all kinds, then without the slowest, at last of each kind alone."""

    def share(kind: int, number: int) -> int:
        return pools.devices_of(kind) // (number * pools.degree) * pools.degree

    for count in range(len(fastest), 1, -1):
        for number in numbers:
            shares = [(kind, share(kind, number)) for kind in fastest[:count]]
            if all(size for _, size in shares):
                yield tuple(block for kind, size in shares for block in pools.blocks(kind, size))
    for kind in fastest:
        for number in numbers:
            if size := share(kind, number):
                yield pools.blocks(kind, size)


def grouped_make_ups(make_up: MakeUp, degrees: Sequence[int]) -> Iterator[MakeUp]:
    for degree in degrees:
        if degree > 1 and any(block.size % degree == 0 for block in make_up):
            yield tuple(
                replace(block, degree=degree) if block.size % degree == 0 else block
                for block in make_up
            )
