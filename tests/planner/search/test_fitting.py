"""Models that fit are planned, and named remedies fit: against trying every possibility."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from planner.optimiser.feasibility import is_feasible
from planner.optimiser.solve import even_sizes
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.search.fitting import searched_sizes, sizes_near_share
from planner.search.remedies import remedies_of_memory
from planner.search.request import PlanningRequest, costs_of
from planner.workload import MicroBatches, Workload, pairs_up_to
from quant.common.errors import DoesNotFitError, InfeasibleError
from quant.common.units import MIB
from tests.planner import plan_alone

SHAPE = model_shape("opt-125m")
SEEDS = range(24)
RARE_SEEDS = [pytest.param(seed, marks=pytest.mark.rare) for seed in SEEDS if seed % 3]


def planned(request: PlanningRequest) -> PlanSpec:
    return plan_alone.find_plan(
        request.cluster, request.shape, "m", request.workload, request.options
    ).plan


def test_sizes_are_those_for_which_each_has_room() -> None:
    """Larger prefills may be listed with larger decode sizes only."""
    cluster, options = ClusterSpec.from_counts(["T4"], [1]), PlanOptions(bits=(4,), theta=0.0)
    counts = set()
    for mib in range(1300, 2100, 100):
        devices = (replace(cluster.devices[0], memory_bytes=mib * MIB),)
        request = PlanningRequest(
            replace(cluster, devices=devices), SHAPE, Workload(32, 512, 8), options
        )
        costs, _ = costs_of(request)
        listed = searched_sizes(costs, 1)
        roomy = [each for each in listed if is_feasible(costs.problem(devices, each))]
        assert sizes_near_share(costs, devices, is_feasible) == roomy
        counts.add(len(roomy))
    assert {0, len(listed)} < counts


@dataclass(frozen=True)
class Place:
    """One device order with a place for the head."""

    costs: CostModel
    devices: tuple[Device, ...]

    def spare_bytes(self, sizes: MicroBatches) -> list[int]:
        """What every stage has left for layers."""
        return [
            device.memory_bytes
            - round(self.costs.options.memory_margin * device.memory_bytes)
            - self.costs.fixed_memory(self.devices, stage, sizes).total
            for stage, device in enumerate(self.devices)
        ]

    def layer_bytes(self, bits: int) -> list[int]:
        """One layer and its keys and values on every stage."""
        costs = self.costs
        return [
            layer_weight_bytes(SHAPE, bits, device, costs.dtype(device))
            + costs.kv_bytes_per_layer(device)
            for device in self.devices
        ]

    def fits(self, sizes: MicroBatches) -> bool:
        """Whether the method of the options has a plan, counted layer by layer."""
        spare, options = self.spare_bytes(sizes), self.costs.options
        if min(spare) < 0:
            return False
        group = options.group if options.method == "auto" else 1
        by_bits = [
            [
                free // (group * each)
                for free, each in zip(spare, self.layer_bytes(bits), strict=True)
            ]
            for bits in options.bits
        ]
        units = SHAPE.layers // group
        if options.method == "uniform":
            wanted = even_sizes(SHAPE.layers, len(spare))
            return any((np.array(held) >= wanted).all() for held in by_bits)
        if options.method == "auto":
            by_bits = [[max(held) for held in zip(*by_bits, strict=True)]]
        return any(min(h[0], h[-1]) >= 1 and sum(h) >= units for h in by_bits)


def together(order: Sequence[Device]) -> bool:
    """Whether equal devices of a node follow one another."""
    kinds = [(device.node, device.memory_bytes) for device in order]
    changes = sum(one != other for one, other in pairwise(kinds))
    return changes + 1 == len(set(kinds))


def places(request: PlanningRequest) -> Iterator[Place]:
    """Every order of every set of devices that the options allow, with every place of the head."""
    options, devices = request.options, request.cluster.devices
    costs, _ = costs_of(PlanningRequest(request.cluster, SHAPE, request.workload, options))
    searched = options.method == "auto"
    fewest = 1 if searched and not options.keep_all_devices else len(devices)
    heads = {"auto": (False, True), "first": (True,), "last": (False,)}[options.head]
    for count in range(fewest, len(devices) + 1):
        for subset in combinations(devices, count):
            for order in permutations(subset):
                if (options.all_orders and searched) or together(order):
                    for first in heads if searched and count > 1 else (False,):
                        yield Place(replace(costs, head_on_first=first), order)


def fits_brutally(request: PlanningRequest) -> bool:
    """Whether any place and any sizes of micro-batches fit."""
    batch, options = request.workload.global_batch, request.options
    prefills = [options.prefill_micro_batch] if options.prefill_micro_batch else range(1, batch + 1)
    decodes = [options.decode_micro_batch] if options.decode_micro_batch else range(1, batch + 1)
    pairs = [MicroBatches(prefill, decode) for prefill, decode in product(prefills, decodes)]
    return any(place.fits(pair) for place in places(request) for pair in pairs)


def with_budgets(request: PlanningRequest, budgets: dict[str, int], more: int) -> PlanningRequest:
    """The request with each node's budget, and as many bytes more on every device."""
    devices = tuple(
        replace(device, memory_bytes=budgets[device.node] + more)
        for device in request.cluster.devices
    )
    return replace(request, cluster=replace(request.cluster, devices=devices))


