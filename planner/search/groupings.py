"""Which devices of a node form tensor-parallel groups: the groupings that a search tries.

Groups of 1, 2, 4 or 8 equal devices of one node are planned as single devices, so that a grouping
is a set of devices to the search. Where groupings are few, all are tried; else those that use one
degree for all devices of a kind, and from the best plan on those with two groups joined, or with
one parted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.cluster.spec import equal_devices, group_of, ungrouped
from planner.costs.model import CostModel
from planner.model.tensor_parallel import possible_degrees, refusal
from planner.options import AUTO
from planner.search.memory_fit import fitting_sets, misfit
from planner.search.orders import distinct_sets
from quant.common.errors import DoesNotFitError, SpecError

MOST_GROUPINGS = 48
"""Groupings that are tried at first; of more only the even ones."""

Sizes = tuple[int, ...]
"""Degrees of the groups of some equal devices, descending."""


def degrees_of(costs: CostModel) -> tuple[int, ...]:
    """The degrees asked for, or all that the model can be divided by; SpecError for none."""
    asked = costs.options.tensor_parallel
    if asked == AUTO:
        return possible_degrees(costs.shape)
    if (problem := refusal(costs.shape, int(asked))) is not None:
        raise SpecError(problem)
    return (int(asked),)


def first_sets(costs: CostModel) -> list[tuple[Device, ...]]:
    """Every grouping with its devices that fit; `DoesNotFitError` where there is none."""
    if costs.options.tensor_parallel == 1:
        return fitting_sets(costs)
    found: list[tuple[Device, ...]] = []
    for devices in groupings(costs):
        grouped = replace(costs, cluster=replace(costs.cluster, devices=devices))
        try:
            found += fitting_sets(grouped)
        except DoesNotFitError:
            if costs.options.tensor_parallel != AUTO:
                raise
    if not found:
        raise misfit(costs)
    return distinct_sets(found)


def groupings(costs: CostModel) -> list[tuple[Device, ...]]:
    """The devices in each grouping to try first, larger groups later; SpecError where no node can
    form one.
    """
    degrees = degrees_of(costs)
    pools = equal_devices(costs.cluster)
    if costs.options.tensor_parallel != AUTO:
        devices = tuple(unused_devices(costs, ()))
        if not devices:
            most = max(map(len, pools))
            raise SpecError(
                f"tensor_parallel is {degrees[0]}, but no node of cluster {costs.cluster.name} has "
                f"so many equal devices (at most {most}); use auto or a smaller one"
            )
        return [devices]
    return distinct_sets(
        [each for pool, sizes in zip(pools, chosen, strict=True) for each in _groups(pool, sizes)]
        for chosen in _choices(pools, degrees)
    )


def neighbours(costs: CostModel, devices: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """Yield the sets with two equal groups of `devices` joined, or one parted."""
    if costs.options.tensor_parallel != AUTO:
        return
    degrees = degrees_of(costs)
    for kind in dict.fromkeys((d.node, d.cost_kind) for d in devices):
        alike = [d for d in devices if (d.node, d.cost_kind) == kind]
        others = [d for d in devices if (d.node, d.cost_kind) != kind]
        first, *more = alike
        if more and 2 * first.degree in degrees:
            joined = group_of((*first.members, *more[0].members))
            yield (*others, joined, *more[1:])
        if first.degree // 2 in degrees:
            half = first.degree // 2
            parts = group_of(first.members[:half]), group_of(first.members[half:])
            yield (*others, *parts, *more)


def unused_devices(costs: CostModel, devices: Sequence[Device]) -> list[Device]:
    """The cluster's devices that are in none of `devices`, in groups of the degree asked for."""
    used = {device.name for device in ungrouped(devices)}
    left = tuple(d for d in ungrouped(costs.cluster.devices) if d.name not in used)
    asked = costs.options.tensor_parallel
    if not left or asked in (1, AUTO):
        return list(left)
    pools = equal_devices(replace(costs.cluster, devices=left))
    every = [d for pool in pools for d in _groups(pool, _even(len(pool), (1, int(asked))))]
    return [device for device in every if device.degree == asked]


def _choices(
    pools: Sequence[Sequence[Device]], degrees: Sequence[int]
) -> Iterator[tuple[Sizes, ...]]:
    """Yield the sizes of groups in each pool: all choices, or one degree a kind, or for all, as
    many as there may be.
    """
    every = [list(_partitions(len(pool), degrees)) for pool in pools]
    kinds: list[Hashable] = [pool[0].cost_kind for pool in pools]
    if math.prod(map(len, every)) <= MOST_GROUPINGS:
        yield from itertools.product(*every)
        return
    own = list(dict.fromkeys(kinds))
    for chosen in itertools.product(degrees, repeat=len(own)):
        if len(degrees) ** len(own) > MOST_GROUPINGS and len(set(chosen)) > 1:
            continue
        largest = dict(zip(own, chosen, strict=True))
        yield tuple(
            _even(len(pool), [each for each in degrees if each <= largest[kind]])
            for pool, kind in zip(pools, kinds, strict=True)
        )


def _partitions(count: int, degrees: Sequence[int]) -> Iterator[Sizes]:
    if count == 0:
        yield ()
    for degree in sorted(degrees, reverse=True):
        smaller = [each for each in degrees if each <= degree]
        if degree <= count:
            yield from ((degree, *rest) for rest in _partitions(count - degree, smaller))


def _even(count: int, degrees: Sequence[int]) -> Sizes:
    sizes: list[int] = []
    for degree in sorted(degrees, reverse=True):
        sizes += [degree] * ((count - sum(sizes)) // degree)
    return tuple(sizes)


def _groups(pool: Sequence[Device], sizes: Sizes) -> list[Device]:
    ends = itertools.accumulate(sizes)
    return [group_of(pool[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
