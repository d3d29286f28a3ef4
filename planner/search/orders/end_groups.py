"""Device orders grouped by the kinds of device at both ends; a group's bounds are found together.

The fixed parts of the first and last stage depend on their kinds of device, and so do the prices
that prove the best bounds; the stages between only change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.micro_batches import MicroBatches
from planner.optimiser.problem import AssignmentProblem
from planner.optimiser.relaxation.prices import PricedProblem, Prices, onto_simplex
from planner.optimiser.relaxation.relax import ROUNDING, relax
from planner.search.orders.bounds import OrderQueue, PricedOrders
from planner.search.orders.enumeration import OrderTree

ELSEWHERE = 10**6  # no device's index on its node


class SharedPrices:
    """Prices by kind of device, found for one group of orders and reused for others."""

    def __init__(self) -> None:
        self._trip = 0.0
        self._by_kind: dict[int, tuple[float, float, float]] = {}

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

    def of(self, priced: PricedProblem, kind_of_row: Sequence[int]) -> Prices | None:
        """Prices for a problem whose rows [Q] are of these kinds; None while none are known."""
        if not self._by_kind:
            return None
        prefill, decode, memory = np.array([self._by_kind[kind] for kind in kind_of_row]).T
        form, count = priced.form, priced.kinds.count
        return Prices(
            onto_simplex(prefill, count, form.prefill_max),
            onto_simplex(decode, count, (1 - self._trip) * form.decode_max),
            memory,
            self._trip,
        )


class SizedOrders:
    """Data that all orders of `devices` share at one pair of sizes: transfers, and prices.

    `onward_s` [2, K, K, 2] are seconds per micro-batch: phase, kinds of sender and receiver, and
    whether they share a node; `back_s` has the same axes, for the way back to the first stage.
    """

    def __init__(
        self, costs: CostModel, sizes: MicroBatches, devices: tuple[Device, ...], tree: OrderTree
    ) -> None:
        self.costs, self.sizes, self.devices = costs, sizes, devices
        self.prices = SharedPrices()
        kinds = range(1 + max(tree.kind_of_device))
        examples = [devices[tree.kind_of_device.index(kind)] for kind in kinds]
        self.onward_s = np.zeros((2, len(kinds), len(kinds), 2))
        self.back_s = np.zeros_like(self.onward_s)
        transfers = costs.transfers(sizes, len(devices))
        for one, other, joined in itertools.product(kinds, kinds, (False, True)):
            sender = examples[one]
            node = sender.node if joined else f"not {sender.node}"
            receiver = replace(examples[other], node=node, index=ELSEWHERE)
            dtype = costs.dtype(sender)
            self.onward_s[:, one, other, int(joined)] = transfers.onward_s(sender, receiver, dtype)
            self.back_s[:, one, other, int(joined)] = transfers.back_s(sender, receiver, dtype)


class OrdersByEnds:
    """The orders of `tree` between ends of two `kinds`, at one pair of sizes, best first.

    `example` is one of the orders, as indices of the devices, and `problem` its problem.
    """

    def __init__(
        self,
        sized: SizedOrders,
        tree: OrderTree,
        kinds: tuple[int, int],
        example: Sequence[int],
        problem: AssignmentProblem,
    ) -> None:
        self.sized, self.tree, self.problem = sized, tree, problem
        self._kinds = kinds
        self._kind_of_stage = [tree.kind_of_device[index] for index in example]
        self._rough_bound: float | None = None
        self._queue: OrderQueue | None = None

    @property
    def is_rough(self) -> bool:
        """Whether `refine` can raise the bound; it must have, before an order is asked for."""
        return self._queue is None

    @property
    def bound(self) -> float:
        """Seconds that no order left has a plan below; infinite when none is left."""
        if self._queue is not None:
            return max(0.0, self._queue.bound * (1 - ROUNDING))
        if self._rough_bound is None:
            self._rough_bound = self._by_shared_prices()
        return self._rough_bound

    def refine(self) -> None:
        """Compute the orders' bounds with the prices that are best for these ends."""
        relaxed = relax(self.problem)
        prices, rows = relaxed.optimum.prices, relaxed.priced.kinds.of_stage.tolist()
        self.sized.prices.keep(prices, self._kind_of_stage, rows)
        self._queue = OrderQueue(self._priced(relaxed.priced, prices))

    def pop(self) -> tuple[float, tuple[Device, ...]]:
        """The most promising order left, with its bound; `refine` comes first."""
        assert self._queue is not None, "orders are asked for before their bounds"
        bound, order = self._queue.pop()
        return max(0.0, bound * (1 - ROUNDING)), tuple(self.sized.devices[index] for index in order)

    def _by_shared_prices(self) -> float:
        """A bound by other groups' prices, without making orders; by `refine` if there are none."""
        priced = PricedProblem(self.problem)
        kinds = [self._kind_of_stage[stage] for stage in priced.kinds.example]
        prices = self.sized.prices.of(priced, kinds)
        if prices is None:
            self.refine()
            return self.bound
        rough = self._priced(priced, prices).rough_after(self.tree.root)
        return max(0.0, float(rough[0]) * (1 - ROUNDING))

    def _priced(self, priced: PricedProblem, prices: Prices) -> PricedOrders:
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
            between=dict(zip(self._kind_of_stage[1:-1], rows[1:-1], strict=True)),
            hop_s=priced.transfer_price(prices, *self.sized.onward_s),
            return_s=priced.transfer_price(prices, *back_s),
        )
