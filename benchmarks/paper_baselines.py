"""PipeEdge and Uniform as LLM-PQ section 6.1 defines them, by simulation.

Both lower one bitwidth from the greatest until the model fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner.assignment import Assignment, AssignmentProblem, solve, stage_times
from planner.candidates import orders_of
from planner.cluster import ClusterSpec
from planner.costs import CostModel
from planner.device import Device
from planner.micro_batches import MicroBatches, micro_batch_pairs
from planner.model_shape import model_shape
from planner.options import PlanOptions
from planner.profiles import latency_from_profiles
from planner.roofline import RooflineLatency
from planner.sensitivity import default_sensitivity
from planner.simulation import simulate_assignment
from planner.workload import Workload
from quant.errors import InfeasibleError


@dataclass(frozen=True)
class Setting:
    """What is served where; `profiles` is a CSV of layer times, `bits` ascending."""

    cluster: ClusterSpec
    model: str
    workload: Workload
    profiles: Path
    bits: tuple[int, ...]

    def costs(self, bits: int) -> CostModel:
        """The cost model with one bitwidth."""
        shape = model_shape(self.model)
        latency = latency_from_profiles(self.profiles, RooflineLatency(shape))
        options = PlanOptions(dtype="float16", bits=(bits,))
        sensitivity = default_sensitivity(shape, options.bits)
        return CostModel(self.cluster, shape, self.workload, options, latency, sensitivity)


@dataclass(frozen=True)
class BaselineResult:
    """A baseline's bitwidth and the simulated seconds of a batch."""

    bits: int
    latency_s: float


@dataclass(frozen=True)
class _Found:
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem
    assignment: Assignment

    def latency_s(self, costs: CostModel) -> float:
        a = self.assignment
        return simulate_assignment(
            costs, self.devices, self.sizes, a.first_layer, a.bitwidth
        ).latency_s

    @property
    def slowest_prefill_s(self) -> float:
        a = self.assignment
        times = stage_times(self.problem, a.first_layer, a.bitwidth)
        return float(max(times.prefill_s.max(), self.problem.prefill_comm_s.max()))


def uniform(setting: Setting) -> BaselineResult | None:
    """Layers spread evenly; order and micro-batches with the least latency. None: does not fit."""
    batch, stages = setting.workload.global_batch, len(setting.cluster.devices)
    for bits in reversed(setting.bits):
        costs = setting.costs(bits)
        pairs = micro_batch_pairs(batch, stages)
        found = [each for sizes in pairs for each in _solved(costs, sizes, "uniform")]
        if found:
            return BaselineResult(bits, min(each.latency_s(costs) for each in found))
    return None


def pipeedge(setting: Setting) -> BaselineResult | None:
    """Partition with the least slowest prefill stage, the batch split by stages in both phases.

    None: does not fit.
    """
    size = math.ceil(setting.workload.global_batch / len(setting.cluster.devices))
    for bits in reversed(setting.bits):
        costs = setting.costs(bits)
        found = list(_solved(costs, MicroBatches(size, size), "pipeedge"))
        if found:
            best = min(found, key=lambda each: each.slowest_prefill_s)
            return BaselineResult(bits, best.latency_s(costs))
    return None


def at_bitwidth(setting: Setting, bits: int) -> Setting:
    """The same with one bitwidth to choose from."""
    return replace(setting, bits=(bits,))


def _solved(costs: CostModel, sizes: MicroBatches, method: str) -> Iterator[_Found]:
    """What `method` makes of each device order in which it fits."""
    for chosen in orders_of(costs, all_orders=False):
        problem = costs.problem(chosen, sizes)
        try:
            yield _Found(chosen, sizes, problem, solve(problem, method=method))
        except InfeasibleError:
            continue
