"""The figures of all baselines beside a plan, simulated or estimated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.micro_batches import MicroBatches
from planner.plan.spec import Baseline
from planner.search.baselines.offloading import OffloadingEstimate, estimate_offloading
from planner.search.baselines.policies import (
    POLICIES,
    BaselineChoice,
    as_published,
    baseline_orders,
    choose,
    with_one_bitwidth,
)
from planner.simulation.forecast import forecast_assignment
from quant.common.errors import InfeasibleError

OFFLOADED = {"flexgen": 16, "flexgen-int8": 8}


def baselines(costs: CostModel) -> tuple[Baseline, ...]:
    """Uniform, PipeEdge, adabits, and the offloading estimates whose bitwidths are allowed."""
    offloaded = [name for name, bits in OFFLOADED.items() if bits in costs.options.bits]
    orders = baseline_orders(as_published(costs))
    return tuple(baseline(costs, name, orders) for name in (*POLICIES, *offloaded))


def baseline(
    costs: CostModel, name: str, orders: Sequence[tuple[Device, ...]] | None = None
) -> Baseline:
    """The baseline of that name, with these `orders` if they are known; without figures where it
    does not fit.

    All but the offloading estimates are simulated like the plan; the LM head is on the last stage.
    """
    try:
        if name in OFFLOADED:
            return _estimated(costs, name)
        return _simulated(name, choose(as_published(costs), name, orders))
    except InfeasibleError:
        return Baseline(name, None, None, None, None)


def offloading(costs: CostModel, name: str) -> OffloadingEstimate:
    """FlexGen in the cluster's own order; hosts that state no memory are not limited.

    Raises InfeasibleError where the hosts' memory is short.
    """
    bits = OFFLOADED[name]
    costs = as_published(with_one_bitwidth(costs, bits))
    devices = costs.cluster.devices
    share = -(-costs.workload.global_batch // len(devices))
    sizes = MicroBatches(share, share)
    on_node = {node: sum(d.node == node for d in devices) for node in costs.cluster.nodes}
    host = [(d.host_memory_bytes or math.inf) / on_node[d.node] for d in devices]
    links = [device.host_link_bytes_per_s for device in devices]
    return estimate_offloading(costs.problem(devices, sizes), bits, links, host)


def _simulated(name: str, found: BaselineChoice) -> Baseline:
    costs, assignment = found.costs, found.assignment
    run = forecast_assignment(
        costs, found.devices, found.sizes, assignment.first_layer, assignment.bitwidth
    )
    used = {costs.options.bits[choice] for choice in assignment.bitwidth}
    return Baseline(
        name,
        used.pop() if len(used) == 1 else None,
        run.seconds,
        run.tokens_per_s,
        found.sensitivity,
    )


def _estimated(costs: CostModel, name: str) -> Baseline:
    found = offloading(costs, name)
    sensitivity = costs.sensitivity[:, costs.options.bits.index(found.bits)].sum()
    rate = costs.generated_tokens / found.latency_s
    return Baseline(name, found.bits, found.latency_s, rate, float(sensitivity))
