"""Lower bounds on all device orders that start with the same stages, to try orders best first.

Any prices for what couples the stages (`planner.optimiser.relaxation.prices`) prove a bound on
every order. The least cost of the stages still to be placed is found backwards from the
last stage, once for each set of devices that may be left: so the most promising order is found
without going through the others.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import FloatArray
from planner.optimiser.relaxation.prices import StageCosts, boundary
from planner.search.orders.enumeration import (
    OrderState,
    OrderTree,
    PartialOrder,
    Placement,
    complete_orders,
)

MOST_STATES = 2_000
"""Most sets of devices that may be left (nodes that look alike counted once) for which the cost of
the following stages is computed exactly; a thousand take a tenth of a second."""


@dataclass(frozen=True, eq=False)
class PricedOrders:
    """The orders of `tree`, whose `ends` are of two kinds of device, at some prices.

    `first`, `last` and by kind of device `between` are rows of `costs`. `hop_s` [K, K, 2] are the
    transfers' prices in seconds by the kinds of sender and receiver and whether they share a node;
    `return_s` [2] is the price of the way back from the last stage to the first.
    """

    tree: OrderTree
    ends: tuple[int, int]
    costs: StageCosts
    first: int
    last: int
    between: dict[int, int]
    hop_s: FloatArray
    return_s: FloatArray

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return int(self.costs.running.shape[1]) - 1

    def rows(self, placement: Placement, begins: bool, ends: bool) -> list[tuple[int, bool]]:
        """The row of each stage of a placement, and whether it is the first or the last stage."""
        if begins and ends and placement.count == 1:
            return [(self.first, True)]
        at_start = [(self.first, True)] if begins else []
        at_end = [(self.last, True)] if ends else []
        inner = placement.count - len(at_start) - len(at_end)
        return at_start + [(self.between[placement.kind], False) for _ in range(inner)] + at_end

    def transfers_s(self, latest: int | None, placement: Placement) -> float:
        """The price of the transfers to the stages of a placement."""
        within = (placement.count - 1) * float(self.hop_s[placement.kind, placement.kind, 1])
        if latest is None:
            return within
        return within + float(self.hop_s[latest, placement.kind, int(placement.joined)])

    def rough_after(self, partial: PartialOrder) -> FloatArray:
        """A bound on the price [L+1] of the stages after a partial order, without making any order.

        Each layer is on the kind where it is cheapest, wherever that lies, as in the linear
        programme; each transfer is the cheapest one from its stage.
        """
        each = np.diff(self.costs.running[self.costs.able], axis=1).min(axis=0)
        layers: FloatArray = np.append(each[::-1].cumsum()[::-1], 0.0)
        rows = list(self._rows_after(partial))
        return layers + float(self.costs.fixed[rows].sum()) + self._least_transfers_s(partial)

    def _rows_after(self, partial: PartialOrder) -> Iterator[int]:
        """The rows of the stages that are still to come."""
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


@dataclass(frozen=True, eq=False)
class _PricedPartial:
    """Partial orders that look the same, and the least price [L+1] of their stages by boundary."""

    partials: tuple[PartialOrder, ...]
    before: FloatArray


class OrderQueue:
    """The orders of a tree, the most promising first."""

    def __init__(self, orders: PricedOrders) -> None:
        self._orders = orders
        self._least_after = _LeastAfter(orders)
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, _PricedPartial]] = []
        self._push(_PricedPartial((orders.tree.root,), boundary(orders.layers, 0)))

    @property
    def bound(self) -> float:
        """Seconds that no order still to come is below; infinite when none is left."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> tuple[float, tuple[int, ...]]:
        """Take the best order that is left, as its bound and the indices of its devices.

        Where the tree is too large for exact costs, a better one may still follow.
        """
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
        """Yield every continuation; complete orders singly, as their ways back may differ."""
        for placement, partials in self._orders.tree.next_placements(priced.partials).items():
            before = self._before(priced, placement, partials[0].is_complete)
            if partials[0].is_complete:
                yield from (_PricedPartial((whole,), before) for whole in complete_orders(partials))
            else:
                yield _PricedPartial(partials, before)

    def _before(self, priced: _PricedPartial, placement: Placement, ends: bool) -> FloatArray:
        orders, latest = self._orders, priced.partials[0].latest_kind
        before = priced.before + orders.transfers_s(latest, placement)
        for row, is_end in orders.rows(placement, latest is None, ends):
            before = orders.costs.onward(before, row, is_end)
        return before

    def _bound(self, priced: _PricedPartial) -> float:
        return min(
            float((priced.before + self._least_after(partial)).min()) for partial in priced.partials
        )

    def _push(self, priced: _PricedPartial) -> None:
        heapq.heappush(self._heap, (self._bound(priced), next(self._serial), priced))


class _LeastAfter:
    """Computes the least price [L+1] of the stages after a partial order, by its last boundary."""

    def __init__(self, orders: PricedOrders) -> None:
        self._orders = orders
        self._known: dict[Hashable, FloatArray] = {}
        if orders.tree.most_states() <= MOST_STATES:
            self._find_all(orders.tree.states())

    def __call__(self, partial: PartialOrder) -> FloatArray:
        """The least price; infinite where nothing can follow."""
        if partial.look not in self._known:
            if partial.is_complete:
                return self._return_s(partial.returns_within_node)
            self._known[partial.look] = self._orders.rough_after(partial)
        return self._known[partial.look]

    def _return_s(self, within_node: bool) -> FloatArray:
        layers = self._orders.layers
        return boundary(layers, layers) + float(self._orders.return_s[int(within_node)])

    def _find_all(self, states: Sequence[OrderState]) -> None:
        """Find the prices after all states, each of which comes after those that may follow it."""
        orders, after = self._orders, list[FloatArray]()
        with_stages: dict[tuple[int, int, int, bool], FloatArray] = {}
        for state in states:
            found = np.full(orders.layers + 1, np.inf)
            if state.returns_within_node is not None:
                found = self._return_s(state.returns_within_node)
            begins = state.latest_kind is None
            for placement, following in state.steps:
                key = following, placement.kind, placement.count, begins
                if key not in with_stages:
                    ends = states[following].returns_within_node is not None
                    before = after[following]
                    for row, is_end in reversed(orders.rows(placement, begins, ends)):
                        before = orders.costs.back(before, row, is_end)
                    with_stages[key] = before
                transfers_s = orders.transfers_s(state.latest_kind, placement)
                found = np.minimum(found, with_stages[key] + transfers_s)
            after.append(found)
            self._known[state.look] = found
