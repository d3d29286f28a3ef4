"""Device orders: which device is which pipeline stage (GetDeviceOrder of LLM-PQ Alg. 1).

Two orders are the same if the devices' types agree stage by stage, and so does whether a stage's
node is also that of the next one (and the last one's that of the first, where tokens return): then
every layer, memory and link costs the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import permutations
from typing import TypeVar

Device = TypeVar("Device")
Key = tuple[Hashable, Hashable]  # node and type


def device_orders(
    devices: Sequence[Device],
    type_of: Callable[[Device], Hashable],
    node_of: Callable[[Device], Hashable],
    all_orders: bool = False,
) -> Iterator[tuple[int, ...]]:
    """Distinct orders of `devices`, each as their indices in stage order.

    By default equal devices of one node stay together; with `all_orders` they need not. `type_of`
    must tell apart all that matters for cost, such as memory or a node's link. Lazy, since there
    are up to N! orders; the given order's groups come first.
    """
    members: dict[Key, list[int]] = {}
    for index, device in enumerate(devices):
        members.setdefault((node_of(device), type_of(device)), []).append(index)
    sequences = _interleavings if all_orders else _group_orders
    seen: set[tuple[tuple[Hashable, bool], ...]] = set()
    for sequence in sequences({key: len(indices) for key, indices in members.items()}):
        signature = _signature(sequence)
        if signature not in seen:
            seen.add(signature)
            yield _as_indices(sequence, members)


def _group_orders(sizes: dict[Key, int]) -> Iterator[tuple[Key, ...]]:
    """Every permutation of whole groups."""
    for groups in permutations(sizes):
        yield tuple(key for key in groups for _ in range(sizes[key]))


def _interleavings(sizes: dict[Key, int]) -> Iterator[tuple[Key, ...]]:
    """Every distinct sequence with `sizes[key]` entries of each key."""
    if not any(sizes.values()):
        yield ()
    for key, left in sizes.items():
        if left:
            for rest in _interleavings({**sizes, key: left - 1}):
                yield (key, *rest)


def _signature(sequence: tuple[Key, ...]) -> tuple[tuple[Hashable, bool], ...]:
    """Per stage its type, and whether the next stage (after the last, the first) is on its node."""
    following = sequence[1:] + sequence[:1]
    return tuple(
        (kind, node == next_node)
        for (node, kind), (next_node, _) in zip(sequence, following, strict=True)
    )


def _as_indices(sequence: tuple[Key, ...], members: dict[Key, list[int]]) -> tuple[int, ...]:
    """Equal devices of a node in ascending order."""
    waiting = {key: iter(indices) for key, indices in members.items()}
    return tuple(next(waiting[key]) for key in sequence)
