"""Device orders: which device is which pipeline stage (GetDeviceOrder of LLM-PQ Alg. 1).

Two orders are the same if the devices' kinds agree stage by stage, and so does whether a stage's
node is also that of the next one (and the last one's that of the first, where tokens return): then
every layer, memory and link costs the same. Orders are made stage by stage. Partial orders that
look the same so far are continued together, so that each order is made once and none in vain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import TypeVar

from planner.cluster.device import Device
from planner.search.orders.device_sets import canonical_devices

Placed = TypeVar("Placed")

MOST_COUNTED = 60
"""Most states of partial orders that are gone through to count orders, in hundredths of a second.
"""

KEPT_TREES = 64  # of the sets of devices that a search goes back to


@dataclass(frozen=True)
class Placement:
    """The next stages of an order: `count` equal devices, of one node.

    `joined` says whether that is the node of the stage before.
    """

    kind: int
    count: int
    joined: bool


@dataclass(frozen=True)
class PartialOrder:
    """The first stages of an order, `placed` as (node, kind, count), and the devices `left`.

    `left` holds the (kind, count) pairs of each node.
    """

    left: tuple[tuple[tuple[int, int], ...], ...]
    placed: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every device is placed."""
        return not any(self.left)

    @property
    def latest_kind(self) -> int | None:
        """The kind of the latest stage, if there is one."""
        return self.placed[-1][1] if self.placed else None

    def kinds_left(self) -> Counter[int]:
        """Number of devices left of each kind."""
        kinds = Counter[int]()
        for left in self.left:
            kinds.update(dict(left))
        return kinds

    @property
    def returns_within_node(self) -> bool:
        """Whether the latest stage is on the node of the first."""
        return self.placed[0][0] == self.placed[-1][0]

    @property
    def look(self) -> Hashable:
        """A key that is equal for two partial orders whose next transfers cost the same, too."""
        return self.key, self.latest_kind

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for two partial orders that can be continued in the same ways."""
        first, latest = (self.placed[0][0], self.placed[-1][0]) if self.placed else (None, None)
        nodes = [(left, node == first, node == latest) for node, left in enumerate(self.left)]
        return tuple(sorted(node for node in nodes if any(node)))


@dataclass(frozen=True)
class OrderState:
    """Partial orders that can be continued in the same ways, and these ways.

    `steps` are what may come next, with the number of the state that it gives. Of complete orders
    `returns_within_node` says whether the last stage is on the node of the first.
    """

    look: Hashable
    latest_kind: int | None
    returns_within_node: bool | None
    steps: tuple[tuple[Placement, int], ...]


def order_tree(devices: Sequence[Device], all_orders: bool) -> OrderTree:
    """The tree of all orders of a cluster's devices."""
    return _order_tree(tuple(devices), all_orders)


@lru_cache(maxsize=KEPT_TREES)
def _order_tree(devices: tuple[Device, ...], all_orders: bool) -> OrderTree:
    return OrderTree(devices, lambda d: d.cost_kind, lambda d: d.node, all_orders)


def distinct_orders(devices: Sequence[Device], all_orders: bool) -> Iterator[tuple[Device, ...]]:
    """Yield the orders, one of each pair of end kinds in turn."""
    devices = canonical_devices(devices)
    parts = order_tree(devices, all_orders).by_ends().values()
    for turn in zip_longest(*(part.orders() for part in parts)):
        yield from (tuple(devices[i] for i in order) for order in turn if order is not None)


