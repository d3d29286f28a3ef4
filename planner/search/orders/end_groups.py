"""Device orders grouped by the kinds of device at both ends; a group's bounds are found together.

The fixed parts of the first and last stage depend on their kinds of device, and so do the prices
that prove the best bounds; the stages between only change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from planner.cluster.device import Device
from planner.costs.communication import Transfers
from planner.costs.model import CostModel, grouped
from planner.micro_batches import MicroBatches
from planner.optimiser.objectives import LatencyForm
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from planner.optimiser.relaxation.prices import PricedProblem, Prices, onto_simplex
from planner.optimiser.relaxation.relax import ROUNDING, relax
from planner.optimiser.relaxation.stage_kinds import each_stage_alone
from planner.search.orders.bounds import OrderQueue, PricedOrders
from planner.search.orders.enumeration import OrderTree

ELSEWHERE = 10**6  # no device's index on its node


class SharedPrices:
    """Prices by kind of device, found for one group of orders and reused for others."""

    def __init__(self) -> None:
        self._trip = 0.0
        self._by_kind: dict[int, tuple[float, float, float]] = {}

    @property
    def are_known(self) -> bool:
        """Whether any have been found."""
        return bool(self._by_kind)

    def keep(self, prices: Prices, kind_of_stage: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the prices of each stage's kind; `rows` [N] are the stages' rows of `prices`.

        For a kind that is also between the ends, the prices that it has there are kept.
        """
        self._trip = prices.trip
        columns = prices.prefill, prices.decode, prices.memory
        stages = list(zip(kind_of_stage, rows, strict=True))
        for kind, row in (stages[0], stages[-1], *stages[1:-1]):
            prefill, decode, memory = (float(column[row]) for column in columns)
            self._by_kind[kind] = prefill, decode, memory

    def of(self, form: LatencyForm, count: IntArray) -> Prices:
        """Prices for stages of all kinds, `count` [K] of each."""
        by_kind = [self._by_kind[kind] for kind in range(count.size)]
        prefill, decode, memory = np.array(by_kind).T
        trip = self._trip if form.round_trips else 0.0
        return Prices(
            onto_simplex(prefill, count, form.prefill_max),
            onto_simplex(decode, count, (1 - trip) * form.decode_max),
            memory,
            trip,
        )


@dataclass(frozen=True, eq=False)
class _RoughPrices:
    """What makes up a bound on orders by the kinds of device [K], in seconds: all layers where they
    are cheapest, all else on a stage at the beginning, between the ends or at the end, the cheapest
    transfer from a stage, and the way back from the last stage to the first [K, K].
    """

    layers: float
    first: FloatArray
    between: FloatArray
    last: FloatArray
    onward: FloatArray
    back: FloatArray

    def bound(self, ends: tuple[int, int], count: IntArray) -> float:
        """The bound on orders of `count` [K] devices between `ends` of two kinds."""
        first, last = ends
        between, senders = count.copy(), count.copy()
        np.subtract.at(between, [first, last], 1)
        senders[last] -= 1
        stages = self.first[first] + float(between @ self.between) + self.last[last]
        transfers = float(senders @ self.onward) + self.back[last, first]
        return float(self.layers + stages + transfers)


class SizedOrders:
    """Data that all orders of `devices` share at one pair of sizes: transfers, and prices.

    `onward_s` [2, K, K, 2] are seconds per micro-batch: phase, kinds of sender and receiver, and
    whether they share a node; `back_s` has the same axes, for the way back to the first stage.
    `prices_of_others` are those found at other sizes: any prove a bound.
    """

    def __init__(
        self,
        costs: CostModel,
        sizes: MicroBatches,
        devices: tuple[Device, ...],
        tree: OrderTree,
        prices_of_others: SharedPrices,
    ) -> None:
        self.costs, self.sizes, self.devices = costs, sizes, devices
        self.prices, self._prices_of_others = SharedPrices(), prices_of_others
        self._rough: dict[bool, _RoughPrices] = {}
        kinds = range(1 + max(tree.kind_of_device))
        self._count = np.bincount(tree.kind_of_device)
        self._examples = tuple(devices[tree.kind_of_device.index(kind)] for kind in kinds)

    @cached_property
    def onward_s(self) -> FloatArray:
        """Seconds of the transfers to the next stage."""
        return self._hops(self._transfers.onward_s)

    @cached_property
    def back_s(self) -> FloatArray:
        """Seconds of the transfers from the last stage to the first."""
        return self._hops(self._transfers.back_s)

    def problem(self, order: Sequence[int]) -> AssignmentProblem:
        """The problem of an order, given as indices of the devices."""
        problem = self.costs.problem([self.devices[index] for index in order], self.sizes)
        return grouped(problem, self.costs.options.group)

    def keep(self, prices: Prices, kind_of_stage: Sequence[int], rows: Sequence[int]) -> None:
        """Keep prices for other ends and other sizes, as `SharedPrices.keep`."""
        self.prices.keep(prices, kind_of_stage, rows)
        self._prices_of_others.keep(prices, kind_of_stage, rows)

    def rough_bound(self, ends: tuple[int, int]) -> float | None:
        """A bound in seconds on all orders between ends of two kinds, by shared prices; None where
        there are none, and for a single stage.
        """
        own = self.prices.are_known
        prices = self.prices if own else self._prices_of_others
        if not prices.are_known or len(self.devices) == 1:
            return None
        if own not in self._rough:
            self._rough[own] = self._rough_prices(prices)
        return max(0.0, self._rough[own].bound(ends, self._count) * (1 - ROUNDING))

    def _rough_prices(self, shared: SharedPrices) -> _RoughPrices:
        kinds, stages = self._examples, len(self.devices)
        problem = self.costs.problem_of_parts(kinds, self.sizes, stages)
        problem = grouped(problem, self.costs.options.group)
        priced = PricedProblem(problem, each_stage_alone(problem))
        prices = shared.of(priced.form, self._count)
        prefill, decode = np.tile(prices.prefill, 3), np.tile(prices.decode, 3)
        thrice = Prices(prefill, decode, np.tile(prices.memory, 3), prices.trip)
        costs = priced.stage_costs(thrice)
        each_layer = np.diff(costs.running[costs.able], axis=1).min(axis=0)
        first, between, last = costs.fixed.reshape(3, len(kinds))
        return _RoughPrices(
            float(each_layer.sum()),
            first,
            between,
            last,
            onward=priced.transfer_price(prices, *self.onward_s).min(axis=(1, 2)),
            back=priced.transfer_price(prices, *self.back_s).min(axis=2),
        )

    @cached_property
    def _transfers(self) -> Transfers:
        return self.costs.transfers(self.sizes, len(self.devices))

    def _hops(self, seconds: Callable[[Device, Device, str], tuple[float, float]]) -> FloatArray:
        kinds = len(self._examples)
        pairs = _pairs_of_kinds(self._examples)
        found = [seconds(one, other, self.costs.dtype(one)) for one, other in pairs]
        return np.array(found).reshape(kinds, kinds, 2, 2).transpose(3, 0, 1, 2)


