"""Lower bounds on all device orders that start with the same stages, by any prices for what couples
stages (`planner.optimiser.prices`). The least cost of the stages still to be placed is found
backwards, once for each set of devices left, so the best order is found without going through the
others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.optimiser.prices import PricedStages, boundary
from planner.optimiser.problem import FloatArray
from planner.search.orders import NextStages, OrderTree, PartialOrder, complete_orders

MOST_STATES = 2_000
"""Most sets of devices that may be left (nodes that look alike counted once) for which the cost of
the following stages is computed exactly; a thousand take a tenth of a second."""


@dataclass(frozen=True, eq=False)
class PricedOrders:
    """The orders of `tree` between `ends` at some prices; `first`, `last` and `between` (by kind)
    are rows of `stages`. `hop_s` [K, K, 2]: prices by sender, receiver and whether they share a
    node; `return_s` [2]: of the way back.
    """

    tree: OrderTree
    ends: tuple[int, int]
    stages: PricedStages
    first: int
    last: int
    between: dict[int, int]
    hop_s: FloatArray
    return_s: FloatArray

    @property
    def layers(self) -> int:
        return int(self.stages.running.shape[1]) - 1

    def rows(self, stages: NextStages, begins: bool, ends: bool) -> list[tuple[int, bool]]:
        """The row of each of some stages, and whether it is the first or the last of all."""
        if begins and ends and stages.count == 1:
            return [(self.first, True)]
        at_start = [(self.first, True)] if begins else []
        at_end = [(self.last, True)] if ends else []
        inner = stages.count - len(at_start) - len(at_end)
        return at_start + [(self.between[stages.kind], False) for _ in range(inner)] + at_end

    def transfers_s(self, latest: int | None, stages: NextStages) -> float:
        within = (stages.count - 1) * float(self.hop_s[stages.kind, stages.kind, 1])
        if latest is None:
            return within
        return within + float(self.hop_s[latest, stages.kind, int(stages.joined)])

    def rough_after(self, partial: PartialOrder) -> FloatArray:
        """A bound on the price [L+1] of stages to come: layers and transfers where cheapest."""
        each = self.stages.each.min(axis=0)
        layers: FloatArray = np.append(each[::-1].cumsum()[::-1], 0.0)
        rows = list(self._rows_after(partial))
        return layers + float(self.stages.fixed[rows].sum()) + self._least_transfers_s(partial)

    def _rows_after(self, partial: PartialOrder) -> Iterator[int]:
        kinds = partial.kinds_left()
        if not partial.placed:
            yield self.first
            kinds[self.ends[0]] -= 1
        if kinds.total():
            yield self.last
            kinds[self.ends[1]] -= 1
        for kind, count in kinds.items():
            yield from itertools.repeat(self.between[kind], count) if count else ()

    def _least_transfers_s(self, partial: PartialOrder) -> float:
        senders = partial.kinds_left()
        senders[self.ends[1]] -= 1
        if (latest := partial.latest_kind) is not None:
            senders[latest] += 1
        cheapest = self.hop_s.min(axis=(1, 2))
        onward_s = sum(count * float(cheapest[kind]) for kind, count in senders.items())
        return onward_s + float(self.return_s.min())


class _PricedPartial(NamedTuple):
    """Partial orders that look the same, and the least price [L+1] of their stages by boundary."""

    partials: tuple[PartialOrder, ...]
    before: FloatArray


class OrderQueue:
    def __init__(self, orders: PricedOrders) -> None:
        self._orders = orders
        self._after: dict[Hashable, FloatArray] = {}
        if orders.tree.most_states <= MOST_STATES:
            self._find_all_after()
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, _PricedPartial]] = []
        root = _PricedPartial((orders.tree.root,), boundary(orders.layers, 0))
        self._heap.append((self._bound(root), next(self._serial), root))

    @property
    def bound(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, tuple[int, ...]]:
        """Take the best order left, bound and indices; in too large a tree a better may follow."""
        bound, _, priced = heapq.heappop(self._heap)
        while not priced.partials[0].is_complete:
            following = sorted(
                (self._bound(each), next(self._serial), each) for each in self._following(priced)
            )
            bound, _, priced = following[0]
            for entry in following[1:]:
                heapq.heappush(self._heap, entry)
        return bound, self._orders.tree.indices(priced.partials[0])

    def _following(self, priced: _PricedPartial) -> Iterator[_PricedPartial]:
        orders, latest = self._orders, priced.partials[0].latest_kind
        for stages, partials in orders.tree.next_stages(priced.partials).items():
            is_complete = partials[0].is_complete
            before = priced.before + orders.transfers_s(latest, stages)
            for row, is_end in orders.rows(stages, latest is None, is_complete):
                before = orders.stages.onward(before, row, is_end)
            if is_complete:
                yield from (_PricedPartial((whole,), before) for whole in complete_orders(partials))
            else:
                yield _PricedPartial(partials, before)

    def _bound(self, priced: _PricedPartial) -> float:
        return min(
            float((priced.before + self._least_after(partial)).min()) for partial in priced.partials
        )

    def _least_after(self, partial: PartialOrder) -> FloatArray:
        """The least price [L+1] of the stages to come; infinite where nothing can follow."""
        if partial.look not in self._after:
            if partial.is_complete:
                return self._return_s(partial.returns_within_node)
            self._after[partial.look] = self._orders.rough_after(partial)
        return self._after[partial.look]

    def _return_s(self, within_node: bool) -> FloatArray:
        layers = self._orders.layers
        return boundary(layers, layers) + float(self._orders.return_s[int(within_node)])

    def _find_all_after(self) -> None:
        orders, after = self._orders, list[FloatArray]()
        states = orders.tree.states
        with_stages: dict[tuple[int, int, int, bool], FloatArray] = {}
        for state in states:
            found = np.full(orders.layers + 1, np.inf)
            if state.returns_within_node is not None:
                found = self._return_s(state.returns_within_node)
            begins = state.latest_kind is None
            for stages, following in state.steps:
                key = following, stages.kind, stages.count, begins
                if key not in with_stages:
                    ends = states[following].returns_within_node is not None
                    before = after[following]
                    for row, is_end in reversed(orders.rows(stages, begins, ends)):
                        before = orders.stages.back(before, row, is_end)
                    with_stages[key] = before
                transfers_s = orders.transfers_s(state.latest_kind, stages)
                found = np.minimum(found, with_stages[key] + transfers_s)
            after.append(found)
            self._after[state.look] = found
