"""Orders of passes in which groups decode during the first fill, and their bound from below."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from benchmarks.early_decode import Orders, least_seconds
from planner.micro_batches import MicroBatches
from planner.schedule.static import JobRows, JobSchedule, Pass
from planner.simulation.simulation import PassSeconds

Stages = list[float]


def orders_of(
    rows: JobRows, slots: int, sizes: MicroBatches, prefill_s: Stages, decode_s: Stages
) -> Orders:
    """Transfers take no time, and passes of a phase always the same."""

    def seconds(each: Pass) -> PassSeconds:
        compute = prefill_s if each.phase == "prefill" else decode_s
        return PassSeconds(tuple(compute), (0.0,) * len(compute))

    return Orders(rows, slots, sizes, len(prefill_s), seconds)


def random_orders(seed: int) -> tuple[np.random.Generator, Orders]:
    rng = np.random.default_rng(seed)
    slots, stages = int(rng.integers(2, 25)), int(rng.integers(1, 6))
    sizes = MicroBatches(*(int(each) for each in rng.integers(1, slots + 1, 2)))
    times = rng.uniform(0.1, 3.0, (2, stages)).tolist()
    rows = JobRows([9] * slots, [int(rng.integers(1, 20))] * slots)
    return rng, orders_of(rows, slots, sizes, *times)


@pytest.mark.parametrize("seed", range(30))
def test_the_present_order_is_that_of_the_policy(seed: int) -> None:
    _, orders = random_orders(seed)
    wanted = JobSchedule(orders.rows, orders.slots, orders.sizes, orders.stages).passes()
    assert list(orders.passes(orders.present)) == list(wanted)


@pytest.mark.parametrize("seed", range(60))
def test_every_order_runs_the_same_passes_no_faster_than_the_bound(seed: int) -> None:
    rng, orders = random_orders(seed)
    present = list(orders.passes(orders.present))
    bound_s = least_seconds(present, orders.seconds_of)
    for most in (1, 2, orders.all_ready):
        order = rng.integers(0, most + 1, orders.prefills).tolist()
        passes = list(orders.passes(order))
        assert sorted(map(_named, passes)) == sorted(map(_named, present))
        assert orders.seconds(order) >= bound_s - 1e-9
        _assert_prefilled_before_steps(passes, orders.sizes)


def _named(each: Pass) -> tuple[str, int, int, int]:
    return each.phase, each.index, each.step, each.requests


def _assert_prefilled_before_steps(passes: list[Pass], sizes: MicroBatches) -> None:
    """A group steps when its requests' prefills and its last step are back, never earlier."""
    prefilled, back, last = 0, [0], defaultdict[int, int](int)
    for number, each in enumerate(passes, start=1):
        if each.phase == "prefill":
            prefilled += each.requests
        else:
            first = each.index * sizes.decode
            assert back[each.results_before] >= first + each.requests
            assert last[each.index] <= each.results_before
            last[each.index] = number
        back.append(prefilled)


def test_an_order_that_gains_is_found() -> None:
    """Six groups on two stages: what the first stage decodes while the second one prefills need
    not be decoded later.
    """
    rows = JobRows([9] * 24, [6] * 24)
    orders = orders_of(rows, 24, MicroBatches(2, 4), [0.1, 2.0], [2.0, 0.1])
    present_s = orders.seconds(orders.present)
    best_s, best = orders.best_start(orders.prefills)
    assert best_s < 0.9 * present_s
    searched_s = orders.searched([(present_s, orders.present), (best_s, best)], 20)
    bound_s = least_seconds(list(orders.passes(orders.present)), orders.seconds_of)
    assert bound_s <= searched_s <= best_s