@lru_cache(maxsize=64)
def _pairs_of_kinds(examples: tuple[Device, ...]) -> tuple[tuple[Device, Device], ...]:
    """A sender and a receiver of each two kinds, on different nodes and on one."""
    pairs = []
    for sender, other, joined in itertools.product(examples, examples, (False, True)):
        node = sender.node if joined else f"not {sender.node}"
        pairs.append((sender, replace(other, node=node, index=ELSEWHERE)))
    return tuple(pairs)


class OrdersByEnds:
    """The orders of `tree` between ends of two `kinds`, at one pair of sizes, best first."""

    def __init__(self, sized: SizedOrders, tree: OrderTree, kinds: tuple[int, int]) -> None:
        self.sized, self.tree = sized, tree
        self._kinds = kinds
        self._rough_bound = sized.rough_bound(kinds)
        self._by_own_prices = sized.prices.are_known
        self._queue: OrderQueue | None = None
        if self._rough_bound is None:
            self.refine()

    @property
    def is_rough(self) -> bool:
        """Whether `refine` can raise the bound; it must have, before an order is asked for."""
        return self._queue is None

    @property
    def bound(self) -> float:
        """Seconds that no order left has a plan below; infinite when none is left."""
        if self._queue is not None:
            return max(0.0, self._queue.bound * (1 - ROUNDING))
        return self._rough_bound or 0.0

    @cached_property
    def problem(self) -> AssignmentProblem:
        """The problem of one of the orders."""
        return self.sized.problem(self.tree.example())

    def refine(self) -> None:
        """Raise the bound: by prices that have been found for these sizes since, and otherwise by
        those that are best for these ends, after which orders may be asked for.
        """
        if self.sized.prices.are_known and not self._by_own_prices:
            self._rough_bound, self._by_own_prices = self.sized.rough_bound(self._kinds), True
            return
        relaxed = relax(self.problem)
        prices, rows = relaxed.optimum.prices, relaxed.priced.kinds.of_stage.tolist()
        kinds = [self.tree.kind_of_device[index] for index in self.tree.example()]
        self.sized.keep(prices, kinds, rows)
        self._queue = OrderQueue(self._priced(relaxed.priced, prices, kinds))

    def pop(self) -> tuple[float, tuple[Device, ...]]:
        """The most promising order left, with its bound; `refine` comes first."""
        assert self._queue is not None, "orders are asked for before their bounds"
        bound, order = self._queue.pop()
        return max(0.0, bound * (1 - ROUNDING)), tuple(self.sized.devices[index] for index in order)

    def _priced(
        self, priced: PricedProblem, prices: Prices, kind_of_stage: Sequence[int]
    ) -> PricedOrders:
        rows = priced.kinds.of_stage.tolist()
        back_s = self.sized.back_s[:, self._kinds[1], self._kinds[0]]
        if len(rows) == 1:
            back_s = np.zeros_like(back_s)
        return PricedOrders(
            tree=self.tree,
            ends=self._kinds,
            costs=priced.stage_costs(prices),
            first=rows[0],
            last=rows[-1],
            between=dict(zip(kind_of_stage[1:-1], rows[1:-1], strict=True)),
            hop_s=priced.transfer_price(prices, *self.sized.onward_s),
            return_s=priced.transfer_price(prices, *back_s),
        )
