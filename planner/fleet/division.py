"""The division of a cluster into pipelines: an integer programme over priced make-ups. Nodes are
packed exactly: a pool of equal devices is cut by one of the ways to divide it into blocks of the
sizes that occur, and no more blocks are used than are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from planner.cluster.device import Device
from planner.cluster.groups import ungrouped
from planner.cluster.spec import ClusterSpec
from planner.fleet.makeups import MakeUp, Pools, example_devices
from planner.fleet.pricing import Priced
from planner.plan.builder import build_plan
from planner.plan.origin import origin_of
from planner.plan.spec import PlanSpec, StagePlan
from planner.profiles.perplexity_fit import with_quality
from planner.profiles.sensitivity import Omega, planned_importance
from planner.search.request import files_of_costs
from quant.common.errors import InfeasibleError

MOST_CUTS = 300
"""Ways to cut a pool; of more only those of one size each, with a rest."""

MASTER_GAP = 1e-3

Cut = tuple[int, ...]
"""Sizes of the blocks of a pool, descending."""


@dataclass(frozen=True)
class FleetDivision:
    """How many pipelines of each column [C], the cuts of pools by kind and size, the value."""

    counts: tuple[int, ...]
    cuts: Mapping[tuple[int, int], tuple[Cut, ...]]
    value: float
    bound: float

    @property
    def gap(self) -> float:
        return max(0.0, (self.bound - self.value) / self.bound) if self.bound > 0 else 0.0


@dataclass(frozen=True)
class Column:
    """A priced make-up: tokens per second, and the value that is maximised."""

    make_up: MakeUp
    tokens_per_s: float
    value: float


def divide(
    columns: Sequence[Column],
    pools: Mapping[tuple[int, int], int],
    number: int | None = None,
    least_tokens_per_s: float = 0.0,
    time_limit_s: float = 5.0,
) -> FleetDivision:
    """Count the `columns` of most value in `pools` (how many of each); InfeasibleError if none."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import

    sizes = sorted({(block.kind, block.size) for c in columns for block in c.make_up})
    ways = {pool: _cuts(pool[1], [s for k, s in sizes if k == pool[0]]) for pool in pools}
    cuts = [(pool, cut) for pool, every in ways.items() for cut in every]
    columns_n, n = len(columns), len(columns) + len(cuts)
    used = np.zeros((len(sizes), n))
    for j, column in enumerate(columns):
        for block in column.make_up:
            used[sizes.index((block.kind, block.size)), j] += 1
    for j, ((kind, _), cut) in enumerate(cuts):
        for size, count in Counter(cut).items():
            used[sizes.index((kind, size)), columns_n + j] -= count
    taken = np.zeros((len(pools), n))
    for row, pool in enumerate(pools):
        taken[row, columns_n:] = [own == pool for own, _ in cuts]
    total = np.zeros((2, n))
    total[0, :columns_n], total[1, :columns_n] = 1.0, [c.tokens_per_s for c in columns]
    most = np.inf if number is None else number
    value = np.zeros(n)
    value[:columns_n] = [column.value for column in columns]
    scale = float(np.abs(value).max()) or 1.0
    found = milp(
        -value / scale,
        integrality=np.ones(n, dtype=int),
        bounds=Bounds(0, np.inf),
        constraints=[
            LinearConstraint(used, -np.inf, 0.0),
            LinearConstraint(taken, 0.0, np.array(list(pools.values()), dtype=float)),
            LinearConstraint(total, [number or 1, least_tokens_per_s], [most, np.inf]),
        ],
        options={"time_limit": time_limit_s, "mip_rel_gap": MASTER_GAP},
    )
    if found.x is None:
        raise InfeasibleError(f"no choice of pipelines makes {number or 'one'} of these devices")
    counts = np.round(found.x).astype(int)
    chosen: dict[tuple[int, int], tuple[Cut, ...]] = {}
    for (pool, cut), count in zip(cuts, counts[columns_n:].tolist(), strict=True):
        chosen[pool] = chosen.get(pool, ()) + count * (cut,)
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
    return FleetDivision(
        tuple(int(each) for each in counts[:columns_n]),
        chosen,
        -float(found.fun) * scale,
        -float(bound) * scale,
    )


