"""The least sensitivity of a run of layers, for every number of layers at each bitwidth.

Latency and memory of a stage depend on its counts of bitwidths only (LLM-PQ eq. 5-6, 12-13), so
which of its layers get which bits can be settled beforehand, by dynamic programming over layers:
`least[counts]` is the minimum over b of omega(i, b) plus the value for one layer less at b. The
tables depend on the sensitivity alone and serve every device order and micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from planner.optimiser.problem import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class CountLattice:
    """The [M, K] counts of some number of layers, in lexicographic order.

    `with_choice[b]` are the rows with a layer of bitwidth b, `one_less[b]` where each of these lies
    in the lattice of one layer less.
    """

    counts: IntArray
    with_choice: tuple[IntArray, ...]
    one_less: tuple[IntArray, ...]


class SensitivityTables:
    """Tables for the runs of one sensitivity matrix [L, K], filled as they are asked for.

    Where all layers are equally sensitive, all runs share the tables of the first.
    """

    def __init__(self, sensitivity: FloatArray) -> None:
        self._sensitivity = sensitivity
        self._alike = bool((sensitivity == sensitivity[0]).all())
        self._lattices: list[CountLattice] = [_lattice(0, sensitivity.shape[1])]
        self._least: dict[int, list[FloatArray]] = {}

    def counts(self, length: int) -> IntArray:
        """Counts [M, K] of every way to give `length` layers bitwidths."""
        while len(self._lattices) <= length:
            self._lattices.append(_lattice(len(self._lattices), self._sensitivity.shape[1]))
        return self._lattices[length].counts

    def least(self, length: int, starts: IntArray) -> FloatArray:
        """Least sums of sensitivity [A, M] of the runs of `length` layers from `starts` [A] on."""
        if self._alike:
            alone = self._run(0, length)
            return np.broadcast_to(alone, (starts.size, alone.size))
        return np.stack([self._run(int(start), length) for start in starts])

    def _run(self, start: int, length: int) -> FloatArray:
        """The table [M] of one run; fills those of its shorter beginnings first."""
        self.counts(length)
        tables = self._least.setdefault(start, [np.zeros(1)])
        while len(tables) <= length:
            lattice = self._lattices[len(tables)]
            omega = self._sensitivity[start + len(tables) - 1]
            grown = np.full(len(lattice.counts), np.inf)
            for choice, rows in enumerate(lattice.with_choice):
                with_it = tables[-1][lattice.one_less[choice]] + omega[choice]
                grown[rows] = np.minimum(grown[rows], with_it)
            tables.append(grown)
        return tables[length]


def lattice_size(length: int, choices: int) -> int:
    """Count the ways in which counts of `choices` bitwidths add up to `length` layers."""
    return comb(length + choices - 1, choices - 1)


def _lattice(length: int, choices: int) -> CountLattice:
    counts = _compositions(length, choices)
    with_choice = tuple(np.flatnonzero(column) for column in counts.T)
    one_less = tuple(
        rank_of_counts(counts[rows] - (np.arange(choices) == choice), length - 1)
        for choice, rows in enumerate(with_choice)
    )
    return CountLattice(counts, with_choice, one_less)


def _compositions(total: int, parts: int) -> IntArray:
    """The non-negative whole numbers [M, parts] with sum `total`, in lexicographic order."""
    rows = np.zeros((1, 0), dtype=np.int64)
    left = np.array([total], dtype=np.int64)
    for _ in range(parts - 1):
        repeats = left + 1
        owner = np.repeat(np.arange(left.size), repeats)
        first = np.repeat(np.cumsum(repeats) - repeats, repeats)
        value = np.arange(owner.size) - first
        rows = np.column_stack([rows[owner], value])
        left = left[owner] - value
    return np.column_stack([rows, left])


def rank_of_counts(counts: IntArray, total: int) -> IntArray:
    """The row of each of `counts` [M, K] in the lattice of its sum `total`."""
    parts = counts.shape[1]
    rank = np.zeros(len(counts), dtype=np.int64)
    left = np.full(len(counts), total, dtype=np.int64)
    for column in range(parts - 1):
        rest = parts - 1 - column
        ways = np.array([comb(n + rest, rest) for n in range(total + 1)] + [0], dtype=np.int64)
        after = left - counts[:, column]
        rank += ways[left] - ways[after]
        left = after
    return rank
