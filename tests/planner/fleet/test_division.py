"""The choice among make-ups against every choice there is, and blocks against the nodes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from planner.cluster.spec import ClusterSpec
from planner.fleet.division import Column, divide, place
from planner.fleet.makeups import MakeUp, NodeBlock, Pools
from quant.common.errors import InfeasibleError

CLUSTER = ClusterSpec.from_dict(
    {
        "name": "small",
        "nodes": [
            {"name": "a", "accelerators": {"T4": 4}},
            {"name": "b", "accelerators": {"T4": 4}},
            {"name": "c", "accelerators": {"V100": 2, "T4": 1}},
        ],
        "network": {"internode_gbit_per_s": 10},
    }
)
POOLS = Pools.of(CLUSTER)
MAKE_UPS: tuple[MakeUp, ...] = (
    (NodeBlock(0, 3),),
    (NodeBlock(0, 4),),
    (NodeBlock(0, 2), NodeBlock(1, 1)),
    (NodeBlock(1, 2), NodeBlock(0, 1)),
    (NodeBlock(0, 4), NodeBlock(0, 4)),
)


def fits(make_ups: list[MakeUp], left: tuple[tuple[int, int], ...]) -> bool:
    """Whether blocks can be put on the nodes, trying each block on each of them."""
    if not make_ups:
        return True
    (block, *rest), *others = make_ups
    following = [tuple(rest), *others] if rest else others
    return any(
        kind == block.kind
        and count >= block.size
        and fits(following, (*left[:i], (kind, count - block.size), *left[i + 1 :]))
        for i, (kind, count) in enumerate(left)
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("number", [None, 2])
def test_best_division_is_that_of_brute_force(seed: int, number: int | None) -> None:
    rng = random.Random(seed)
    columns = [Column(make_up, 1.0, rng.uniform(0.5, 4)) for make_up in MAKE_UPS]
    left = tuple((pool.kind, len(pool.devices)) for pool in POOLS.pools)
    best = 0.0
    for counts in product(*(range(4), range(3), range(3), range(2), range(2))):
        if sum(counts) == 0 or (number is not None and sum(counts) != number):
            continue
        wanted = [m for m, count in zip(MAKE_UPS, counts, strict=True) for _ in range(count)]
        value = sum(c.value * count for c, count in zip(columns, counts, strict=True))
        if value > best and fits(wanted, left):
            best = value
    found = divide(columns, POOLS.counts(), number)
    assert found.value == pytest.approx(best, rel=2e-3)
    assert found.gap <= 2e-3


def test_every_block_gets_devices_of_its_own_on_one_node() -> None:
    columns = [Column(make_up, 1.0, 1.0 + len(make_up)) for make_up in MAKE_UPS]
    division = divide(columns, POOLS.counts())
    placed = list(place(division, MAKE_UPS, POOLS))
    assert len(placed) == sum(division.counts)
    used = [device.name for _, blocks in placed for block in blocks for device in block]
    assert not [name for name, count in Counter(used).items() if count > 1]
    for column, blocks in placed:
        for block, devices in zip(MAKE_UPS[column], blocks, strict=True):
            assert len(devices) == block.size
            assert {d.node for d in devices} == {devices[0].node}


def test_least_speed_bounds_the_choice() -> None:
    slow = [Column((NodeBlock(0, 4),), 1.0, 3.0), Column((NodeBlock(0, 2),), 5.0, 1.0)]
    pools = Counter({(0, 4): 2})
    assert divide(slow, pools).counts == (2, 0)
    assert divide(slow, pools, least_tokens_per_s=11.0).counts == (1, 2)
    with pytest.raises(InfeasibleError):
        divide(slow, pools, number=9)
