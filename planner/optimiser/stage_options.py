"""The ways in which a stage may hold a run of layers, and the least sensitivity of each.

An option is a run of layers with its number of layers at each bitwidth. Memory (LLM-PQ eq. 12-13)
is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import comb

import numpy as np

from planner.optimiser.prices import PricedProblem, PricedStages
from planner.optimiser.problem import BoolArray, FloatArray, IntArray
from planner.optimiser.relaxation import RelaxedProblem

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
        self._alike = bool((sensitivity == sensitivity[0]).all())
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
    return 0 if length < 0 else comb(length + choices - 1, choices - 1)


def _lattice(length: int, choices: int) -> CountLattice:
    small = lattice_size(length, choices) <= MOST_KEPT_ROWS
    return _kept_lattice(length, choices) if small else _new_lattice(length, choices)


def _new_lattice(length: int, choices: int) -> CountLattice:
    counts = _compositions(length, choices)
    one_less = np.full((choices, len(counts)), lattice_size(length - 1, choices))
    for choice, column in enumerate(counts.T):
        rows = np.flatnonzero(column)
        fewer = counts[rows] - (np.arange(choices) == choice)
        one_less[choice, rows] = rank_of_counts(fewer, length - 1)
    return CountLattice(counts, one_less)


_kept_lattice = lru_cache(maxsize=KEPT_LATTICES)(_new_lattice)


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


ROUNDING = 1e-9  # relative; of a quotient that should be a whole number of layers


@dataclass(frozen=True, eq=False)
class StageOptions:
    """The options [M] of one kind of stage. `run` is start * (layers + 1) + stop, `row` the row in
    its length's lattice; times are seconds with the fixed part.
    """

    run: IntArray
    row: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    loss_s: FloatArray

    @cached_property
    def first(self) -> IntArray:
        """Where each run begins [R]."""
        begins = np.ones(self.run.size, dtype=bool)
        np.not_equal(self.run[1:], self.run[:-1], out=begins[1:])
        return begins.nonzero()[0]

    @cached_property
    def runs(self) -> IntArray:
        """The distinct runs [R]."""
        return self.run[self.first]

    @cached_property
    def end(self) -> IntArray:
        """Where each run ends [R]."""
        return np.append(self.first[1:], self.run.size)

    def where(self, kept: BoolArray) -> StageOptions:
        if kept.all():
            return self
        seconds = self.prefill_s[kept], self.decode_s[kept], self.loss_s[kept]
        return StageOptions(self.run[kept], self.row[kept], *seconds)


class StageLister:
    """Lists the options below `target` seconds, with stages of at most `slowest` prefill and decode
    seconds; the prices of `relaxed` rule most of them out.
    """

    def __init__(
        self,
        relaxed: RelaxedProblem,
        tables: SensitivityTables,
        target: float,
        slowest: tuple[float, float],
    ) -> None:
        self._priced, self._prices, self._path = relaxed.priced, relaxed.prices, relaxed.path
        self._tables, self._target, self._slowest = tables, target, slowest
        longest = _longest_runs(self._priced, slowest)
        self._least, self._most = _boundary_windows(self._priced, longest)
        stages = self._priced.priced_stages(self._prices)
        self._around = [
            self._around_runs(kind, int(most), stages) for kind, most in enumerate(longest)
        ]

    def entries(self) -> int:
        """Count the options to look at, at most; most of them are ruled out at once."""
        choices = self._priced.prefill_s.shape[1]
        lengths = np.concatenate(
            [stops - starts for starts, stops in (np.isfinite(a).nonzero() for a in self._around)]
        )
        counted = enumerate(np.bincount(lengths).tolist())
        return sum(runs * lattice_size(length, choices) for length, runs in counted)

    def options(self, kind: int) -> StageOptions:
        starts, stops = np.isfinite(self._around[kind]).nonzero()
        lengths = np.unique(stops - starts).tolist()
        if not lengths:
            return StageOptions(*(np.zeros(0, dtype=np.int64),) * 2, *(np.zeros(0),) * 3)
        self._tables.fill(self._longest_runs)
        counts = [self._tables.counts(length) for length in lengths]
        # Nothing is cheaper than no loss of quality, wherever the run lies.
        least = [np.diagonal(self._around[kind], length).min() for length in lengths]
        most_s = np.repeat(self._target - np.array(least), [len(each) for each in counts])
        row, *seconds = self._fitting(kind, np.concatenate(counts), most_s)
        offsets = np.cumsum([0, *map(len, counts)]).tolist()
        cuts = pairwise(np.searchsorted(row, offsets).tolist())
        parts = [
            self._of_length(kind, length, row[i:j] - offset, *(each[i:j] for each in seconds))
            for length, (i, j), offset in zip(lengths, cuts, offsets, strict=False)
        ]
        return StageOptions(*map(np.concatenate, zip(*parts, strict=True)))

    def _around_runs(self, kind: int, longest: int, stages: PricedStages) -> FloatArray:
        """The least price of all other stages [L+1, L+1]; infinite if none is below the target."""
        path, boundary = self._path, np.arange(self._priced.problem.layers + 1)
        alike = np.flatnonzero(self._priced.kinds.of_stage == kind)
        inside = (boundary >= self._least[:, np.newaxis]) & (boundary <= self._most[:, np.newaxis])
        before = np.where(inside[alike], path.before[alike], np.inf)
        after = np.where(inside[alike + 1], path.after[alike + 1], np.inf)
        around = (before[:, :, np.newaxis] + after[:, np.newaxis, :]).min(axis=0) + path.constant
        length = boundary - boundary[:, np.newaxis]
        shortest = 1 if alike[0] == 0 or alike[-1] == self._priced.problem.stages - 1 else 0
        running = stages.running[kind]
        own = running - running[:, np.newaxis] + stages.fixed[kind]
        target = self._target * (1 + ROUNDING)
        kept = (length >= shortest) & (length <= longest) & (around + own < target)
        return np.where(kept, around, np.inf)

    @cached_property
    def _longest_runs(self) -> dict[int, int]:
        longest: dict[int, int] = {}
        for around in self._around:
            inside = np.isfinite(around)
            last = inside.shape[1] - 1 - inside[:, ::-1].argmax(axis=1)
            for start in np.flatnonzero(inside.any(axis=1)).tolist():
                longest[start] = max(longest.get(start, 0), int(last[start]) - start)
        return longest

    def _fitting(
        self, kind: int, counts: IntArray, most_s: FloatArray
    ) -> tuple[IntArray, FloatArray, FloatArray, FloatArray]:
        """The rows of `counts` [M, K] that fit, their prefill and decode seconds, and their price
        without sensitivity, below `most_s` [M].
        """
        priced, prices = self._priced, self._prices
        prefill_most, decode_most = self._slowest
        usable = np.isfinite(priced.bytes[kind])
        held = (counts * np.where(usable, priced.bytes[kind], 0.0)).sum(axis=1)
        prefill = counts @ priced.prefill_s[kind] + priced.fixed_prefill_s[kind]
        decode = counts @ priced.decode_s[kind] + priced.fixed_decode_s[kind]
        fits = (held <= priced.memory_bytes[kind]) & ~counts[:, ~usable].any(axis=1)
        fits &= (prefill <= prefill_most) & (decode <= decode_most)
        own = priced.prefill_price(prices)[kind] * prefill
        own += priced.decode_price(prices)[kind] * decode
        own += prices.memory[kind] * (held - priced.memory_bytes[kind])
        rows = np.flatnonzero(fits & (own < most_s))
        return rows, prefill[rows], decode[rows], own[rows]

    def _of_length(
        self,
        kind: int,
        length: int,
        row: IntArray,
        prefill_s: FloatArray,
        decode_s: FloatArray,
        own_s: FloatArray,
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]:
        width = self._priced.problem.layers + 1
        around = np.diagonal(self._around[kind], length)
        starts = np.flatnonzero(np.isfinite(around))
        loss = self._priced.problem.theta * self._tables.least(length, starts)[:, row]
        total = loss + own_s + around[starts, np.newaxis]
        which, column = np.nonzero(total < self._target)
        run = starts[which] * (width + 1) + length
        return run, row[column], prefill_s[column], decode_s[column], loss[which, column]


def _longest_runs(priced: PricedProblem, slowest: tuple[float, float]) -> IntArray:
    """The most layers [Q] that memory and the slowest stages allow."""
    layers = priced.problem.layers
    usable = np.isfinite(priced.bytes)
    longest = np.full(len(usable), layers, dtype=np.int64)
    for limit, each in (
        (priced.memory_bytes, priced.bytes),
        (slowest[0] - priced.fixed_prefill_s, priced.prefill_s),
        (slowest[1] - priced.fixed_decode_s, priced.decode_s),
    ):
        least = np.where(usable, each, np.inf).min(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(np.isfinite(limit) & (least > 0), limit / least, float(layers))
        whole = np.floor(np.clip(most * (1 + ROUNDING), 0.0, layers)).astype(np.int64)
        longest = np.minimum(longest, whole)
    return np.where(usable.any(axis=1), longest, 0)


def _boundary_windows(priced: PricedProblem, longest: IntArray) -> tuple[IntArray, IntArray]:
    """Least and most first layer of each stage, and of the end [N+1]."""
    layers = priced.problem.layers
    upto = np.concatenate([[0], np.cumsum(longest[priced.kinds.of_stage])])
    most, least = np.minimum(upto, layers), np.maximum(layers - (upto[-1] - upto), 0)
    least[1:-1], most[1:-1] = np.maximum(least[1:-1], 1), np.minimum(most[1:-1], layers - 1)
    most[0], least[-1] = 0, layers
    return least, most