def _cuts(size: int, sizes: Sequence[int]) -> list[Cut]:
    """List ways to divide `size` devices into blocks of `sizes` that no block can be added to."""
    found = []
    for cut in _sums(size, sorted(sizes, reverse=True)):
        found.append(cut)
        if len(found) > MOST_CUTS:
            return [(each,) * (size // each) for each in sizes if each <= size]
    return found


def _sums(left: int, sizes: Sequence[int]) -> Iterator[Cut]:
    if not any(size <= left for size in sizes):
        yield ()
        return
    for number, size in enumerate(sizes):
        if size <= left:
            yield from ((size, *rest) for rest in _sums(left - size, sizes[number:]))


Placing = tuple[int, tuple[tuple[Device, ...], ...]]
"""A pipeline: the number of its make-up, and the devices of each of its blocks."""


def place(division: FleetDivision, make_ups: Sequence[MakeUp], pools: Pools) -> Iterator[Placing]:
    free = _free_blocks(division, pools)
    columns = (column for column, count in enumerate(division.counts) for _ in range(count))
    for column in columns:
        blocks: list[tuple[Device, ...]] = []
        for block in make_ups[column]:
            nodes = {devices[0].node for devices in blocks}
            left = free[block.kind, block.size]
            near = next((b for b in left if b[0].node in nodes), left[0])
            left.remove(near)
            blocks.append(near)
        yield column, tuple(blocks)


def _free_blocks(
    division: FleetDivision, pools: Pools
) -> dict[tuple[int, int], list[tuple[Device, ...]]]:
    waiting = {pool: iter(cuts) for pool, cuts in division.cuts.items()}
    free: dict[tuple[int, int], list[tuple[Device, ...]]] = {}
    for pool in pools.pools:
        first = 0
        for size in next(waiting[pool.kind, len(pool.devices)], ()):
            block = pool.devices[first : first + size]
            free.setdefault((pool.kind, size), []).append(block)
            first += size
    return free


def fleet_plans(
    cluster: ClusterSpec,
    source: str,
    omega: Omega,
    chosen: Sequence[Priced],
    placed: Iterable[Placing],
) -> Iterator[PlanSpec]:
    """Yield the plan of every pipeline: one is built for each make-up, its copies are moved."""
    nodes: dict[str, list[Device]] = {}
    for device in cluster.devices:
        nodes.setdefault(device.node, []).append(device)
    built: dict[int, PlanSpec] = {}
    for column, blocks in placed:
        priced = chosen[column]
        if column not in built:
            built[column] = _example_plan(priced, source, omega)
        used = list(chain.from_iterable(blocks))
        pairs = zip(priced.make_up, blocks, strict=True)
        kinds = {block.kind: devices[0] for block, devices in pairs}
        examples = ungrouped(example_devices(priced.make_up, kinds))
        names = {one.name: device.name for one, device in zip(examples, used, strict=True)}
        whole = tuple(d for node in dict.fromkeys(d.node for d in used) for d in nodes[node])
        others = [device.name for device in whole if device not in used]
        options = priced.costs.options
        origin = origin_of(replace(cluster, devices=whole), options, files_of_costs(options))
        part = replace(cluster, devices=tuple(device for device in whole if device in used))
        yield replace(
            _renamed(built[column], names),
            cluster=cluster.name,
            cluster_fingerprint=part.fingerprint(),
            origin=origin and origin.without(others),  # other pipelines have these
        )


def _example_plan(priced: Priced, source: str, omega: Omega) -> PlanSpec:
    costs = priced.costs
    plan = build_plan(costs, source, priced.solution, omega.source)
    plan = with_quality(plan, omega, plan.solver.sensitivity, None)
    return replace(plan, importance=planned_importance(plan, costs.options, costs.shape))


def _renamed(plan: PlanSpec, names: Mapping[str, str]) -> PlanSpec:

    def moved(stage: StagePlan) -> StagePlan:
        device, devices = names[stage.device], tuple(names[name] for name in stage.devices)
        return replace(stage, device=device, node=device.rpartition("/")[0], devices=devices)

    unused = tuple(names[name] for name in plan.unused_devices)
    return replace(plan, stages=tuple(map(moved, plan.stages)), unused_devices=unused)
