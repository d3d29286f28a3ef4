"""Choices that fit memory: micro-batch sizes for an order, sets and groups of devices for a model.

Memory grows with the micro-batches, so the smallest sizes decide whether anything fits. Groups of
1, 2, 4 or 8 equal devices of one node are planned as single devices. Where groupings are few, all
are tried; else those of one degree a kind, and from the best plan on with two joined or one parted.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.cluster.device import Device
from planner.cluster.groups import equal_devices, group_of, ungrouped
from planner.costs.model import CostModel
from planner.model.tensor_parallel import possible_degrees, refusal
from planner.optimiser.feasibility import explain_infeasible, is_feasible, layer_capacity
from planner.optimiser.problem import AssignmentProblem
from planner.options import AUTO, PlanOptions
from planner.search.orders import canonical_devices, cost_key, distinct_sets, order_tree
from planner.workload import MicroBatches, micro_batch_pairs, pairs_of_job, pairs_up_to
from quant.common.errors import DoesNotFitError, SpecError

Fits = Callable[[AssignmentProblem], bool]
"""Whether a method has a plan for a problem; with more memory it has one too."""

Refusal = Callable[[CostModel], DoesNotFitError]
"""What is raised where no devices have a plan: `misfit`, or `unexplained`."""


class SizedProblem(NamedTuple):
    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem

    @classmethod
    def of(cls, costs: CostModel, devices: Sequence[Device], sizes: MicroBatches) -> SizedProblem:
        return cls(tuple(devices), sizes, costs.grouped_problem(devices, sizes))


def check_fixed_sizes(costs: CostModel) -> None:
    """Raise SpecError for micro-batches that are fixed and larger than the batch."""
    for name in ("prefill_micro_batch", "decode_micro_batch"):
        fixed, batch = getattr(costs.options, name), costs.workload.global_batch
        if fixed is not None and fixed > batch:
            raise SpecError(f"{name} is {fixed}, more than the batch of {batch}")


def searched_sizes(costs: CostModel, stages: int) -> Sequence[MicroBatches]:
    check_fixed_sizes(costs)
    batch, options = costs.workload.global_batch, costs.options
    if costs.job is None:
        return _with_fixed(micro_batch_pairs(batch, stages), options)
    return _with_fixed(pairs_of_job(batch, stages, costs.job.computed_tokens), options)


def smallest_sizes(options: PlanOptions) -> MicroBatches:
    """The pair that needs the least memory: 1, or what the user fixed."""
    return MicroBatches(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)


def sizes_near_share(costs: CostModel, devices: Sequence[Device], fits: Fits) -> list[MicroBatches]:
    return _holding(costs, devices, searched_sizes(costs, len(devices)), fits)


def fitting_sizes(
    costs: CostModel, devices: Sequence[Device], fits: Fits = is_feasible
) -> list[MicroBatches]:
    """Sizes with which an order fits, smaller ones if none near the even share does; or none."""
    found = sizes_near_share(costs, devices, fits)
    least = smallest_sizes(costs.options)
    if found or not _holds(costs, devices, least, fits):
        return found
    batch = costs.workload.global_batch
    most = costs.options.decode_micro_batch or bisect_left(
        range(1, batch + 1),
        True,
        lo=1,
        key=lambda size: not _holds(costs, devices, replace(least, decode=size), fits),
    )
    smaller = _with_fixed(pairs_up_to(batch, most), costs.options)
    return _holding(costs, devices, smaller, fits)


def equal_problems(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits, parts: int = 1
) -> Iterator[SizedProblem]:
    """Yield the problems that fit with one size in both phases: a stage's share of the batch over
    `parts`, unless fixed.
    """
    options = costs.options
    for order in orders:
        share = -(-costs.workload.global_batch // (len(order) * parts))
        prefill, decode = options.prefill_micro_batch, options.decode_micro_batch
        sized = SizedProblem.of(costs, order, MicroBatches(prefill or share, decode or share))
        if fits(sized.problem):
            yield sized


def smaller_equal_problems(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> Iterator[SizedProblem]:
    """As `equal_problems`, with the share halved until some order fits."""
    parts, is_found = 1, False
    while not is_found:
        for each in equal_problems(costs, orders, fits, parts):
            is_found = True
            yield each
        if parts >= costs.workload.global_batch:
            return
        parts *= 2


def fits_somehow(costs: CostModel) -> bool:
    """Whether all devices of the cluster together have a plan, at the smallest micro-batches."""
    return any(placed.has_room(devices, sizes) for placed, devices, sizes in _smallest(costs))


def fitting_sets(costs: CostModel, refusal: Refusal) -> list[tuple[Device, ...]]:
    """All devices, or the largest sets that have a plan if some may be out; `DoesNotFitError`."""
    if fits_somehow(costs):
        return [costs.cluster.devices]
    if costs.options.keep_all_devices:
        raise refusal(costs)
    useful = _useful(costs)
    sets = [useful]
    while sets:
        found = [each for each in sets if fits_somehow(costs.on(each))]
        if found:
            return found
        fewer = distinct_sets(
            [device for device in devices if device is not dropped]
            for devices in sets
            for dropped in (devices if len(devices) > 1 else ())
        )
        sets = [devices for devices in fewer if _fits_in_any_order(costs, devices)]
    raise refusal(costs.on(useful))


def unexplained(_: CostModel) -> DoesNotFitError:
    """The error without a reason, which takes longer to find than that nothing fits."""
    return DoesNotFitError("the model does not fit")


def misfit(costs: CostModel) -> DoesNotFitError:
    """The error that says why all devices have no plan, with figures and without remedies."""
    smallest = (SizedProblem.of(*each) for each in _smallest(costs))
    closest = max(smallest, key=lambda each: each.problem.memory_bytes.sum())
    names = [device.label for device in closest.devices]
    why = explain_infeasible(closest.problem, names, costs.placing.units.layer_of_unit)
    sizes, devices = closest.sizes, costs.cluster.devices
    if any(device.degree > 1 for device in closest.devices):
        why += " (of a group these are the bytes of one rank"
        has_experts = any(kind.experts for kind in costs.shape.kind_shapes)
        hosts = any(device.host_memory_bytes for device in devices)
        apart = "; its experts stay on its devices, those of single ones may lie in hosts' memory)"
        why += apart if has_experts and hosts else ")"
    if any(costs.limit_bytes(device) < device.memory_bytes for device in devices):
        margin = f"{costs.options.memory_margin:.3g}"
        why += f"; {margin} of each GPU's memory is kept free (memory_margin)"
    return DoesNotFitError(
        f"{costs.shape.name} does not fit with micro-batches of {sizes.prefill} (prefill) and "
        f"{sizes.decode} (decode), the smallest allowed: {why}"
    )


def heads_of(costs: CostModel) -> list[CostModel]:
    """The costs with each place to try for the LM head; a single device has no choice."""
    heads = ("last", "first") if costs.options.head == "auto" else (costs.options.head,)
    if len(costs.cluster.devices) == 1:
        heads = ("last",)
    return [replace(costs, head_on_first=head == "first") for head in heads]


def end_choices(costs: CostModel) -> Iterator[tuple[Device, ...]]:
    """Yield one order for each pair of kinds at the ends, on which alone it depends what fits."""
    devices = canonical_devices(costs.cluster.devices)
    for part in order_tree(devices, costs.options.all_orders).by_ends.values():
        yield tuple(devices[index] for index in part.example)


def _with_fixed(pairs: Sequence[MicroBatches], options: PlanOptions) -> list[MicroBatches]:
    prefill, decode = options.prefill_micro_batch, options.decode_micro_batch
    fixed = {MicroBatches(prefill or pair.prefill, decode or pair.decode) for pair in pairs}
    return sorted(fixed, key=lambda pair: (pair.decode, pair.prefill))


def _holding(
    costs: CostModel, devices: Sequence[Device], pairs: Sequence[MicroBatches], fits: Fits
) -> list[MicroBatches]:
    """Those of some pairs that memory allows: of each decode size prefill sizes up to some."""
    by_decode: dict[int, list[int]] = {}
    for each in pairs:
        by_decode.setdefault(each.decode, []).append(each.prefill)
    allowed, too_many = set[MicroBatches](), math.inf
    for decode, sizes in sorted(by_decode.items()):
        sized = [MicroBatches(size, decode) for size in sorted(sizes) if size < too_many]
        count = bisect_left(sized, True, key=lambda each: not _holds(costs, devices, each, fits))
        allowed.update(sized[:count])
        too_many = sized[count].prefill if count < len(sized) else too_many
    return [each for each in pairs if each in allowed]


def _holds(costs: CostModel, devices: Sequence[Device], sizes: MicroBatches, fits: Fits) -> bool:
    """Whether memory allows these sizes, as of a batch, whose passes are quick to count."""
    if fits is is_feasible:
        return costs.has_room(devices, sizes)
    return fits(costs.of_batch.grouped_problem(devices, sizes))


def _smallest(costs: CostModel) -> Iterator[tuple[CostModel, tuple[Device, ...], MicroBatches]]:
    """Yield an order for each choice of the ends and the head's place, with the smallest sizes."""
    sizes = smallest_sizes(costs.options)
    for placed in heads_of(costs.of_batch):
        for devices in end_choices(costs):
            yield placed, devices, sizes


