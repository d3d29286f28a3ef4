"""The candidates of a search (LLM-PQ Alg. 1, line 1): device orders by pairs of micro-batch sizes.

Each comes with its assignment problem and a lower bound, so that most need not be solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from planner.costs import CostModel, grouped
from planner.device import Device
from planner.micro_batches import MicroBatches, micro_batch_pairs
from planner.optimiser.box_method import BoundBook
from planner.optimiser.capacity import explain_infeasible, is_feasible
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.orders import device_orders
from planner.remedies import remedies
from planner.workload import Workload
from quant.errors import InfeasibleError, SpecError

MOST_ORDERS = 20_000  # each takes some ten milliseconds before anything is solved


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


def list_candidates(costs: CostModel) -> list[SearchCandidate]:
    """All feasible candidates, most promising first.

    Raises `InfeasibleError` if there is none, with what would fit, and `SpecError` for sizes or
    orders that cannot be searched.
    """
    book = BoundBook()
    found: list[SearchCandidate] = []
    closest: tuple[tuple[Device, ...], AssignmentProblem] | None = None
    placed = [replace(costs, head_on_first=head == "first") for head in _heads(costs)]
    for devices, here in product(_orders(costs), placed):
        for sizes in searched_sizes(costs.workload, len(devices), costs.options):
            problem = grouped(here.problem(devices, sizes), costs.options.group)
            if is_feasible(problem):
                bound = book.bound(problem)
                found.append(SearchCandidate(devices, sizes, problem, bound, here.head_on_first))
            elif closest is None or problem.memory_bytes.sum() > closest[1].memory_bytes.sum():
                closest = devices, problem
    if not found and closest is not None:
        devices, problem = closest
        why = explain_infeasible(problem, [device.name for device in devices])
        raise InfeasibleError(f"{costs.shape.name} does not fit: {why}. {remedies(costs, devices)}")
    return sorted(found, key=lambda candidate: candidate.bound)


def _heads(costs: CostModel) -> Sequence[str]:
    """Stages to try for the LM head; a single device has no choice."""
    if len(costs.cluster.devices) == 1:
        return ("last",)
    return ("last", "first") if costs.options.head == "auto" else (costs.options.head,)


def orders_of(costs: CostModel, all_orders: bool) -> Iterator[tuple[Device, ...]]:
    """Distinct orders of the cluster's devices."""
    devices = costs.cluster.devices
    orders = device_orders(
        devices,
        type_of=lambda d: (d.accelerator.name, d.memory_bytes, d.threads),
        node_of=lambda d: d.node,
        all_orders=all_orders,
    )
    return (tuple(devices[i] for i in order) for order in orders)


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


def _orders(costs: CostModel) -> Sequence[tuple[Device, ...]]:
    """Those that the options ask for; SpecError for more than can be searched."""
    wanted = costs.options.all_orders
    found = list(islice(orders_of(costs, wanted), MOST_ORDERS + 1))
    if len(found) > MOST_ORDERS:
        remedy = (
            "leave all_orders out, so that equal devices of a node stay together"
            if wanted
            else "use fewer nodes, or nodes of more devices"
        )
        raise SpecError(
            f"{len(costs.cluster.devices)} devices have more than {MOST_ORDERS} distinct orders; "
            f"{remedy}"
        )
    return found
