"""The candidates of a search (LLM-PQ Alg. 1, line 1): device orders by pairs of micro-batch sizes.

They come by their lower bounds, the most promising first, and are made as they are asked for: there
may be more orders than can be listed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.costs import CostModel, grouped
from planner.device import Device
from planner.micro_batches import MicroBatches, micro_batch_pairs
from planner.optimiser.capacity import explain_infeasible, is_feasible
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.orders import OrderTree
from planner.orders_by_ends import HopTable, OrdersByEnds, SharedPrices
from planner.remedies import remedies
from planner.workload import Workload
from quant.errors import InfeasibleError, SpecError


@dataclass(frozen=True, eq=False)
class SearchCandidate:
    """One device order with one pair of micro-batch sizes and a place for the LM head.

    The bound is in seconds.
    """

    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    bound: float
    head_on_first: bool = False


class Candidates:
    """All feasible candidates, most promising first.

    Raises `InfeasibleError` if there is none, with what would fit, and `SpecError` for sizes that
    cannot be searched.
    """

    def __init__(self, costs: CostModel) -> None:
        self.count = 0
        self._serial = itertools.count()
        self._heap: list[tuple[float, int, OrdersByEnds]] = []
        self._fill(costs)

    @property
    def bound(self) -> float:
        """Seconds that no candidate still to come has a plan below; infinite when none is left."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> SearchCandidate:
        """The most promising candidate that is left; IndexError when none is."""
        while True:
            _, _, ends = heapq.heappop(self._heap)
            if ends.is_rough:
                ends.refine()
                self._push(ends)
                continue
            bound, devices = ends.pop()
            if ends.bound < math.inf:
                self._push(ends)
            costs = ends.costs
            problem = grouped(costs.problem(devices, ends.sizes), costs.options.group)
            return SearchCandidate(devices, ends.sizes, problem, bound, costs.head_on_first)

    def __iter__(self) -> Iterator[SearchCandidate]:
        """All that are left."""
        while self._heap:
            yield self.pop()

    def _fill(self, costs: CostModel) -> None:
        devices, tree = order_tree(costs, costs.options.all_orders)
        trees = [(ends, each, each.count()) for ends, each in tree.by_ends().items()]
        closest: tuple[tuple[Device, ...], AssignmentProblem] | None = None
        placed = [replace(costs, head_on_first=head == "first") for head in _heads(costs)]
        sizes_tried = searched_sizes(costs.workload, len(devices), costs.options)
        for here, sizes in itertools.product(placed, sizes_tried):
            hops, shared = HopTable(here, sizes, devices, tree), SharedPrices()
            for kinds, between, count in trees:
                ends = OrdersByEnds(here, sizes, devices, between, kinds, hops, shared)
                if is_feasible(ends.problem):
                    self.count += count
                    self._push(ends)
                elif closest is None or _room(ends.problem) > _room(closest[1]):
                    closest = ends.example, ends.problem
        if not self._heap and closest is not None:
            order, problem = closest
            why = explain_infeasible(problem, [device.name for device in order])
            raise InfeasibleError(
                f"{costs.shape.name} does not fit: {why}. {remedies(costs, order)}"
            )

    def _push(self, ends: OrdersByEnds) -> None:
        heapq.heappush(self._heap, (ends.bound, next(self._serial), ends))


def _room(problem: AssignmentProblem) -> float:
    """What all stages together have left for layers, in bytes."""
    return float(problem.memory_bytes.sum())


def _heads(costs: CostModel) -> Sequence[str]:
    """Stages to try for the LM head; a single device has no choice."""
    if len(costs.cluster.devices) == 1:
        return ("last",)
    return ("last", "first") if costs.options.head == "auto" else (costs.options.head,)


def order_tree(costs: CostModel, all_orders: bool) -> tuple[tuple[Device, ...], OrderTree]:
    """All orders of the cluster's devices, which come in an order that the file has no part in."""
    devices = canonical_devices(costs.cluster.devices)
    tree = OrderTree(devices, lambda d: d.cost_kind, lambda d: d.node, all_orders)
    return devices, tree


def canonical_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The same for every order in which nodes that cost the same may be written."""
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    ordered = [sorted(node, key=lambda d: (repr(d.cost_kind), d.index)) for node in nodes.values()]
    ordered.sort(key=lambda node: [repr(device.cost_kind) for device in node])
    return tuple(itertools.chain.from_iterable(ordered))


def orders_of(costs: CostModel, all_orders: bool) -> Iterator[tuple[Device, ...]]:
    """Distinct orders of the cluster's devices; as many as are asked for, of unlike ends first."""
    devices, tree = order_tree(costs, all_orders)
    waiting = [each.orders() for each in tree.by_ends().values()]
    for turn in itertools.zip_longest(*waiting):
        yield from (tuple(devices[i] for i in order) for order in turn if order is not None)


def searched_sizes(workload: Workload, stages: int, options: PlanOptions) -> Sequence[MicroBatches]:
    """Pairs to try; a size that the user fixed replaces the searched one."""
    batch = workload.global_batch
    for name in ("prefill_micro_batch", "decode_micro_batch"):
        fixed = getattr(options, name)
        if fixed is not None and fixed > batch:
            raise SpecError(f"{name} is {fixed}, more than the batch of {batch}")
    pairs = {
        MicroBatches(
            options.prefill_micro_batch or pair.prefill, options.decode_micro_batch or pair.decode
        )
        for pair in micro_batch_pairs(batch, stages)
    }
    return sorted(pairs, key=lambda pair: (pair.decode, pair.prefill))
