"""What fits where layers take memory of devices and of hosts, which some stages share.

A choice may take less of the one memory and more of the other, so a run has many smallest ways to
lie there: those that no other beats in both. They are found layer by layer, and are few, since
layers of a kind are alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray


def with_shares(problem: AssignmentProblem, host_bytes: FloatArray) -> AssignmentProblem:
    """The problem where each stage has so much of its host [N], and shares nothing."""
    return replace(problem, hosts=(), host_memory_bytes=host_bytes)


def even_shares(problem: AssignmentProblem) -> FloatArray:
    """What each stage has of its host [N] if all that share one have as much."""
    shares = problem.host_memory_bytes.copy()
    for host in problem.hosts:
        stages = list(host.stages)
        shares[stages] = np.minimum(shares[stages], host.memory_bytes / len(stages))
    return shares


def shares_beside(problem: AssignmentProblem, used_bytes: FloatArray) -> FloatArray:
    """Shares of the hosts [N] for stages that take `used_bytes` [N], less where that is too much,
    and what is left evenly.
    """
    shares = problem.host_memory_bytes.copy()
    for host in problem.hosts:
        stages = list(host.stages)
        used = used_bytes[stages]
        used = used * min(1.0, host.memory_bytes / max(float(used.sum()), 1.0))
        shares[stages] = used + (host.memory_bytes - used.sum()) / len(stages)
    return shares


def fitting_shares(problem: AssignmentProblem, layer_scale: float = 1.0) -> FloatArray | None:
    """Shares of the hosts [N] with which all layers fit: even ones where they do, else what each
    stage needs and as much more; None where there are none.
    """
    if problem.memory_bytes.min() < 0 or not _fit(problem, problem.host_memory_bytes, layer_scale):
        return None
    shares = even_shares(problem)
    if not problem.hosts or _fit(problem, shares, layer_scale):
        return shares
    return _needed_shares(problem, layer_scale)


def _fit(problem: AssignmentProblem, shares: FloatArray, scale: float) -> bool:
    reached, _ = fullest_stages(with_shares(problem, shares), scale)
    return holds_all(reached, problem.memory_bytes, problem.layers)


def holds_all(reached: IntArray, memory: FloatArray, layers: int) -> bool:
    """Whether the stages that reach so far [N+1] hold all layers, both ends some."""
    return bool(memory.min() >= 0 and reached[1] > 0 and reached[-1] == layers > reached[-2])


def _needed_shares(problem: AssignmentProblem, scale: float) -> FloatArray | None:
    """Shares where the stages up to each reach as far as they can with what is left of the hosts:
    of two ways to come to a stage one is as good as the other where it reaches as far and has taken
    no more of any host.
    """
    stages, layers = problem.stages, problem.layers
    tables = problem.layer_bytes, problem.available, problem.host_bytes
    limits = problem.memory_bytes[:, np.newaxis], problem.host_memory_bytes[:, np.newaxis]
    _, alike = np.unique(np.hstack([*tables, *limits]), axis=0, return_inverse=True)
    known: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    places = np.zeros((len(problem.hosts), stages), dtype=bool)
    for place, host in zip(places, problem.hosts, strict=True):
        place[list(host.stages)] = True
    most = np.array([host.memory_bytes for host in problem.hosts])
    ends, needs = np.zeros(1, dtype=np.int64), np.zeros((1, stages))
    for stage in range(stages):
        is_end, last = stage in (0, stages - 1), layers - (stage < stages - 1)
        grown = [] if is_end else [(ends, needs)]
        for end, need in zip(ends.tolist(), needs, strict=True):
            key = int(alike.ravel()[stage]), end, last
            if key not in known:
                known[key] = _least_of_host(problem, stage, (end, last), scale)
            if not known[key]:
                continue
            found, own = map(np.array, zip(*known[key], strict=True))
            after = np.tile(need, (len(found), 1))
            after[:, stage] = own
            grown.append((found, after))
        if not grown:
            return None
        ends, needs = (np.concatenate(each) for each in zip(*grown, strict=True))
        used = needs @ places.T
        kept = _foremost(ends, used, np.flatnonzero((used <= most).all(axis=1)))
        ends, needs = ends[kept], needs[kept]
    if not (whole := needs[ends == layers]).size:
        return None
    return shares_beside(problem, whole[0])


def _least_of_host(
    problem: AssignmentProblem, stage: int, between: tuple[int, int], scale: float
) -> list[tuple[int, float]]:
    """Where runs from a layer on may end, and the least that each takes of the host."""
    open_ones = set(problem.open_boundaries.tolist())
    steps = enumerate(_ways_by_layer(problem, stage, between, scale), between[0] + 1)
    return [(end, float(sums[-1, 1])) for end, (_, _, sums) in steps if end in open_ones]


def _foremost(ends: IntArray, used: FloatArray, rows: IntArray) -> IntArray:
    """Those of some `rows` that no other is before, of which no host [M, H] has less left."""
    kept = list[int]()
    for row in rows[np.lexsort((used[rows].sum(axis=1), -ends[rows]))].tolist():
        if not (used[kept] <= used[row]).all(axis=1).any():
            kept.append(row)
    return np.array(kept, dtype=np.int64)


def fullest_stages(
    problem: AssignmentProblem, layer_scale: float = 1.0
) -> tuple[IntArray, IntArray]:
    """The boundaries [N+1] if stages, first to last, hold as many layers as fit, where the last has
    one to hold, and choices [L] with which they do.
    """
    reached = np.zeros(problem.stages + 1, dtype=np.int64)
    bitwidth = np.zeros(problem.layers, dtype=np.int64)
    for stage in range(problem.stages):
        start, last = int(reached[stage]), problem.layers - (stage < problem.stages - 1)
        choices = _longest_run(problem, stage, (start, last), layer_scale)
        reached[stage + 1] = start + choices.size
        bitwidth[start : start + choices.size] = choices
    return reached, bitwidth


def _longest_run(
    problem: AssignmentProblem, stage: int, between: tuple[int, int], scale: float
) -> IntArray:
    """The choices of the longest run from a layer on that fits a stage."""
    steps = list(_ways_by_layer(problem, stage, between, scale))
    ends = problem.open_boundaries - between[0]
    longest = int(ends[(ends >= 0) & (ends <= len(steps))].max(initial=0))
    found, way = [], -1  # the last has the most on the device
    for before, choice, _ in reversed(steps[:longest]):
        found.append(int(choice[way]))
        way = int(before[way])
    return np.array(found[::-1], dtype=np.int64)


def _ways_by_layer(
    problem: AssignmentProblem, stage: int, between: tuple[int, int], scale: float
) -> Iterator[tuple[IntArray, IntArray, FloatArray]]:
    """Yield for each layer that still fits a stage the smallest ways: of which one before each goes
    on, with which choice, and its bytes of both memories [P, 2], of the device ever more.
    """
    limits = np.array([each.limit_bytes[stage] for each in problem.memories])
    ways = [_smallest_ways(problem, stage, kind) for kind in range(problem.kinds)]
    sums = np.zeros((1, limits.size))
    for layer in range(*between):
        choices, each = ways[problem.kind_of_layer[layer]]
        grown = (sums[:, np.newaxis] + scale * each).reshape(-1, limits.size)
        kept = _unbeaten(grown, np.flatnonzero((grown <= limits).all(axis=1)))
        if not kept.size:
            return
        sums = grown[kept]
        yield kept // choices.size, choices[kept % choices.size], sums


def _smallest_ways(
    problem: AssignmentProblem, stage: int, kind: int
) -> tuple[IntArray, FloatArray]:
    """The choices of a layer that no other beats in both memories, and their bytes [P, 2]."""
    width = len(problem.bitwidths)
    cells = np.arange(kind * width, (kind + 1) * width)
    bytes_of = np.column_stack([each.layer_bytes[stage, cells] for each in problem.memories])
    kept = _unbeaten(bytes_of, np.flatnonzero(problem.available[stage, cells]))
    return kept, bytes_of[kept]


def _unbeaten(sums: FloatArray, rows: IntArray) -> IntArray:
    """Those of some `rows` of sums [M, 2] that no other is below in both, by rising first sum."""
    ordered = rows[np.lexsort(sums[rows].T[::-1])]
    second = sums[ordered, 1]
    below = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(ordered[second < below])
