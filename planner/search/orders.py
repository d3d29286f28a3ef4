"""Device orders: which device is which pipeline stage (GetDeviceOrder of LLM-PQ Alg. 1). Orders are
the same if kinds agree stage by stage, and whether the next stage is on the same node (the first
after the last). Partial orders that look the same are continued together, so that each order is
made once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby
from typing import TypeVar

from planner.cluster.device import Device

AnyDevice = TypeVar("AnyDevice")

MOST_COUNTED = 60
"""Most states of partial orders that are gone through to count orders, in hundredths of a second.
"""

KEPT_TREES = 64  # of the sets of devices that a search goes back to


def canonical_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Sort devices so that the order of equal nodes makes no difference."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    ordered = [sorted(node, key=lambda d: (repr(d.cost_kind), d.index)) for node in nodes.values()]
    ordered.sort(key=lambda node: [repr(device.cost_kind) for device in node])
    return tuple(chain.from_iterable(ordered))


def distinct_sets(sets: Iterable[Sequence[Device]]) -> list[tuple[Device, ...]]:
    """The sets in canonical order; of those that cost the same only the first."""
    found: dict[Hashable, tuple[Device, ...]] = {}
    for devices in map(canonical_devices, sets):
        found.setdefault(cost_key(devices), devices)
    return list(found.values())


def cost_key(devices: Sequence[Device]) -> Hashable:
    """A key that is equal for sets of devices that cost the same, given in canonical order."""
    by_node = groupby(devices, key=lambda device: device.node)
    return tuple(tuple(device.cost_kind for device in node) for _, node in by_node)


@dataclass(frozen=True)
class NextStages:
    """The next `count` equal devices of one node; `joined`: that of the stage before."""

    kind: int
    count: int
    joined: bool


@dataclass(frozen=True)
class PartialOrder:
    """The first stages, `placed` as (node, kind, count), and (kind, count) `left` of each node."""

    left: tuple[tuple[tuple[int, int], ...], ...]
    placed: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_complete(self) -> bool:
        return not any(self.left)

    @property
    def latest_kind(self) -> int | None:
        return self.placed[-1][1] if self.placed else None

    @property
    def groups_left(self) -> list[tuple[int, int]]:
        return [group for left in self.left for group in left]

    def kinds_left(self) -> Counter[int]:
        kinds = Counter[int]()
        for left in self.left:
            kinds.update(dict(left))
        return kinds

    @property
    def returns_within_node(self) -> bool:
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
    """Partial orders that continue alike; `steps` has the number of the state each gives."""

    look: Hashable
    latest_kind: int | None
    returns_within_node: bool | None
    steps: tuple[tuple[NextStages, int], ...]


@lru_cache(maxsize=KEPT_TREES)
def order_tree(devices: tuple[Device, ...], all_orders: bool) -> OrderTree:
    return OrderTree.of(devices, lambda d: d.cost_kind, lambda d: d.node, all_orders)


@dataclass(frozen=True, eq=False)
class OrderTree:
    """All distinct orders of some devices, of kinds 0 to K-1. Equal devices of one node stay
    together unless `all_orders`; with `ends` first and last stage are of these kinds. `members`:
    indices of the devices by node and kind.
    """

    kind_of_device: tuple[int, ...]
    members: dict[tuple[int, int], list[int]]
    root: PartialOrder
    all_orders: bool
    ends: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        devices: Sequence[AnyDevice],
        kind_of: Callable[[AnyDevice], Hashable],
        node_of: Callable[[AnyDevice], Hashable],
        all_orders: bool = False,
    ) -> OrderTree:
        """The tree of all orders; `kind_of` must tell apart all that matters for cost."""
        kinds = {kind: index for index, kind in enumerate(dict.fromkeys(map(kind_of, devices)))}
        nodes = {node: index for index, node in enumerate(dict.fromkeys(map(node_of, devices)))}
        kind_of_device = tuple(kinds[kind_of(device)] for device in devices)
        members: dict[tuple[int, int], list[int]] = {}
        for index, device in enumerate(devices):
            members.setdefault((nodes[node_of(device)], kind_of_device[index]), []).append(index)
        left: list[list[tuple[int, int]]] = [[] for _ in nodes]
        for (node, kind), indices in members.items():
            left[node].append((kind, len(indices)))
        return cls(kind_of_device, members, PartialOrder(tuple(map(tuple, left))), all_orders)

    @cached_property
    def by_ends(self) -> dict[tuple[int, int], OrderTree]:
        groups = self.root.groups_left
        pieces = Counter(kind for kind, count in groups for _ in range(self._pieces(count)))
        kinds, found = range(1 + max(self.kind_of_device)), {}
        for ends in [(first, last) for first in kinds for last in kinds]:
            is_one = pieces.total() == 1 and ends[0] == ends[1]
            if not Counter(ends[:1] if is_one else ends) - pieces:
                found[ends] = replace(self, ends=ends)
        return found

    def steps(self, partial: PartialOrder) -> Iterator[tuple[NextStages, PartialOrder]]:
        """Yield all stages that may come next, the latest node's first, and what they give."""
        latest = partial.placed[-1][0] if partial.placed else None
        first = partial.placed[0][0] if partial.placed else None
        seen = set()
        for node, left in sorted(enumerate(partial.left), key=lambda each: each[0] != latest):
            look = left, node == latest, node == first
            if look in seen:
                continue
            seen.add(look)
            for kind, count in left:
                taken = 1 if self.all_orders else count
                after = _without(partial, node, kind, taken)
                if self._may_follow(partial, kind, after):
                    yield NextStages(kind, taken, node == latest), after

    @cached_property
    def states(self) -> list[OrderState]:
        """All states of partial orders, each after those that may follow it; the root's is last."""
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
            following = tuple((stages, numbers[each.look]) for stages, each in steps)
            found.append(OrderState(partial.look, partial.latest_kind, returns, following))
        return found

    def next_stages(
        self, partials: Sequence[PartialOrder]
    ) -> dict[NextStages, tuple[PartialOrder, ...]]:
        """Map all next stages of partial orders that look the same to the ones they give."""
        found: dict[NextStages, dict[Hashable, PartialOrder]] = {}
        for partial in partials:
            for stages, after in self.steps(partial):
                found.setdefault(stages, {}).setdefault(after.key, after)
        return {stages: tuple(after.values()) for stages, after in found.items()}

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Yield every distinct order as indices of devices; the given one, nodes joined, first."""
        waiting: list[tuple[PartialOrder, ...]] = [(self.root,)]
        while waiting:  # no recursion: there may be more stages than Python allows calls
            partials = waiting.pop()
            if partials[0].is_complete:
                yield from map(self.indices, complete_orders(partials))
            waiting += reversed(self.next_stages(partials).values())

    @cached_property
    def example(self) -> tuple[int, ...]:
        return next(self.orders())

    def indices(self, whole: PartialOrder) -> tuple[int, ...]:
        """The devices of a complete order, equal ones of a node in ascending order."""
        waiting = {place: iter(indices) for place, indices in self.members.items()}
        return tuple(
            next(waiting[node, kind]) for node, kind, count in whole.placed for _ in range(count)
        )

    @cached_property
    def count(self) -> int:
        """Number of distinct orders; at most so many if too many nodes come in several parts."""
        mixed = [left for left in self.root.left if self._places(left) > 1]
        if mixed and self.most_states <= MOST_COUNTED:
            return self._count((self.root,), {})
        # Stages of one node are told from those of others, and then nodes that are alike are not.
        pieces = Counter(
            (kind, count // self._pieces(count), node if self._places(left) > 1 else -1)
            for node, left in enumerate(self.root.left)
            for kind, count in left
            for _ in range(self._pieces(count))
        )
        alike = Counter(tuple(sorted(left)) for left in mixed)
        return _arrangements(pieces, self.ends) // math.prod(map(math.factorial, alike.values()))

    @property
    def most_states(self) -> int:
        """Number of ways in which some of the devices may be placed, at most."""
        alike = Counter(tuple(sorted(left)) for left in self.root.left)
        ways = 1
        for left, nodes in alike.items():
            each = math.prod((count + 1 if self.all_orders else 2) for _, count in left)
            ways *= math.comb(nodes + each - 1, each - 1)
        return ways

    def _count(self, partials: tuple[PartialOrder, ...], known: dict[Hashable, int]) -> int:
        if partials[0].is_complete:
            return len(complete_orders(partials))
        look = frozenset(partial.key for partial in partials)
        if look not in known:
            ways = self.next_stages(partials).values()
            known[look] = sum(self._count(following, known) for following in ways)
        return known[look]

    def _may_follow(self, partial: PartialOrder, kind: int, after: PartialOrder) -> bool:
        if self.ends is None:
            return True
        first, last = self.ends
        if not partial.placed and kind != first:
            return False
        left = {kind for kind, _ in after.groups_left}
        return last in left or (kind == last and not left)

    def _pieces(self, count: int) -> int:
        """Count the steps in which the equal devices of a node come."""
        return count if self.all_orders else 1

    def _places(self, left: Sequence[tuple[int, int]]) -> int:
        return sum(self._pieces(count) for _, count in left)


def _without(partial: PartialOrder, node: int, kind: int, taken: int) -> PartialOrder:
    rest = [(k, count - taken * (k == kind)) for k, count in partial.left[node]]
    left = list(partial.left)
    left[node] = tuple(group for group in rest if group[1])
    return PartialOrder(tuple(left), (*partial.placed, (node, kind, taken)))


def _arrangements(pieces: Counter[tuple[int, int, int]], ends: tuple[int, int] | None) -> int:
    total = pieces.total()
    every = math.factorial(total) // math.prod(map(math.factorial, pieces.values()))
    if ends is None or total == 1:
        return every
    first, last = (sum(n for (kind, *_), n in pieces.items() if kind == end) for end in ends)
    return every * first * (last - (ends[0] == ends[1])) // (total * (total - 1))


def complete_orders(partials: Sequence[PartialOrder]) -> list[PartialOrder]:
    """Keep one complete order of each way back to the first stage, within its node or not."""
    return list({whole.returns_within_node: whole for whole in partials}.values())
