"""Times on a grid beside those that they stand for, and room that is known beside what is asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication import COPY_LAUNCH_S
from planner.costs.latency_model import unlike_prompts_s
from planner.costs.model import CostModel
from planner.costs.pass_times import PassTable
from planner.costs.stored_bytes import layer_weight_bytes
from planner.fleet.pricing import device_tokens_per_s
from planner.latency_bound.bounded_search import without_groups
from planner.latency_bound.placed_layers import (
    DRIVER_S,
    KnownRoom,
    Need,
    PlacedLayers,
    handover_of,
    kept_bytes,
)
from planner.latency_bound.schedules import BoundRequest, job_of
from planner.latency_bound.timeline import mean_prefill_s
from planner.lengths import FloatArray, LengthDistribution
from planner.model.shape import ModelShape
from quant.common.errors import SpecError
from tests.planner.latency_bound.settings import (
    FULL,
    LINEAR,
    MIXED_LAYERS,
    TASK_S,
    THREE_LAYERS,
    TWO_BITS,
    bounded_costs,
    every_placement,
    placement_of,
    small_cluster,
)


@pytest.fixture(scope="module")
def placement() -> PlacedLayers:
    costs = bounded_costs(small_cluster([15.0, 31.0]), BoundRequest(TASK_S, None))
    return next(each for each in every_placement(costs) if len(each.devices) == 2)


def test_small_numbers_are_on_the_grid(placement: PlacedLayers) -> None:
    grid, exact = placement.times, placement.exact_times
    for requests, tokens in itertools.product((1, 2, 17, 64), (1, 7, 32)):
        assert grid.prefill_s(requests, tokens) == pytest.approx(exact.prefill_s(requests, tokens))
        assert grid.decode_s(requests, tokens) == pytest.approx(exact.decode_s(requests, tokens))


def test_between_its_points_a_grid_is_near(placement: PlacedLayers) -> None:
    grid, exact = placement.times, placement.exact_times
    generator = np.random.default_rng(0)
    for _ in range(60):
        requests, tokens = np.exp(generator.uniform(0, np.log((900, 3000))))
        assert grid.prefill_s(requests, tokens) == pytest.approx(
            exact.prefill_s(requests, tokens), rel=0.03
        )
        assert grid.decode_s(requests, tokens) == pytest.approx(
            exact.decode_s(requests, tokens), rel=0.03
        )
        assert grid.decode_hop_s(requests) == pytest.approx(exact.decode_hop_s(requests))


@pytest.mark.parametrize(("kinds", "driver_s"), [(["CPU", "T4"], 0), (["T4", "CPU"], DRIVER_S)])
def test_the_driver_takes_time_between_steps_where_cpus_compute(
    kinds: Sequence[str], driver_s: float
) -> None:
    cluster = small_cluster([15.0, 15.0], kinds)
    costs = bounded_costs(cluster, BoundRequest(TASK_S, None))
    placement = placement_of(costs, cluster.devices, [(1, 0), (0, 2)])
    links = PassTable(costs, placement.stages, placement.bitwidth)
    for requests in (1, 20):
        added_s = placement.times.decode_hop_s(requests) - links.decode_hop_s(requests)
        assert added_s == pytest.approx([0, driver_s], abs=1e-9)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_mean_prefill_is_that_of_drawn_prompts(placement: PlacedLayers, size: int) -> None:
    """Of prompts each as long as by chance, whose sum deviates less than they do."""
    times, prompts = placement.exact_times, TASK_S.prompts

    def parts(requests: int, length: int) -> tuple[FloatArray, FloatArray]:
        attention_s = times.attention_s(requests, length)
        return attention_s, times.prefill_s(requests, length) - attention_s

    drawn = prompts.drawn(1500 * size, np.random.default_rng(0)).reshape(-1, size)
    mean_s = np.mean([unlike_prompts_s(each, parts) for each in drawn.tolist()], axis=0)
    for found in (mean_prefill_s(each, size, prompts) for each in (times, placement.times)):
        assert found == pytest.approx(mean_s, rel=0.02)


def test_a_mean_prefill_of_prompts_alike_is_theirs(placement: PlacedLayers) -> None:
    times = placement.exact_times
    alike = LengthDistribution((300,), (1.0,))
    assert mean_prefill_s(times, 7, alike) == pytest.approx(times.prefill_s(7, 300))


def test_many_steps_at_once_are_those_one_by_one(placement: PlacedLayers) -> None:
    grid = placement.times
    requests, contexts = np.array([1.0, 3.5, 90.0]), np.array([40.0, 333.0, 801.0])
    compute_s, hop_s = grid.decodes_s(requests, contexts)
    for at, (size, context) in enumerate(zip(requests, contexts, strict=True)):
        assert compute_s[at] == pytest.approx(grid.decode_s(size, context))
        assert hop_s[at] == pytest.approx(grid.decode_hop_s(size))


def test_known_room_says_what_is_true_and_asks_seldom() -> None:
    def true(need: Need) -> bool:
        return 3 * need[0] + 5 * need[1] + need[2] <= 60

    asked: list[Need] = []

    def has_room(need: Need) -> bool:
        asked.append(need)
        return true(need)

    room = KnownRoom(has_room)
    needs = list(itertools.product(range(1, 16), range(1, 12), range(1, 16)))
    np.random.default_rng(1).shuffle(needs)
    assert all(room(tuple(need)) == true(tuple(need)) for need in needs)
    assert len(asked) < len(needs) / 4


TOKEN = 2 * 2 * 2 * 256
"""Bytes of a token in the full layer: keys and values of 2 heads of 256 numbers of 16 bit."""

REQUEST = 4 * 16 * 128 * 128 + 2 * 3 * 3 * 16 * 128
"""Bytes of a request in a linear layer: 16 states of 128 by 128 numbers of 32 bit, and 3 inputs of
the convolution of queries, keys and values of as many heads."""


@pytest.fixture(scope="module")
def mixed() -> CostModel:
    return bounded_costs(small_cluster([15.0, 31.0]), BoundRequest(TASK_S, None), MIXED_LAYERS)


def test_layers_of_several_kinds_keep_what_is_theirs(mixed: CostModel) -> None:
    first, second = mixed.cluster.devices
    linear, full = 0, 1
    assert kept_bytes(mixed, first, (linear, full, linear)) == (TOKEN, 2 * REQUEST)
    placed = placement_of(mixed, (first, second), ((1, 1), (0, 1)))
    assert [placed.kinds(stage) for stage in (0, 1)] == [(linear, full), (linear,)]
    weights = [
        layer_weight_bytes(kind, bits, first, "float16") for kind, bits in ((LINEAR, 4), (FULL, 16))
    ]
    workload = mixed.workload
    kept = TOKEN * workload.kv_tokens + REQUEST * workload.global_batch
    sizes = placed.solution.sizes
    fixed = mixed.fixed_memory(placed.devices, 0, sizes).total - 0.02 * first.memory_bytes
    needed = round((sum(weights) + kept + fixed) / 0.98)  # 2 % of the memory is the allocator's
    for spare, fits in ((100, True), (-100, False)):
        held = replace(first, memory_bytes=needed + spare)
        smaller = placement_of(mixed, (held, second), ((1, 1), (0, 1)))
        assert smaller.has_room(workload, sizes) == fits


def test_what_is_handed_over_counts_states_for_each_request(mixed: CostModel) -> None:
    first, second = mixed.cluster.devices
    prefill, decode = (placement_of(mixed, (each,), ((1, 2),)) for each in (first, second))
    handover = handover_of(prefill, decode)
    byte_s = handover.sent_s(0, 1) - handover.sent_s(0, 0)
    state_s = handover.sent_s(1, 0) - handover.sent_s(0, 0)
    assert state_s / byte_s == pytest.approx(2 * REQUEST / TOKEN)
    copies = 2 + 2  # keys and values of the full layer, and the states of both others
    to_host = handover.keep.seconds(1, 0) - copies * COPY_LAUNCH_S
    assert to_host == pytest.approx(2 * REQUEST / first.host_link_bytes_per_s)


def test_the_most_of_a_device_lies_between_that_with_layers_of_either_kind(
    mixed: CostModel,
) -> None:
    request = BoundRequest(TASK_S, None)
    rates = [
        device_tokens_per_s(bounded_costs(mixed.cluster, request, shape), job_of(request), device)
        for shape in (MIXED_LAYERS, LINEAR, FULL)
        for device in mixed.cluster.devices[:1]
    ]
    alike = 3 / (2 / rates[1] + 1 / rates[2])
    assert rates[0] == pytest.approx(alike, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "asked", "groups"),
    [(THREE_LAYERS, "auto", "auto"), (THREE_LAYERS, 2, 2), (MIXED_LAYERS, "auto", 1)],
)
def test_stages_that_hand_over_states_are_no_groups(
    shape: ModelShape, asked: int | str, groups: int | str
) -> None:
    options = replace(TWO_BITS, tensor_parallel=asked)
    costs = bounded_costs(small_cluster([15.0, 31.0]), BoundRequest(TASK_S, None), shape, options)
    assert without_groups(costs).options.tensor_parallel == groups


def test_groups_that_are_asked_for_are_refused_where_they_cannot_hand_over() -> None:
    options = replace(TWO_BITS, tensor_parallel=2)
    request = BoundRequest(TASK_S, None)
    costs = bounded_costs(small_cluster([15.0, 31.0]), request, MIXED_LAYERS, options)
    with pytest.raises(SpecError, match=r"tensor_parallel is 2.*constant states.*schedule rra"):
        without_groups(costs)
