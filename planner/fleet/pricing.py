"""The price of a make-up: the best plan of a pipeline of it, and the tokens per second of that."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.costs.stored_bytes import layer_weight_bytes
from planner.fleet.makeups import MakeUp, Pools, example_devices
from planner.model.tensor_parallel import DEGREES
from planner.plan.builder import Solution, forecast_solution, solution_quality
from planner.search.candidate_search import LEAST_SOLVE_S
from planner.search.fitting import fits_somehow
from planner.search.in_flight import RANKING_PASSES, plan_solver
from planner.search.qualities import TIE_BREAK, seconds_per_sensitivity
from planner.workload import MAX_REQUESTS, Job
from quant.common.errors import InfeasibleError

ONE_S, FEW_DEVICES = 0.6, 6
"""Seconds after which the search for a plan of one make-up takes the best so far, where it has so
few devices; with more of them as many more seconds."""


@dataclass(frozen=True, eq=False)
class Priced:
    make_up: MakeUp
    costs: CostModel
    solution: Solution
    tokens_per_s: float
    sensitivity: float

    @property
    def per_device(self) -> float:
        return self.tokens_per_s / sum(block.size for block in self.make_up)


@dataclass(eq=False)
class Pricing:
    """Price make-ups until `limit_s` after `began_s`; `shares` of the job, by kind, of a device."""

    costs: CostModel
    job: Job
    pools: Pools
    shares: tuple[float, ...]
    began_s: float
    limit_s: float
    clock: Callable[[], float]
    priced: list[Priced] = field(default_factory=list)
    _tried: set[tuple[MakeUp, float]] = field(default_factory=set)
    _unfit: set[MakeUp] = field(default_factory=set)
    _seconds: dict[MakeUp, float] = field(default_factory=dict)

    def of_bits(self, bits: tuple[int, ...]) -> Pricing:
        """Return the same for these bitwidths alone, in the time that is left."""
        costs = replace(self.costs, usable_bits=bits)
        return replace(self, costs=costs, priced=[], _tried=set(), _unfit=set())

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.began_s + self.limit_s

    @property
    def worst_sensitivity(self) -> float:
        """Sum with the fewest bits; 1 where bits cost none."""
        return float(self.costs.sensitivity.max(axis=1).sum()) or 1.0

    def costs_of(self, make_up: MakeUp) -> CostModel:
        devices = example_devices(make_up, self.pools.kinds)
        share = sum(self.shares[block.kind] * block.size for block in make_up)
        job = replace(
            self.job, prompts=max(1, min(self.job.prompts, round(share * self.job.prompts)))
        )
        options = replace(self.costs.options, keep_all_devices=True, tensor_parallel=1)
        cluster = replace(self.costs.cluster, devices=devices)
        return replace(self.costs, cluster=cluster, job=job, options=options)

    def speed(self, make_up: MakeUp) -> float:
        alike = [(block.kind, block.size) for block in make_up]
        own = (
            each.tokens_per_s
            for each in self.priced
            if [(block.kind, block.size) for block in each.make_up] == alike
        )
        return max(own, default=0.0)

    def fits(self, make_up: MakeUp) -> bool:
        return fits_somehow(self.costs_of(make_up))

    def price(self, make_up: MakeUp, worth: float = TIE_BREAK) -> Priced | None:
        """Plan a pipeline at price `worth`; None if it does not fit, is known, or time is up."""
        same = tuple(sorted(make_up, key=repr))
        if self.is_over or (same, worth) in self._tried or same in self._unfit:
            return None
        self._tried.add((same, worth))
        costs = self.costs_of(make_up)
        costs = replace(costs, theta=worth * self._seconds_per_sensitivity(same, costs))
        try:
            solve = plan_solver(costs, self.clock)
            solution = solve(costs.theta, quick=True, limit_s=self._limit_s(make_up))
        except InfeasibleError:
            self._unfit.add(same)
            return None
        forecast = forecast_solution(costs, solution, RANKING_PASSES)
        self._seconds.setdefault(same, forecast.seconds)
        quality = solution_quality(costs, solution)
        self.priced.append(Priced(make_up, costs, solution, forecast.tokens_per_s, quality))
        return self.priced[-1]

    def _limit_s(self, make_up: MakeUp) -> float:
        devices = sum(block.size // block.degree for block in make_up)
        left_s = self.began_s + self.limit_s - self.clock()
        return max(LEAST_SOLVE_S, min(ONE_S * max(1.0, devices / FEW_DEVICES), left_s))

    def _seconds_per_sensitivity(self, make_up: MakeUp, costs: CostModel) -> float:
        worst = float(costs.sensitivity.max(axis=1).sum())
        if make_up in self._seconds and worst:
            return self._seconds[make_up] / worst
        return seconds_per_sensitivity(costs)


def ceiling_tokens_per_s(costs: CostModel, job: Job, devices: Sequence[Device]) -> float:
    """Bound tokens per second of any division of `devices`. A device that computes the share f of
    the layers, in T seconds a token for all of them, lets 1 / (f T) tokens pass, so a cluster
    generates at most the sum of 1 / T: with the fastest bitwidth, the largest micro-batch beside
    one layer, and hops, embedding and head for nothing. A group of k ranks computes no more than k
    devices alone.
    """
    kinds: dict[object, float] = {}
    total = 0.0
    for device in devices:
        if device.cost_kind not in kinds:
            kinds[device.cost_kind] = device_tokens_per_s(costs, job, device)
        total += kinds[device.cost_kind]
    return total


def device_tokens_per_s(costs: CostModel, job: Job, device: Device) -> float:
    """Rate of one device that computes all layers, of which it need hold but one."""
    dtype, lengths, shared = costs.dtype(device), job.lengths, job.heads.shared_tokens
    most = _most_requests(costs, job, device)
    sizes = [*(1 << power for power in range(most.bit_length())), most]
    prompt, context = max(1, round(lengths.mean_prompt)), round(lengths.mean_context)
    whole_s = 0.0
    for kind, count in enumerate(costs.shape.kind_counts):
        layer = costs.latency.of_kind(kind)
        whole_s += count * min(
            min(layer.layer_prefill_s(device, bits, n, prompt, dtype, shared) / n for n in sizes)
            + (lengths.mean_output - 1)
            * min(layer.layer_decode_s(device, bits, n, context, dtype) / n for n in sizes)
            for bits in costs.options.bits
        )
    return lengths.mean_output / whole_s


def _most_requests(costs: CostModel, job: Job, device: Device) -> int:
    """Requests of which some one layer keeps all beside it; a rank has what is of some heads."""
    ranks = 1 if costs.options.tensor_parallel == 1 else DEGREES[-1]
    one, most = costs.with_in_flight(job, 1), 1
    for kind, shape in enumerate(costs.shape.kind_shapes):
        kept = one.kv_bytes_per_layer(device, kind)
        limit = costs.limit_bytes(device) - min(
            layer_weight_bytes(shape, bits, device, costs.dtype(device))
            for bits in costs.options.bits
        )
        most = max(most, int(ranks * limit // kept) if kept else MAX_REQUESTS)
    return min(job.prompts, MAX_REQUESTS, most)


MOST_ROWS = 200_000
"""Rows that are simulated one by one; of a longer job the rest goes on at the rate of all."""


def simulate_fleet(pipelines: Sequence[tuple[int, float]], job: Job) -> float:
    """Seconds until the last row is done by pipelines of so many slots and rows a second. A row
    goes to the slot that is free first, for a time in proportion to its answer; while all are free,
    to the fastest pipeline.
    """
    outputs = job.lengths.output_tokens
    mean = job.lengths.mean_output
    rows = min(job.prompts, MOST_ROWS)
    free = [
        (0.0, slots / rows_per_s, index)
        for index, (slots, rows_per_s) in enumerate(pipelines)
        for _ in range(min(slots, rows))
    ]
    heapq.heapify(free)
    last_s = 0.0
    for row in range(rows):
        at_s, row_s, index = free[0]
        done_s = at_s + row_s * outputs[row % len(outputs)] / mean
        heapq.heapreplace(free, (done_s, row_s, index))
        last_s = max(last_s, done_s)
    return last_s + (job.prompts - rows) / sum(rows_per_s for _, rows_per_s in pipelines)
