"""The candidates of a search (LLM-PQ Alg. 1, line 1): device orders by pairs of micro-batch sizes,
made when asked for, best lower bound first. Orders are grouped by the kinds of device at both ends,
on which fixed parts and the prices of the best bounds depend, and a group's bounds are found
together.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.optimiser.prices import (
    PricedProblem,
    Prices,
    StageKinds,
    each_stage_alone,
    onto_simplex,
)
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, LatencyForm
from planner.optimiser.relaxation import ROUNDING, relax
from planner.search.fitting import fitting_sizes, heads_of, misfit
from planner.search.order_bounds import OrderQueue, PricedOrders
from planner.search.orders import OrderTree, canonical_devices, order_tree
from planner.workload import MicroBatches, Workload

ELSEWHERE = 10**6  # no device's index on its node


@dataclass(frozen=True, eq=False)
class SearchCandidate:
    """One order with micro-batch sizes and the head's place; no plan is below `bound` seconds."""

    workload: Workload
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    bound: float
    head_on_first: bool = False


class Candidates:
    """All feasible candidates, most promising first; `DoesNotFitError` if there is none,
    `SpecError` for wrong sizes.
    """

    def __init__(self, costs: CostModel) -> None:
        self.count = 0
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, OrdersByEnds]] = []
        self._fill(costs)
        if not self._heap:
            raise misfit(costs)

    @property
    def bound(self) -> float:
        """Seconds that no plan of the candidates left is below; infinite when none is left."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self, is_late: Callable[[], bool] = lambda: False) -> SearchCandidate:
        """Take the most promising candidate that is left, or where it `is_late` one that seems to
        be; IndexError when none is.
        """
        while True:
            _, _, ends = heapq.heappop(self._heap)
            if ends.is_rough and (ends.refine() or not is_late()):
                self._push(ends)
                continue
            bound, devices = ends.pop()
            if ends.bound < math.inf:
                self._push(ends)
            costs, sizes = ends.sized.costs, ends.sized.sizes
            problem = costs.grouped_problem(devices, sizes)
            return SearchCandidate(
                costs.workload, devices, sizes, problem, bound, costs.head_on_first
            )

    def __iter__(self) -> Iterator[SearchCandidate]:
        while self._heap:
            yield self.pop()

    def _fill(self, costs: CostModel) -> None:
        devices = canonical_devices(costs.cluster.devices)
        tree = order_tree(devices, costs.options.all_orders)
        prices = SharedPrices()
        for placed in heads_of(costs):
            known: dict[MicroBatches, SizedOrders] = {}
            for kinds, part in tree.by_ends.items():
                order = tuple(devices[index] for index in part.example)
                for sizes in fitting_sizes(placed, order):
                    if sizes not in known:
                        known[sizes] = SizedOrders(placed, sizes, devices, tree, prices)
                    self.count += part.count
                    self._push(OrdersByEnds(known[sizes], part, kinds))

    def _push(self, ends: OrdersByEnds) -> None:
        heapq.heappush(self._heap, (ends.bound, next(self._serial), ends))


class OrdersByEnds:
    """The orders of `tree` between ends of two `kinds`, at one pair of sizes, best first."""

    def __init__(self, sized: SizedOrders, tree: OrderTree, kinds: tuple[int, int]) -> None:
        self.sized, self.tree, self._kinds = sized, tree, kinds
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
        devices = [self.sized.devices[index] for index in self.tree.example]
        return self.sized.costs.grouped_problem(devices, self.sized.sizes)

    def refine(self) -> bool:
        """Raise the bound by prices found for these sizes since, else by those best for these ends;
        then `pop` may be called. Whether the bound is still rough.
        """
        if self.sized.prices.are_known and not self._by_own_prices:
            self._rough_bound, self._by_own_prices = self.sized.rough_bound(self._kinds), True
            return True
        relaxed = relax(self.problem)
        rows = relaxed.priced.kinds.of_stage.tolist()
        kinds = [self.tree.kind_of_device[index] for index in self.tree.example]
        self.sized.keep(relaxed.prices, kinds, rows)
        self._queue = OrderQueue(self._priced(relaxed.priced, relaxed.prices, kinds))
        return False

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
            stages=priced.priced_stages(prices),
            first=rows[0],
            last=rows[-1],
            between=dict(zip(kind_of_stage[1:-1], rows[1:-1], strict=True)),
            hop_s=priced.transfer_price(prices, *self.sized.onward_s),
            return_s=priced.transfer_price(prices, *back_s),
        )


class _StagePrices(NamedTuple):
    prefill: float
    decode: float
    memory: float
    host: float


NO_PRICES = _StagePrices(0.0, 0.0, 0.0, 0.0)


class SharedPrices:
    def __init__(self) -> None:
        self._trip = 0.0
        self._by_kind: dict[int, _StagePrices] = {}
        self._between: dict[int, _StagePrices] = {}
        self._ends = NO_PRICES, NO_PRICES

    @property
    def are_known(self) -> bool:
        return bool(self._by_kind)

    def keep(self, prices: Prices, kind_of_stage: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the prices by kind; `rows` [N] are the stages' rows. Those between the ends win."""
        self._trip = prices.trip
        columns = prices.prefill, prices.decode, prices.memory, prices.host
        found = [_StagePrices(*(float(column[row]) for column in columns)) for row in rows]
        self._ends = found[0], found[-1]
        between = dict(zip(kind_of_stage[1:-1], found[1:-1], strict=True))
        self._between |= between
        self._by_kind |= {kind_of_stage[0]: found[0], kind_of_stage[-1]: found[-1]} | between

    def of(self, form: LatencyForm, count: IntArray) -> Prices:
        """Prices for stages of all kinds, `count` [K] of each, wherever they are."""
        return self._of([self._by_kind[kind] for kind in range(count.size)], form, count)

    def of_places(self, form: LatencyForm, kinds: Sequence[int], count: IntArray) -> Prices:
        """Prices for the first stage, those between of some `kinds`, and the last, `count` each."""
        between = [self._between.get(kind, NO_PRICES) for kind in kinds]
        return self._of([self._ends[0], *between, self._ends[1]], form, count)

    def _of(self, stages: Sequence[_StagePrices], form: LatencyForm, count: IntArray) -> Prices:
        prefill, decode, memory, host = np.array(stages).T
        trip = self._trip if form.round_trips else 0.0
        return Prices(
            onto_simplex(prefill, count, form.prefill_max),
            onto_simplex(decode, count, (1 - trip) * form.decode_max),
            memory,
            host,
            trip,
        )


