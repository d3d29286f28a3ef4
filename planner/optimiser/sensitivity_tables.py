"""The least sensitivity of runs of layers for all numbers of layers at each bitwidth.

Runs know layers of one kind only: of several kinds each has its tables, over the sequence of its
own layers, since what a run loses is the sum over kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray

MOST_KEPT_ROWS, KEPT_LATTICES = 10_000, 64
"""Lattices that are kept, of runs of up to 37 layers at four bitwidths: 10 MB in all."""


@dataclass(frozen=True, eq=False)
class CountLattice:
    """The [M, K] counts of some layers, in lexicographic order; `one_less` [K, M] is where each
    lies with a layer less of a bitwidth, that lattice's size where it has none.
    """

    counts: IntArray
    one_less: IntArray


_Runs = list[FloatArray]
"""Tables by length [M + 1, A], the last row infinite, of runs from some starts, whose columns may
have shorter runs later."""


class SensitivityTables:
    """The least sensitivity of a run of layers for every number of layers at each bitwidth, by
    dynamic programming: `least[counts]` is the minimum over b of omega(i, b) plus the value for one
    layer less at b. Tables of a matrix [L, K] are filled as asked for, shared where all layers are
    alike, and serve every device order and micro-batch size (LLM-PQ eq. 5-6, 12-13 know counts
    only).
    """

    def __init__(self, sensitivity: FloatArray) -> None:
        self._sensitivity = sensitivity
        self._alike = bool((sensitivity == sensitivity[:1]).all())
        self._lattices: list[CountLattice] = [_lattice(0, sensitivity.shape[1])]
        self._runs: dict[int, tuple[_Runs, int]] = {}
        self._longest: dict[int, int] = {}

    def counts(self, length: int) -> IntArray:
        """Counts [M, K] of every way to give `length` layers bitwidths."""
        return self._lattice(length).counts

    def least(self, length: int, starts: IntArray) -> FloatArray:
        """Least sums of sensitivity [A, M] of the runs of `length` layers from `starts` [A] on."""
        size = len(self.counts(length))
        if self._alike:
            self.fill({0: length})
            return np.broadcast_to(self._runs[0][0][length][:size, 0], (starts.size, size))
        self.fill(dict.fromkeys(starts.tolist(), length))
        places = [self._runs[start] for start in starts.tolist()]
        found = np.empty((starts.size, size))
        for runs in {id(runs): runs for runs, _ in places}.values():
            rows = [row for row, place in enumerate(places) if place[0] is runs]
            found[rows] = runs[length][:size, [places[row][1] for row in rows]].T
        return found

    def fill(self, longest: Mapping[int, int]) -> None:
        """Fill runs of up to `longest` layers by start together: hardly slower than one alone."""
        if self._alike:
            longest = {0: max(longest.values(), default=0)}
        missing = {
            start: length
            for start, length in longest.items()
            if self._longest.get(start, -1) < length
        }
        if not missing:
            return
        starts = np.array(sorted(missing, key=lambda start: -missing[start]))
        runs = self._filled(starts, np.array([missing[start] for start in starts.tolist()]))
        for column, start in enumerate(starts.tolist()):
            self._runs[start] = runs, column
            self._longest[start] = missing[start]

    def _filled(self, starts: IntArray, longest: IntArray) -> _Runs:
        """Fill the tables of runs from `starts` [A] on; `longest` [A] falls."""
        tables = [np.stack([np.zeros(starts.size), np.full(starts.size, np.inf)])]
        for length in range(1, int(longest[0]) + 1):
            one_less = self._lattice(length).one_less
            last = starts[longest >= length] + length - 1
            before = np.ascontiguousarray(tables[-1][:, : last.size])
            grown = np.full((one_less.shape[1] + 1, last.size), np.inf)
            for choice, rows in enumerate(one_less):
                with_it = before.take(rows, axis=0) + self._sensitivity[last, choice]
                np.minimum(grown[:-1], with_it, out=grown[:-1])
            tables.append(grown)
        return tables

    def _lattice(self, length: int) -> CountLattice:
        while len(self._lattices) <= length:
            self._lattices.append(_lattice(len(self._lattices), self._sensitivity.shape[1]))
        return self._lattices[length]


def lattice_size(length: int, choices: int) -> int:
    """Count the ways in which counts of `choices` bitwidths add up to `length` layers."""
    if choices == 0:
        return int(length == 0)
    return 0 if length < 0 else comb(length + choices - 1, choices - 1)


def _lattice(length: int, choices: int) -> CountLattice:
    small = lattice_size(length, choices) <= MOST_KEPT_ROWS
    return _kept_lattice(length, choices) if small else _new_lattice(length, choices)


def _new_lattice(length: int, choices: int) -> CountLattice:
    counts = compositions(length, choices)
    one_less = np.full((choices, len(counts)), lattice_size(length - 1, choices))
    for choice, column in enumerate(counts.T):
        rows = np.flatnonzero(column)
        fewer = counts[rows] - (np.arange(choices) == choice)
        one_less[choice, rows] = rank_of_counts(fewer, length - 1)
    return CountLattice(counts, one_less)


_kept_lattice = lru_cache(maxsize=KEPT_LATTICES)(_new_lattice)


def compositions(total: int, parts: int) -> IntArray:
    """The non-negative whole numbers [M, parts] with sum `total`, in lexicographic order."""
    if parts == 0:
        return np.zeros((int(total == 0), 0), dtype=np.int64)
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


class LossTables:
    """The tables of a problem's kinds of layers, by distinct bitwidths; they serve all problems of
    its sensitivities.
    """

    def __init__(self, problem: AssignmentProblem) -> None:
        bits, first, of_choice = np.unique(
            problem.bitwidths, return_index=True, return_inverse=True
        )
        self._bit_of_choice = np.eye(bits.size, dtype=np.int64)[of_choice]
        self._before = problem.kinds_before
        self._narrowed: dict[tuple[int, ...], LossTables] = {}
        self.of_kinds = tuple(
            SensitivityTables(problem.sensitivity[problem.kind_of_layer == kind][:, first])
            for kind in range(problem.kinds)
        )

    def narrowed(self, problem: AssignmentProblem) -> LossTables:
        """The tables of a problem with some of the bitwidths alone, made once."""
        if problem.bitwidths not in self._narrowed:
            self._narrowed[problem.bitwidths] = LossTables(problem)
        return self._narrowed[problem.bitwidths]

    def places(self, counts: IntArray, choices: IntArray) -> IntArray:
        """Where counts [M, P] of some `choices` [P], of equal sums, lie in a table [M]."""
        length = int(counts[0].sum()) if len(counts) else 0
        return rank_of_counts(counts @ self._bit_of_choice[choices], length)

    def least(self, first: int, counts: IntArray) -> FloatArray:
        """The least sums of sensitivity [M] of counts [M, C * K] of as many layers of each kind,
        for the run from layer `first` on.
        """
        total = np.zeros(len(counts))
        by_kind = counts.reshape(len(counts), len(self.of_kinds), -1)
        every = np.arange(by_kind.shape[2])
        for kind, tables in enumerate(self.of_kinds):
            own = by_kind[:, kind]
            table = tables.least(int(own[0].sum()), self._before[[first], kind])[0]
            total += table[self.places(own, every)]
        return total
