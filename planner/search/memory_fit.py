"""Choices that fit memory: micro-batch sizes for a device order, and sets of devices for a model.

Every part of a stage's memory grows with the micro-batches or stays as it is. So the smallest sizes
decide whether anything fits, and the greatest that fits is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cluster.device import Device
from planner.costs.model import CostModel, grouped
from planner.micro_batches import MicroBatches, micro_batch_pairs, pairs_of_job, pairs_up_to
from planner.optimiser.capacity import explain_infeasible, is_feasible, layer_capacity
from planner.optimiser.problem import AssignmentProblem
from planner.options import PlanOptions
from planner.search.orders.device_sets import canonical_devices, distinct_sets, one_fewer
from planner.search.orders.enumeration import order_tree
from quant.common.errors import DoesNotFitError, SpecError

Fits = Callable[[AssignmentProblem], bool]
"""Whether a method has a plan for a problem; with more memory it has one too."""


@dataclass(frozen=True, eq=False)
class SizedProblem:
    """One device order with one pair of micro-batch sizes."""

    devices: tuple[Device, ...]
    sizes: MicroBatches
    problem: AssignmentProblem


def searched_sizes(costs: CostModel, stages: int) -> Sequence[MicroBatches]:
    """The pairs of sizes to try first; a size that the user fixed replaces the searched one."""
    batch, options = costs.workload.global_batch, costs.options
    for name in ("prefill_micro_batch", "decode_micro_batch"):
        fixed = getattr(options, name)
        if fixed is not None and fixed > batch:
            raise SpecError(f"{name} is {fixed}, more than the batch of {batch}")
    if costs.job is None:
        return _with_fixed(micro_batch_pairs(batch, stages), options)
    return _with_fixed(pairs_of_job(batch, stages, costs.job.lengths.mean_prompt), options)


def smallest_sizes(options: PlanOptions) -> MicroBatches:
    """The pair that needs the least memory: 1, or what the user fixed."""
    return MicroBatches(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)


def problems_near_share(
    costs: CostModel, devices: Sequence[Device], fits: Fits = is_feasible
) -> list[SizedProblem]:
    """The problems of an order that fit, with sizes near the even share of the batch."""
    near = searched_sizes(costs, len(devices))
    return [_sized(costs, devices, each) for each in near if _holds(costs, devices, each, fits)]


def fitting_problems(
    costs: CostModel, devices: Sequence[Device], fits: Fits = is_feasible
) -> list[SizedProblem]:
    """The problems of an order that fit, with `fitting_sizes`."""
    return [_sized(costs, devices, each) for each in fitting_sizes(costs, devices, fits)]


def fitting_sizes(
    costs: CostModel, devices: Sequence[Device], fits: Fits = is_feasible
) -> list[MicroBatches]:
    """The sizes with which an order fits; empty only where no pair of sizes at all does.

    Where all sizes near the even share need too much memory, smaller ones are taken.
    """
    near = searched_sizes(costs, len(devices))
    found = [each for each in near if _holds(costs, devices, each, fits)]
    if found or not _holds(costs, devices, smallest_sizes(costs.options), fits):
        return found
    smaller = _smaller_sizes(costs, devices, fits)
    return [each for each in smaller if _holds(costs, devices, each, fits)]


def equal_problems(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits, parts: int = 1
) -> list[SizedProblem]:
    """The problems of all orders that fit with one size in both phases.

    The size is a stage's share of the batch, divided into `parts`, unless sizes are fixed.
    """
    sized = (_sized(costs, order, _equal_sizes(costs, len(order), parts)) for order in orders)
    return [each for each in sized if fits(each.problem)]


def smaller_equal_problems(
    costs: CostModel, orders: Sequence[Sequence[Device]], fits: Fits
) -> list[SizedProblem]:
    """The problems of `equal_problems` with the share halved until some order fits."""
    parts = 1
    while True:
        found = equal_problems(costs, orders, fits, parts)
        if found or parts >= costs.workload.global_batch:
            return found
        parts *= 2


def fits_somehow(costs: CostModel) -> bool:
    """Whether all devices of the cluster together have a plan, at the smallest micro-batches."""
    return any(placed.has_room(devices, sizes) for placed, devices, sizes in _smallest(costs))


def fitting_sets(costs: CostModel) -> list[tuple[Device, ...]]:
    """All devices if they have a plan, else the largest sets that have, if devices may be left out.

    Raises `DoesNotFitError` where there is none.
    """
    if fits_somehow(costs):
        return [costs.cluster.devices]
    if costs.options.keep_all_devices:
        raise misfit(costs)
    useful = _useful(costs)
    sets = [useful]
    while sets:
        found = [each for each in sets if fits_somehow(_with_devices(costs, each))]
        if found:
            return found
        sets = _narrower(costs, sets)
    raise misfit(_with_devices(costs, useful))


def misfit(costs: CostModel) -> DoesNotFitError:
    """The error that says why all devices have no plan, with figures and without remedies."""
    smallest = (_sized(*each) for each in _smallest(costs))
    closest = max(smallest, key=lambda each: each.problem.memory_bytes.sum())
    why = explain_infeasible(closest.problem, [device.label for device in closest.devices])
    sizes = closest.sizes
    return DoesNotFitError(
        f"{costs.shape.name} does not fit with micro-batches of {sizes.prefill} (prefill) and "
        f"{sizes.decode} (decode), the smallest allowed: {why}"
        f"{_of_ranks(closest.devices)}{_kept_free(costs)}"
    )


def _of_ranks(devices: Sequence[Device]) -> str:
    """Say what the figures of groups are of."""
    grouped = any(device.degree > 1 for device in devices)
    return " (of a group these are the bytes of one rank)" if grouped else ""


def _kept_free(costs: CostModel) -> str:
    """Say which share of memory the figures leave out."""
    if not any(costs.limit_bytes(device) < device.memory_bytes for device in costs.cluster.devices):
        return ""
    return f"; {costs.options.memory_margin:.3g} of each GPU's memory is kept free (memory_margin)"


def heads_of(costs: CostModel) -> list[CostModel]:
    """The costs with each place to try for the LM head; a single device has no choice."""
    heads = ("last", "first") if costs.options.head == "auto" else (costs.options.head,)
    if len(costs.cluster.devices) == 1:
        heads = ("last",)
    return [replace(costs, head_on_first=head == "first") for head in heads]


def _with_fixed(pairs: Sequence[MicroBatches], options: PlanOptions) -> list[MicroBatches]:
    """The distinct pairs that are left with the user's sizes in place."""
    fixed = {
        MicroBatches(
            options.prefill_micro_batch or pair.prefill, options.decode_micro_batch or pair.decode
        )
        for pair in pairs
    }
    return sorted(fixed, key=lambda pair: (pair.decode, pair.prefill))


