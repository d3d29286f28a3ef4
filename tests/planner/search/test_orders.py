from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from planner.search import orders as device_orders
from planner.search.orders import OrderTree

Device = tuple[str, str]  # node and type


def tree(devices: list[Device], all_orders: bool = False) -> OrderTree:
    return OrderTree.of(devices, lambda device: device[1], lambda device: device[0], all_orders)


def orders(devices: list[Device], all_orders: bool = False) -> list[tuple[int, ...]]:
    return list(tree(devices, all_orders).orders())


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
    first = next(tree(devices, all_orders=True).orders())
    assert first == tuple(range(14))


@pytest.mark.parametrize("nodes", [9, 12, 64])
def test_equal_nodes_have_one_order(nodes: int) -> None:
    """Permuting 12 nodes and dropping what repeats would take an hour."""
    devices = [(f"node{index}", "T4") for index in range(nodes)]
    assert orders(devices) == [tuple(range(nodes))]
    assert len(orders([*devices, ("other", "V100")])) == nodes + 1


@pytest.mark.parametrize("all_orders", [False, True])
@pytest.mark.parametrize("devices", CLUSTERS)
def test_orders_are_counted_and_parted_by_their_ends(
    devices: list[Device], all_orders: bool
) -> None:
    whole = tree(devices, all_orders)
    found = [looks(devices, order) for order in whole.orders()]
    assert whole.count == len(found)
    parts = whole.by_ends
    kinds = whole.kind_of_device
    for (first, last), part in parts.items():
        members = list(part.orders())
        assert part.count == len(members) > 0
        assert {(kinds[order[0]], kinds[order[-1]]) for order in members} == {(first, last)}
    parted = [looks(devices, order) for part in parts.values() for order in part.orders()]
    assert Counter(parted) == Counter(found)


@pytest.mark.parametrize("all_orders", [False, True])
@pytest.mark.parametrize("devices", CLUSTERS)
def test_where_orders_are_not_gone_through_they_are_at_least_as_many(
    devices: list[Device], all_orders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = tree(devices, all_orders)
    monkeypatch.setattr(device_orders, "MOST_COUNTED", 0)
    bounded = tree(devices, all_orders)
    assert bounded.count >= exact.count
    for ends, part in exact.by_ends.items():
        assert bounded.by_ends[ends].count >= part.count
    assert sum(part.count for part in bounded.by_ends.values()) == bounded.count


@pytest.mark.parametrize("nodes", [11, 200])
def test_many_nodes_that_mix_kinds_are_as_quick_as_few(nodes: int) -> None:
    """None of their orders is made but the one that is asked for."""
    devices = [(f"node{index}", kind) for index in range(nodes) for kind in ("T4", "V100")]
    parts = tree(devices, all_orders=True).by_ends
    assert len(parts) == 4
    assert sum(part.count for part in parts.values()) == tree(devices, all_orders=True).count
    assert parts[0, 1].example == tuple(range(2 * nodes)), "a node's devices are side by side"


def test_more_orders_than_can_be_listed_are_counted() -> None:
    devices = [(f"node{index}", f"type{index % 4}") for index in range(12)]
    assert tree(devices).count == math.factorial(12) // math.factorial(3) ** 4
    parts = tree(devices).by_ends.values()
    assert sum(part.count for part in parts) == tree(devices).count
