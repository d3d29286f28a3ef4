"""The candidates of a search (LLM-PQ Alg. 1, line 1): device orders by pairs of micro-batch sizes.

They are made when they are asked for, best lower bound first: there may be more orders than can be
listed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.costs.model import CostModel, grouped
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import AssignmentProblem
from planner.search.memory_fit import fitting_sizes, heads_of, misfit
from planner.search.orders.device_sets import canonical_devices
from planner.search.orders.end_groups import OrdersByEnds, SharedPrices, SizedOrders
from planner.search.orders.enumeration import order_tree
from planner.workload import Workload


@dataclass(frozen=True, eq=False)
class SearchCandidate:
    """One device order with one pair of micro-batch sizes and a place for the LM head.

    `bound`: seconds that no plan of it is below.
    """

    workload: Workload
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    bound: float
    head_on_first: bool = False


class Candidates:
    """All feasible candidates, most promising first.

    Raises `DoesNotFitError` if there is none, and `SpecError` for sizes that cannot be searched.
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

    def pop(self) -> SearchCandidate:
        """Take the most promising candidate that is left; IndexError when none is."""
        while True:
            _, _, ends = heapq.heappop(self._heap)
            if ends.is_rough:
                ends.refine()
                self._push(ends)
                continue
            bound, devices = ends.pop()
            if ends.bound < math.inf:
                self._push(ends)
            costs, sizes = ends.sized.costs, ends.sized.sizes
            problem = grouped(costs.problem(devices, sizes), costs.options.group)
            return SearchCandidate(
                costs.workload, devices, sizes, problem, bound, costs.head_on_first
            )

    def __iter__(self) -> Iterator[SearchCandidate]:
        """Take all candidates that are left."""
        while self._heap:
            yield self.pop()

    def _fill(self, costs: CostModel) -> None:
        """Group the orders by their ends, on which alone it depends which sizes fit."""
        devices = canonical_devices(costs.cluster.devices)
        tree = order_tree(devices, costs.options.all_orders)
        prices = SharedPrices()
        for placed in heads_of(costs):
            known: dict[MicroBatches, SizedOrders] = {}
            for kinds, part in tree.by_ends().items():
                order = tuple(devices[index] for index in part.example())
                for sizes in fitting_sizes(placed, order):
                    if sizes not in known:
                        known[sizes] = SizedOrders(placed, sizes, devices, tree, prices)
                    self.count += part.count()
                    self._push(OrdersByEnds(known[sizes], part, kinds))

    def _push(self, ends: OrdersByEnds) -> None:
        heapq.heappush(self._heap, (ends.bound, next(self._serial), ends))
