"""Device orders: which device is which pipeline stage (GetDeviceOrder of LLM-PQ Alg. 1).

Two orders are the same if the devices' kinds agree stage by stage, and so does whether a stage's
node is also that of the next one (and the last one's that of the first, where tokens return): then
every layer, memory and link costs the same. Orders are made stage by stage, and beginnings that
look the same are gone on with together, so that each order is made once and none in vain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import TypeVar

from planner.cluster.device import Device
from planner.search.orders.device_sets import canonical_devices

Placed = TypeVar("Placed")

MOST_COUNTED = 500
"""States of an order's making up to which orders are counted by going through them."""


@dataclass(frozen=True)
class Placement:
    """The next stages of an order: `count` equal devices, of one node.

    `joined` says whether that is the node of the stage before.
    """

    kind: int
    count: int
    joined: bool


@dataclass(frozen=True)
class Beginning:
    """The first stages of an order, `placed` as (node, kind, count), and what is left to place.

    `left` holds the (kind, count) of each node; `first` and `latest` are the nodes of the first and
    the latest stage.
    """

    left: tuple[tuple[tuple[int, int], ...], ...]
    placed: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every device is placed."""
        return not any(self.left)

    @property
    def latest_kind(self) -> int | None:
        """The kind of the latest stage, if there is one."""
        return self.placed[-1][1] if self.placed else None

    def kinds_left(self) -> Counter[int]:
        """How many devices of each kind are left."""
        kinds = Counter[int]()
        for left in self.left:
            kinds.update(dict(left))
        return kinds

    @property
    def returns_within_node(self) -> bool:
        """Whether the latest stage is on the node of the first."""
        return self.placed[0][0] == self.placed[-1][0]

    @cached_property
    def look(self) -> Hashable:
        """Equal for two beginnings that can go on in the same ways."""
        first, latest = (self.placed[0][0], self.placed[-1][0]) if self.placed else (None, None)
        nodes = [(left, node == first, node == latest) for node, left in enumerate(self.left)]
        return tuple(sorted(node for node in nodes if any(node)))


def order_tree(devices: Sequence[Device], all_orders: bool) -> OrderTree:
    """All orders of devices of a cluster."""
    return OrderTree(devices, lambda d: d.cost_kind, lambda d: d.node, all_orders)


def distinct_orders(devices: Sequence[Device], all_orders: bool) -> Iterator[tuple[Device, ...]]:
    """The orders one after the other, of unlike ends first."""
    devices = canonical_devices(devices)
    parts = order_tree(devices, all_orders).by_ends().values()
    for turn in zip_longest(*(part.orders() for part in parts)):
        yield from (tuple(devices[i] for i in order) for order in turn if order is not None)


class OrderTree:
    """All distinct orders of some devices, of kinds 0 to K-1, by their beginnings.

    By default equal devices of one node stay together; with `all_orders` they need not. `kind_of`
    must tell apart all that matters for cost, such as memory or a node's link.
    """

    def __init__(
        self,
        devices: Sequence[Placed],
        kind_of: Callable[[Placed], Hashable],
        node_of: Callable[[Placed], Hashable],
        all_orders: bool = False,
    ) -> None:
        kinds = {kind: index for index, kind in enumerate(dict.fromkeys(map(kind_of, devices)))}
        nodes = {node: index for index, node in enumerate(dict.fromkeys(map(node_of, devices)))}
        self.kind_of_device = tuple(kinds[kind_of(device)] for device in devices)
        self._ends: tuple[int, int] | None = None
        self._all_orders = all_orders
        self._members: dict[tuple[int, int], list[int]] = {}
        for index, device in enumerate(devices):
            place = nodes[node_of(device)], self.kind_of_device[index]
            self._members.setdefault(place, []).append(index)
        left: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for (node, kind), members in self._members.items():
            left[node].append((kind, len(members)))
        self.root = Beginning(tuple(map(tuple, left)))

    def between(self, first: int, last: int) -> OrderTree | None:
        """The orders whose first and last stage are of these kinds; None if there is none."""
        groups = self._groups(self.root)
        pieces = Counter(kind for kind, count in groups for _ in range(self._pieces(count)))
        wanted = Counter([first] if pieces.total() == 1 and first == last else [first, last])
        if wanted - pieces:
            return None
        tree = copy(self)
        tree._ends = first, last
        return tree

    def by_ends(self) -> dict[tuple[int, int], OrderTree]:
        """All orders, by the kinds of their first and last stage."""
        kinds = range(1 + max(self.kind_of_device))
        pairs = [(first, last) for first in kinds for last in kinds]
        found = {ends: self.between(*ends) for ends in pairs}
        return {ends: tree for ends, tree in found.items() if tree is not None}

    def steps(self, beginning: Beginning) -> Iterator[tuple[Placement, Beginning]]:
        """Every placement that may come next, by what it looks like, and where it leads."""
        latest = beginning.placed[-1][0] if beginning.placed else None
        first = beginning.placed[0][0] if beginning.placed else None
        seen = set()
        for node, left in enumerate(beginning.left):
            look = left, node == latest, node == first
            if look in seen:
                continue
            seen.add(look)
            for kind, count in left:
                taken = 1 if self._all_orders else count
                after = self._without(beginning, node, kind, taken)
                if self._may_follow(beginning, kind, after):
                    yield Placement(kind, taken, node == latest), after

    def ways_on(self, beginnings: Sequence[Beginning]) -> dict[Placement, tuple[Beginning, ...]]:
        """Every next placement after beginnings that look the same so far, with all it leads to."""
        found: dict[Placement, dict[Hashable, Beginning]] = {}
        for beginning in beginnings:
            for placement, after in self.steps(beginning):
                found.setdefault(placement, {}).setdefault(after.look, after)
        return {placement: tuple(after.values()) for placement, after in found.items()}

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Every distinct order, as indices of the devices in stage order; lazy, the given order's
        groups first."""
        yield from self._orders_after((self.root,))

    def indices(self, whole: Beginning) -> tuple[int, ...]:
        """The devices of an order, equal ones of a node in ascending order."""
        waiting = {place: iter(indices) for place, indices in self._members.items()}
        return tuple(
            next(waiting[node, kind]) for node, kind, count in whole.placed for _ in range(count)
        )

    def count(self) -> int:
        """How many distinct orders there are; if nodes that mix kinds are too many, at most."""
        mixed = self._all_orders or any(len(left) > 1 for left in self.root.left)
        if mixed and self.most_states() <= MOST_COUNTED:
            return self._count((self.root,), {})
        pieces = Counter(
            (kind, 1, node) if self._all_orders else (kind, count, 0)
            for node, left in enumerate(self.root.left)
            for kind, count in left
            for _ in range(self._pieces(count))
        )
        return _arrangements(pieces, self._ends)

    def most_states(self) -> int:
        """In how many ways some of the devices may be placed, at most."""
        alike = Counter(tuple(sorted(left)) for left in self.root.left)
        ways = 1
        for left, nodes in alike.items():
            each = math.prod((count + 1 if self._all_orders else 2) for _, count in left)
            ways *= math.comb(nodes + each - 1, each - 1)
        return ways

    def _orders_after(self, beginnings: tuple[Beginning, ...]) -> Iterator[tuple[int, ...]]:
        if beginnings[0].is_whole:
            for whole in whole_orders(beginnings):
                yield self.indices(whole)
        for following in self.ways_on(beginnings).values():
            yield from self._orders_after(following)

    def _count(self, beginnings: tuple[Beginning, ...], known: dict[Hashable, int]) -> int:
        if beginnings[0].is_whole:
            return len(whole_orders(beginnings))
        look = frozenset(beginning.look for beginning in beginnings)
        if look not in known:
            ways = self.ways_on(beginnings).values()
            known[look] = sum(self._count(following, known) for following in ways)
        return known[look]

    def _may_follow(self, beginning: Beginning, kind: int, after: Beginning) -> bool:
        """Whether a placement of `kind` keeps the ends: the last one's kind is left to the last."""
        if self._ends is None:
            return True
        first, last = self._ends
        if not beginning.placed and kind != first:
            return False
        left = {kind for kind, _ in self._groups(after)}
        return last in left or (kind == last and not left)

    def _pieces(self, count: int) -> int:
        """In how many placements the equal devices of a node come."""
        return count if self._all_orders else 1

    @staticmethod
    def _groups(beginning: Beginning) -> list[tuple[int, int]]:
        return [group for left in beginning.left for group in left]

    @staticmethod
    def _without(beginning: Beginning, node: int, kind: int, taken: int) -> Beginning:
        rest = [(k, count - taken * (k == kind)) for k, count in beginning.left[node]]
        left = list(beginning.left)
        left[node] = tuple(group for group in rest if group[1])
        return replace(beginning, left=tuple(left), placed=(*beginning.placed, (node, kind, taken)))


def _arrangements(pieces: Counter[tuple[int, int, int]], ends: tuple[int, int] | None) -> int:
    """Distinct sequences of `pieces`, which begin with their kind, between ends of two kinds."""
    if ends is None:
        return math.factorial(pieces.total()) // math.prod(map(math.factorial, pieces.values()))
    if pieces.total() == 1:
        return 1
    total = 0
    for first in [piece for piece in pieces if piece[0] == ends[0]]:
        others = pieces - Counter([first])
        for last in [piece for piece in others if piece[0] == ends[1]]:
            total += _arrangements(others - Counter([last]), None)
    return total


def whole_orders(beginnings: Sequence[Beginning]) -> list[Beginning]:
    """The distinct ones of finished orders: the way back to the first stage may differ."""
    return list({whole.returns_within_node: whole for whole in beginnings}.values())