def threshold(request: PlanningRequest, budgets: dict[str, int]) -> int:
    """How many bytes more on every device let the smallest micro-batches fit."""
    options = request.options
    sizes = MicroBatches(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)

    def fits(more: int) -> bool:
        return any(place.fits(sizes) for place in places(with_budgets(request, budgets, more)))

    return bisect_left(range(2**31), True, key=fits)


def small_request(seed: int) -> PlanningRequest:
    """One to three devices with hardly more memory, or a little less, than the model needs."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(5, 13))
    counts = [int(count) for count in ([1], [2], [1, 1], [2, 1], [1, 1, 1])[rng.integers(5)]]
    cluster = ClusterSpec.from_counts(["T4", "V100-32GB", "P100"][: len(counts)], counts)
    method = str(rng.choice(["auto", "auto", "auto", "uniform", "pipeedge"]))

    def fixed() -> int | None:
        return int(rng.integers(1, batch + 1)) if rng.random() < 0.2 else None

    options = PlanOptions(
        theta=1.0,
        bits=((3, 4, 8, 16), (8, 16), (16,))[rng.integers(3)],
        head_bits=(16,),
        method=method,
        group=int(rng.choice([1, 1, 4])),
        all_orders=bool(rng.random() < 0.3),
        head=str(rng.choice(["auto", "first", "last"])),
        keep_all_devices=bool(rng.random() < 0.3),
        prefill_micro_batch=fixed(),
        decode_micro_batch=fixed(),
        memory_margin=0.02 * (seed % 2),
    )
    workload = Workload(batch, int(rng.choice([8, 8, 400])), int(rng.choice([8, 100])))
    request = PlanningRequest(cluster, SHAPE, workload, options)
    budgets = {node: int(rng.uniform(0, 100) * MIB) for node in cluster.nodes}
    more = threshold(request, budgets) + int(rng.uniform(-3, 4) * MIB)
    return with_budgets(request, budgets, more)


def test_the_cases_are_of_every_sort() -> None:
    """Some fit near the even share, some only with smaller micro-batches, some not at all."""
    requests = [small_request(seed) for seed in SEEDS]
    fitting = [request for request in requests if fits_brutally(request)]
    near = [
        any(
            place.fits(pair)
            for place in places(request)
            for pair in searched_sizes(place.costs, len(place.devices))
        )
        for request in fitting
    ]
    assert min(near.count(True), near.count(False)) >= 3
    assert len(requests) - len(fitting) >= 5


@pytest.mark.parametrize(
    "seed",
    [*SEEDS[::6], *(pytest.param(s, marks=pytest.mark.rare) for s in SEEDS[3::6]), *RARE_SEEDS],
)
def test_what_fits_is_planned_and_remedies_are_true(seed: int) -> None:
    request = small_request(seed)
    if fits_brutally(request):
        assert max(s.memory_bytes - s.memory_limit_bytes for s in planned(request).stages) <= 0
        return
    with pytest.raises(DoesNotFitError) as caught:
        planned(request)
    for remedy in remedies_of_memory(request):
        assert remedy.text in str(caught.value)
        assert fits_brutally(remedy.request)
        planned(remedy.request)
        batch = remedy.request.workload.global_batch
        if batch < request.workload.global_batch - 1:
            more = replace(request.workload, global_batch=batch + 1)
            assert not fits_brutally(replace(request, workload=more))


def test_logits_of_the_whole_batch_need_not_fit() -> None:
    """10,000 requests on a T4: near the even share their logits alone take 24 GB."""
    cluster, workload = ClusterSpec.from_counts(["T4"], [1]), Workload(10_000, 16, 16)
    for method in ("auto", "uniform", "pipeedge"):
        found = find_plan(cluster, SHAPE, "m", workload, PlanOptions(method=method)).plan
        assert found.stages[0].memory_bytes <= found.stages[0].memory_limit_bytes
        assert {baseline.name for baseline in found.baselines if baseline.latency_s is None} <= {
            "flexgen",
            "flexgen-int8",
        }


def test_devices_that_hold_nothing_are_left_out_however_many() -> None:
    big, *small = ClusterSpec.from_counts(["A100-80GB", "T4", "P100"], [1, 1, 1]).devices
    useless = tuple(replace(device, memory_bytes=2**28) for device in small)
    cluster = replace(ClusterSpec.from_counts(["T4"], [1]), devices=(big, *useless))
    request = PlanningRequest(cluster, SHAPE, Workload(8, 64, 16), PlanOptions(theta=1.0))
    assert [stage.device for stage in planned(request).stages] == [big.name]
    kept = request.with_options(keep_all_devices=True)
    with pytest.raises(DoesNotFitError, match="no --keep_all_devices"):
        planned(kept)


def test_a_fixed_size_that_does_not_fit_is_named() -> None:
    cluster, workload = ClusterSpec.from_counts(["T4"], [1]), Workload(10_000, 16, 16)
    options = PlanOptions(theta=1.0, decode_micro_batch=10_000)
    request = PlanningRequest(cluster, SHAPE, workload, options)
    with pytest.raises(InfeasibleError, match="no --decode_micro_batch"):
        planned(request)
    planned(request.with_options(decode_micro_batch=None))


@pytest.mark.parametrize("batch", [1, 2, 7, 24, 97, 1000])
def test_smaller_pairs_keep_to_what_memory_allows(batch: int) -> None:
    for most in range(1, batch + 1, max(1, batch // 9)):
        pairs = pairs_up_to(batch, most)
        assert all(1 <= pair.prefill <= pair.decode <= most for pair in pairs)
        rows = {-(-batch // pair.decode) for pair in pairs}
        assert -(-batch // most) in rows