class OrderTree:
    """All distinct orders of some devices, of kinds 0 to K-1, as a tree of partial orders.

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
        self._by_ends: dict[tuple[int, int], OrderTree] | None = None
        self._orders: int | None = None
        self._example: tuple[int, ...] | None = None
        self._states: tuple[OrderState, ...] | None = None
        self._all_orders = all_orders
        self._members: dict[tuple[int, int], list[int]] = {}
        for index, device in enumerate(devices):
            place = nodes[node_of(device)], self.kind_of_device[index]
            self._members.setdefault(place, []).append(index)
        left: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for (node, kind), members in self._members.items():
            left[node].append((kind, len(members)))
        self.root = PartialOrder(tuple(map(tuple, left)))

    def between(self, first: int, last: int) -> OrderTree | None:
        """The orders whose first and last stage are of these kinds; None if there is none."""
        groups = self._groups(self.root)
        pieces = Counter(kind for kind, count in groups for _ in range(self._pieces(count)))
        wanted = Counter([first] if pieces.total() == 1 and first == last else [first, last])
        if wanted - pieces:
            return None
        tree = copy(self)
        tree._ends, tree._by_ends, tree._states = (first, last), None, None
        tree._orders, tree._example = None, None
        return tree

    def by_ends(self) -> dict[tuple[int, int], OrderTree]:
        """The orders by the kinds of their first and last stage."""
        if self._by_ends is None:
            kinds = range(1 + max(self.kind_of_device))
            pairs = [(first, last) for first in kinds for last in kinds]
            found = {ends: self.between(*ends) for ends in pairs}
            self._by_ends = {ends: tree for ends, tree in found.items() if tree is not None}
        return self._by_ends

    def steps(self, partial: PartialOrder) -> Iterator[tuple[Placement, PartialOrder]]:
        """Yield every placement that may come next, and the partial order that it gives; those on
        the node of the latest stage first.
        """
        latest = partial.placed[-1][0] if partial.placed else None
        first = partial.placed[0][0] if partial.placed else None
        seen = set()
        for node, left in sorted(enumerate(partial.left), key=lambda each: each[0] != latest):
            look = left, node == latest, node == first
            if look in seen:
                continue
            seen.add(look)
            for kind, count in left:
                taken = 1 if self._all_orders else count
                after = self._without(partial, node, kind, taken)
                if self._may_follow(partial, kind, after):
                    yield Placement(kind, taken, node == latest), after

    def states(self) -> tuple[OrderState, ...]:
        """All states of partial orders, each after those that may follow it; the last one is that
        of the root.
        """
        if self._states is None:
            self._states = tuple(self._found_states())
        return self._states

    def _found_states(self) -> list[OrderState]:
        numbers: dict[Hashable, int] = {}
        found: list[OrderState] = []
        waiting = [(self.root, list(self.steps(self.root)))]
        while waiting:  # no recursion: there may be more stages than Python allows calls
            partial, steps = waiting[-1]
            unknown = [each for _, each in steps if each.look not in numbers]
            if unknown:
                waiting += [(each, list(self.steps(each))) for each in unknown]
                continue
            waiting.pop()
            if partial.look in numbers:
                continue
            numbers[partial.look] = len(found)
            returns = partial.returns_within_node if partial.is_complete else None
            following = tuple((placement, numbers[each.look]) for placement, each in steps)
            found.append(OrderState(partial.look, partial.latest_kind, returns, following))
        return found

    def next_placements(
        self, partials: Sequence[PartialOrder]
    ) -> dict[Placement, tuple[PartialOrder, ...]]:
        """Map every next placement of partial orders that look the same to the ones it gives."""
        found: dict[Placement, dict[Hashable, PartialOrder]] = {}
        for partial in partials:
            for placement, after in self.steps(partial):
                found.setdefault(placement, {}).setdefault(after.key, after)
        return {placement: tuple(after.values()) for placement, after in found.items()}

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Yield every distinct order, as indices of the devices in stage order.

        The given order of the groups comes first, with the devices of a node side by side.
        """
        waiting: list[tuple[PartialOrder, ...]] = [(self.root,)]
        while waiting:  # no recursion: there may be more stages than Python allows calls
            partials = waiting.pop()
            if partials[0].is_complete:
                yield from map(self.indices, complete_orders(partials))
            waiting += reversed(self.next_placements(partials).values())

    def example(self) -> tuple[int, ...]:
        """The first of the orders."""
        if self._example is None:
            self._example = next(self.orders())
        return self._example

    def indices(self, whole: PartialOrder) -> tuple[int, ...]:
        """The devices of a complete order, equal ones of a node in ascending order."""
        waiting = {place: iter(indices) for place, indices in self._members.items()}
        return tuple(
            next(waiting[node, kind]) for node, kind, count in whole.placed for _ in range(count)
        )

    def count(self) -> int:
        """Count the distinct orders; at most so many if too many nodes come in several parts."""
        if self._orders is None:
            self._orders = self._counted()
        return self._orders

    def _counted(self) -> int:
        mixed = [left for left in self.root.left if self._places(left) > 1]
        if mixed and self.most_states() <= MOST_COUNTED:
            return self._count((self.root,), {})
        # Stages of one node are told from those of others, and then nodes that are alike are not.
        pieces = Counter(
            (kind, count // self._pieces(count), node if self._places(left) > 1 else -1)
            for node, left in enumerate(self.root.left)
            for kind, count in left
            for _ in range(self._pieces(count))
        )
        alike = Counter(tuple(sorted(left)) for left in mixed)
        return _arrangements(pieces, self._ends) // math.prod(map(math.factorial, alike.values()))

    def most_states(self) -> int:
        """Count the ways in which some of the devices may be placed, at most."""
        alike = Counter(tuple(sorted(left)) for left in self.root.left)
        ways = 1
        for left, nodes in alike.items():
            each = math.prod((count + 1 if self._all_orders else 2) for _, count in left)
            ways *= math.comb(nodes + each - 1, each - 1)
        return ways

    def _count(self, partials: tuple[PartialOrder, ...], known: dict[Hashable, int]) -> int:
        if partials[0].is_complete:
            return len(complete_orders(partials))
        look = frozenset(partial.key for partial in partials)
        if look not in known:
            ways = self.next_placements(partials).values()
            known[look] = sum(self._count(following, known) for following in ways)
        return known[look]

    def _may_follow(self, partial: PartialOrder, kind: int, after: PartialOrder) -> bool:
        """Whether a placement of `kind` respects the ends: one of the last kind stays for last."""
        if self._ends is None:
            return True
        first, last = self._ends
        if not partial.placed and kind != first:
            return False
        left = {kind for kind, _ in self._groups(after)}
        return last in left or (kind == last and not left)

    def _pieces(self, count: int) -> int:
        """Count the placements in which the equal devices of a node come."""
        return count if self._all_orders else 1

    def _places(self, left: Sequence[tuple[int, int]]) -> int:
        """Count the placements in which the devices `left` of a node come."""
        return sum(self._pieces(count) for _, count in left)

    @staticmethod
    def _groups(partial: PartialOrder) -> list[tuple[int, int]]:
        return [group for left in partial.left for group in left]

    @staticmethod
    def _without(partial: PartialOrder, node: int, kind: int, taken: int) -> PartialOrder:
        rest = [(k, count - taken * (k == kind)) for k, count in partial.left[node]]
        left = list(partial.left)
        left[node] = tuple(group for group in rest if group[1])
        return replace(partial, left=tuple(left), placed=(*partial.placed, (node, kind, taken)))


def _arrangements(pieces: Counter[tuple[int, int, int]], ends: tuple[int, int] | None) -> int:
    """Count the distinct sequences of `pieces` (kind first) between ends of two kinds."""
    total = pieces.total()
    every = math.factorial(total) // math.prod(map(math.factorial, pieces.values()))
    if ends is None or total == 1:
        return every
    first, last = (sum(n for (kind, *_), n in pieces.items() if kind == end) for end in ends)
    return every * first * (last - (ends[0] == ends[1])) // (total * (total - 1))


def complete_orders(partials: Sequence[PartialOrder]) -> list[PartialOrder]:
    """Keep one complete order of each way back to the first stage, within its node or not."""
    return list({whole.returns_within_node: whole for whole in partials}.values())
