from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from planner.orders import device_orders

Device = tuple[str, str]  # node and type


def orders(devices: list[Device], all_orders: bool = False) -> list[tuple[int, ...]]:
    return list(
        device_orders(devices, lambda device: device[1], lambda device: device[0], all_orders)
    )


def one_node(**counts: int) -> list[Device]:
    return [("node", kind) for kind, count in counts.items() for _ in range(count)]


def looks(devices: list[Device], order: tuple[int, ...]) -> tuple[object, ...]:
    """What a plan's cost can depend on: types in order, and which neighbours share a node."""
    placed = [devices[index] for index in order]
    return tuple(
        (kind, node == placed[(stage + 1) % len(placed)][0])
        for stage, (node, kind) in enumerate(placed)
    )


@pytest.mark.parametrize("counts", [{"T4": 1}, {"T4": 4}, {"T4": 3, "V100": 1}, {"A": 2, "B": 2}])
def test_all_orders_on_one_node_are_multinomially_many(counts: dict[str, int]) -> None:
    total = math.factorial(sum(counts.values()))
    expected = total // math.prod(math.factorial(count) for count in counts.values())
    found = orders(one_node(**counts), all_orders=True)
    assert len(found) == len(set(found)) == expected


@pytest.mark.parametrize("kinds", [1, 2, 3, 4])
def test_groups_of_different_types_give_their_permutations(kinds: int) -> None:
    devices = one_node(**{f"type{kind}": kind + 1 for kind in range(kinds)})
    assert len(orders(devices)) == math.factorial(kinds)


CLUSTERS: list[list[Device]] = [
    [("a", "T4"), ("a", "T4"), ("b", "T4"), ("b", "T4")],
    [("a", "T4"), ("a", "T4"), ("b", "T4"), ("c", "V100")],
    [("a", "T4"), ("b", "T4"), ("c", "T4"), ("d", "T4")],
    [("a", "P100"), ("a", "V100"), ("b", "P100"), ("b", "V100"), ("b", "V100")],
    [("a", "T4"), ("b", "V100"), ("a", "T4"), ("b", "V100"), ("a", "V100")],
]


@pytest.mark.parametrize("devices", CLUSTERS)
def test_all_orders_are_one_of_each_kind_that_any_permutation_shows(devices: list[Device]) -> None:
    found = [looks(devices, order) for order in orders(devices, all_orders=True)]
    every = {looks(devices, order) for order in itertools.permutations(range(len(devices)))}
    assert Counter(found) == Counter(every)


@pytest.mark.parametrize("devices", CLUSTERS)
def test_default_orders_keep_equal_devices_of_a_node_together(devices: list[Device]) -> None:
    found = orders(devices)
    together = {
        looks(devices, order)
        for order in itertools.permutations(range(len(devices)))
        if len([1 for _ in itertools.groupby(devices[index] for index in order)])
        == len(set(devices))
    }
    assert Counter(looks(devices, order) for order in found) == Counter(together)
    assert all(sorted(order) == list(range(len(devices))) for order in found)


def test_interchangeable_nodes_are_counted_once() -> None:
    assert len(orders([("a", "T4"), ("b", "T4")])) == 1
    assert len(orders([("a", "T4"), ("a", "T4"), ("b", "T4"), ("b", "T4")])) == 1


def test_the_given_order_comes_first_and_the_rest_is_lazy() -> None:
    devices = [(f"node{index}", f"type{index}") for index in range(14)]
    first = next(
        device_orders(devices, lambda device: device[1], lambda device: device[0], all_orders=True)
    )
    assert first == tuple(range(14))