def _sized(costs: CostModel, devices: Sequence[Device], sizes: MicroBatches) -> SizedProblem:
    problem = grouped(costs.problem(devices, sizes), costs.options.group)
    return SizedProblem(tuple(devices), sizes, problem)


def _holds(costs: CostModel, devices: Sequence[Device], sizes: MicroBatches, fits: Fits) -> bool:
    """Whether memory allows these sizes; it is the same for a batch as for a job, whose passes take
    long to count.
    """
    if fits is is_feasible:
        return costs.has_room(devices, sizes)
    return fits(_sized(costs.of_batch, devices, sizes).problem)


def _smaller_sizes(
    costs: CostModel, devices: Sequence[Device], fits: Fits
) -> Sequence[MicroBatches]:
    """The pairs from the greatest decode size that fits downwards."""
    least, batch = smallest_sizes(costs.options), costs.workload.global_batch

    def decodes(size: int) -> bool:
        return _holds(costs, devices, replace(least, decode=size), fits)

    most = costs.options.decode_micro_batch or _greatest(batch, decodes)
    return _with_fixed(pairs_up_to(batch, most), costs.options)


def _greatest(limit: int, holds: Callable[[int], bool]) -> int:
    """The greatest size up to `limit` for which `holds` is true, as it is for all smaller ones."""
    return bisect_left(range(2, limit + 1), True, key=lambda size: not holds(size)) + 1


def _equal_sizes(costs: CostModel, stages: int, parts: int) -> MicroBatches:
    """One size for both phases: a stage's share of the batch, divided into `parts`."""
    options = costs.options
    share = -(-costs.workload.global_batch // (stages * parts))
    return MicroBatches(options.prefill_micro_batch or share, options.decode_micro_batch or share)


def _smallest(costs: CostModel) -> Iterator[tuple[CostModel, tuple[Device, ...], MicroBatches]]:
    """Yield an order for each choice of the devices at both ends and of the head's place, with the
    smallest sizes. The order of the devices between them changes no memory.
    """
    sizes = smallest_sizes(costs.options)
    for placed in heads_of(costs.of_batch):
        for devices in end_choices(costs):
            yield placed, devices, sizes


def end_choices(costs: CostModel) -> Iterator[tuple[Device, ...]]:
    """Yield one order of all devices for each pair of kinds at the ends, on which alone it depends
    what fits.
    """
    devices = canonical_devices(costs.cluster.devices)
    for part in order_tree(devices, costs.options.all_orders).by_ends().values():
        yield tuple(devices[index] for index in part.example())


def _with_devices(costs: CostModel, devices: tuple[Device, ...]) -> CostModel:
    return replace(costs, cluster=replace(costs.cluster, devices=devices))


def _useful(costs: CostModel) -> tuple[Device, ...]:
    """The devices that can hold a layer between others; all of them where none can."""
    kinds = {device.cost_kind: device for device in costs.cluster.devices}
    held = {kind: _held_between(costs, device) for kind, device in kinds.items()}
    useful = tuple(d for d in costs.cluster.devices if held[d.cost_kind] > 0)
    return useful or costs.cluster.devices


def _held_between(costs: CostModel, device: Device) -> int:
    """Count the layers that fit on the middle one of three such devices."""
    three = [replace(device, index=device.index + step) for step in range(3)]
    return int(
        layer_capacity(_sized(costs.of_batch, three, smallest_sizes(costs.options)).problem)[1]
    )


def _narrower(costs: CostModel, sets: Sequence[tuple[Device, ...]]) -> list[tuple[Device, ...]]:
    """The sets with one device fewer that fit in some order, or of which one device does alone."""
    fewer = distinct_sets(each for devices in sets for each in one_fewer(devices))
    return [devices for devices in fewer if _fits_in_any_order(costs, devices)]


def _fits_in_any_order(costs: CostModel, devices: tuple[Device, ...]) -> bool:
    anyhow = replace(costs, options=replace(costs.options, all_orders=True))
    alone = ((device,) for device in {device.cost_kind: device for device in devices}.values())
    return any(fits_somehow(_with_devices(anyhow, each)) for each in (devices, *alone))