@dataclass(frozen=True, eq=False)
class _RoughPrices:
    """What bounds orders by kinds of device [K], in seconds: all layers where cheapest, all else on
    a stage first, between or last, the cheapest transfer onward, and the way back [K, K].
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
    """What all orders share at one pair of sizes. `onward_s`, `back_s` [2, K, K, 2]: seconds by
    phase, kinds of sender and receiver, and whether they share a node. Prices of other sizes prove
    a bound too.
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
        return self._hops(self.costs.transfers(self.sizes, len(self.devices)).onward_s)

    @cached_property
    def back_s(self) -> FloatArray:
        return self._hops(self.costs.transfers(self.sizes, len(self.devices)).back_s)

    def keep(self, prices: Prices, kind_of_stage: Sequence[int], rows: Sequence[int]) -> None:
        """Keep prices for other ends and other sizes, as `SharedPrices.keep`."""
        self.prices.keep(prices, kind_of_stage, rows)
        self._prices_of_others.keep(prices, kind_of_stage, rows)

    def rough_bound(self, ends: tuple[int, int]) -> float | None:
        """Seconds that no order of such ends is below; None without prices, and for one stage."""
        own = self.prices.are_known
        prices = self.prices if own else self._prices_of_others
        if not prices.are_known or len(self.devices) == 1:
            return None
        if own not in self._rough:
            self._rough[own] = self._rough_prices(prices)
        bound = self._rough[own].bound(ends, self._count)
        if self._parts.problem.joined:
            bound = max(bound, self._bound_of_places(prices, ends))
        return max(0.0, bound * (1 - ROUNDING))

    @cached_property
    def _parts(self) -> PricedProblem:
        """Stages of each kind of device, first, between and last."""
        kinds, stages = self._examples, len(self.devices)
        problem = self.costs.problem_of_parts(kinds, self.sizes, stages)
        return PricedProblem(problem, each_stage_alone(problem))

    def _bound_of_places(self, shared: SharedPrices, ends: tuple[int, int]) -> float:
        """The bound with the ends' own prices: joined layers may make one of them the slowest in
        every order. What must lie on an end costs what it does there.
        """
        priced, kinds = self._parts, self._count.size
        between = self._count.copy()
        np.subtract.at(between, list(ends), 1)
        inner = np.flatnonzero(between)
        rows = np.concatenate([[ends[0]], kinds + inner, [2 * kinds + ends[1]]])
        count = np.concatenate([[1], between[inner], [1]])
        prices = shared.of_places(priced.form, inner.tolist(), count)
        stages = StageKinds(np.arange(rows.size), rows, count)
        costs = PricedProblem(priced.problem, stages).priced_stages(prices)
        each_layer, borders = costs.each.min(axis=0), priced.problem.open_boundaries
        each_layer[: borders[1]] = costs.each[0, : borders[1]]
        each_layer[borders[-2] :] = costs.each[-1, borders[-2] :]
        fixed = float(count @ costs.fixed)
        onward = priced.transfer_price(prices, *self.onward_s).min(axis=(1, 2))
        back = priced.transfer_price(prices, *self.back_s).min(axis=2)
        senders = self._count.copy()
        senders[ends[1]] -= 1
        transfers = float(senders @ onward) + float(back[ends[1], ends[0]])
        return float(each_layer.sum()) + fixed + transfers

    def _rough_prices(self, shared: SharedPrices) -> _RoughPrices:
        kinds, priced = self._examples, self._parts
        prices = shared.of(priced.form, self._count)
        prefill, decode = np.tile(prices.prefill, 3), np.tile(prices.decode, 3)
        memory, host = np.tile(prices.memory, 3), np.tile(prices.host, 3)
        thrice = Prices(prefill, decode, memory, host, prices.trip)
        costs = priced.priced_stages(thrice)
        each_layer = costs.each.min(axis=0)
        first, between, last = costs.fixed.reshape(3, len(kinds))
        return _RoughPrices(
            float(each_layer.sum()),
            first,
            between,
            last,
            priced.transfer_price(prices, *self.onward_s).min(axis=(1, 2)),
            priced.transfer_price(prices, *self.back_s).min(axis=2),
        )

    def _hops(self, seconds: Callable[[Device, Device, str], tuple[float, float]]) -> FloatArray:
        kinds = len(self._examples)
        pairs = _pairs_of_kinds(self._examples)
        found = [seconds(one, other, self.costs.dtype(one)) for one, other in pairs]
        return np.array(found).reshape(kinds, kinds, 2, 2).transpose(3, 0, 1, 2)


@lru_cache(maxsize=64)
def _pairs_of_kinds(examples: tuple[Device, ...]) -> tuple[tuple[Device, Device], ...]:
    pairs = []
    for sender, other, joined in itertools.product(examples, examples, (False, True)):
        node = sender.node if joined else f"not {sender.node}"
        pairs.append((sender, replace(other, node=node, index=ELSEWHERE)))
    return tuple(pairs)