def _useful(costs: CostModel) -> tuple[Device, ...]:
    held = {}
    for kind, device in {each.cost_kind: each for each in costs.cluster.devices}.items():
        three = [replace(device, index=device.index + step) for step in range(3)]
        problem = costs.of_batch.grouped_problem(three, smallest_sizes(costs.options))
        held[kind] = int(layer_capacity(problem)[1])  # of the middle one
    useful = tuple(d for d in costs.cluster.devices if held[d.cost_kind] > 0)
    return useful or costs.cluster.devices


def _fits_in_any_order(costs: CostModel, devices: tuple[Device, ...]) -> bool:
    anyhow = replace(costs, options=replace(costs.options, all_orders=True))
    alone = ((device,) for device in {device.cost_kind: device for device in devices}.values())
    return any(fits_somehow(anyhow.on(each)) for each in (devices, *alone))


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


def first_sets(costs: CostModel, refusal: Refusal = misfit) -> Iterator[tuple[Device, ...]]:
    """Yield each grouping with its devices that fit; the `refusal` where there is none."""
    if costs.options.tensor_parallel == 1:
        yield from fitting_sets(costs, refusal)
        return
    of_one = unexplained if costs.options.tensor_parallel == AUTO else refusal
    found = set[Hashable]()
    for grouped in groupings(costs):
        try:
            sets = distinct_sets(fitting_sets(costs.on(grouped), of_one))
        except DoesNotFitError:
            if costs.options.tensor_parallel != AUTO:
                raise
            continue
        new = {cost_key(devices): devices for devices in sets if cost_key(devices) not in found}
        found |= new.keys()
        yield from new.values()
    if not found:
        raise refusal(costs)


def groupings(costs: CostModel) -> list[tuple[Device, ...]]:
    """The devices of each grouping to try first, larger groups later; SpecError where none is."""
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
        if more and 2 * first.degree in _tried(first, degrees):
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
    every = [list(_partitions(len(pool), _tried(pool[0], degrees))) for pool in pools]
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
            _even(len(pool), [n for n in _tried(pool[0], degrees) if n <= largest[kind]])
            for pool, kind in zip(pools, kinds, strict=True)
        )


def _tried(device: Device, degrees: Sequence[int]) -> Sequence[int]:
    """Those that `auto` tries: CPUs pass a stage on in less time than ranks of theirs add up."""
    return (1,) if device.accelerator.is_cpu else degrees


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
