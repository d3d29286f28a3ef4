"""The ways in which a stage may hold a run of layers, as far as they are not ruled out.

An option is a run of layers with its number of layers at each bitwidth. Memory (LLM-PQ eq. 12-13)
is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.optimiser.problem import BoolArray, FloatArray, IntArray
from planner.optimiser.relaxation.linear_programme import SlowestStages
from planner.optimiser.relaxation.prices import PathBound, PricedProblem, Prices, StageCosts
from planner.optimiser.sensitivity_tables import SensitivityTables, lattice_size

ROUNDING = 1e-9  # relative; of a quotient that should be a whole number of layers


@dataclass(frozen=True, eq=False)
class Options:
    """The options [M] of one kind of stage with their costs; options of one run are neighbours.

    `run` is start * (layers + 1) + stop, `row` the row in its length's lattice of counts; times
    are seconds with the stage's fixed part, `loss_s` is theta * omega. `runs` [R] are the distinct
    runs, `first` [R] where each begins.
    """

    run: IntArray
    row: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    loss_s: FloatArray
    runs: IntArray
    first: IntArray

    @classmethod
    def of(
        cls,
        run: IntArray,
        row: IntArray,
        prefill_s: FloatArray,
        decode_s: FloatArray,
        loss_s: FloatArray,
    ) -> Options:
        """Keep the options in this order and find where each run begins."""
        begins = np.ones(run.size, dtype=bool)
        np.not_equal(run[1:], run[:-1], out=begins[1:])
        first = begins.nonzero()[0]
        return cls(run, row, prefill_s, decode_s, loss_s, run[first], first)

    @cached_property
    def end(self) -> IntArray:
        """Where each run ends [R]."""
        return np.append(self.first[1:], self.run.size)

    def where(self, kept: BoolArray) -> Options:
        """The options marked [M]."""
        if kept.all():
            return self
        return Options.of(
            self.run[kept],
            self.row[kept],
            self.prefill_s[kept],
            self.decode_s[kept],
            self.loss_s[kept],
        )


@dataclass(frozen=True, eq=False)
class ListingLimits:
    """Facts about all assignments below `target` seconds, which rule most options out.

    `slowest` limits their slowest stages; `prices` prove a bound on the `path` of stages around an
    option.
    """

    target: float
    slowest: SlowestStages
    prices: Prices
    path: PathBound


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Rows of counts [R] that fit a kind of stage: seconds, and the price but for sensitivity."""

    row: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    own_s: FloatArray

    def part(self, chosen: slice, offset: int) -> _Fitting:
        """Some of the rows, counted from `offset` on."""
        columns = self.prefill_s[chosen], self.decode_s[chosen], self.own_s[chosen]
        return _Fitting(self.row[chosen] - offset, *columns)


class StageLister:
    """Lists the options of each kind of stage of one problem."""

    def __init__(
        self, priced: PricedProblem, tables: SensitivityTables, limits: ListingLimits
    ) -> None:
        self._priced = priced
        self._tables = tables
        self._limits = limits
        longest = _longest_runs(priced, limits)
        self._least, self._most = _boundary_windows(priced, longest)
        costs = priced.stage_costs(limits.prices)
        self._around = [
            self._around_runs(kind, int(most), costs) for kind, most in enumerate(longest)
        ]

    def entries(self) -> int:
        """Count the options to look at, at most; most of them are ruled out at once."""
        choices = self._priced.prefill_s.shape[1]
        lengths = np.concatenate(
            [stops - starts for starts, stops in (np.isfinite(a).nonzero() for a in self._around)]
        )
        counted = enumerate(np.bincount(lengths).tolist())
        return sum(runs * lattice_size(length, choices) for length, runs in counted)

    def options(self, kind: int) -> Options:
        """The options that an assignment below the target may use on a stage of this kind."""
        starts, stops = np.isfinite(self._around[kind]).nonzero()
        lengths = np.unique(stops - starts).tolist()
        if not lengths:
            return Options.of(*(np.zeros(0, dtype=np.int64),) * 2, *(np.zeros(0),) * 3)
        self._tables.fill(self._longest_runs)
        counts = [self._tables.counts(length) for length in lengths]
        # Nothing is cheaper than no loss of quality, wherever the run lies.
        least = [np.diagonal(self._around[kind], length).min() for length in lengths]
        most_s = np.repeat(self._limits.target - np.array(least), [len(each) for each in counts])
        fitting = self._fitting(kind, np.concatenate(counts), most_s)
        offsets = np.cumsum([0, *map(len, counts)])
        cuts = np.searchsorted(fitting.row, offsets).tolist()
        parts = [
            self._of_length(kind, length, fitting.part(slice(*cut), int(offset)))
            for length, cut, offset in zip(lengths, pairwise(cuts), offsets, strict=False)
        ]
        return Options.of(*map(np.concatenate, zip(*parts, strict=True)))

    def _around_runs(self, kind: int, longest: int, costs: StageCosts) -> FloatArray:
        """The least price of all other stages [L+1, L+1] around a run on a stage of this kind;
        infinite where no assignment below the target has the run there.
        """
        path, boundary = self._limits.path, np.arange(self._priced.problem.layers + 1)
        stages = np.flatnonzero(self._priced.kinds.of_stage == kind)
        inside = (boundary >= self._least[:, np.newaxis]) & (boundary <= self._most[:, np.newaxis])
        before = np.where(inside[stages], path.before[stages], np.inf)
        after = np.where(inside[stages + 1], path.after[stages + 1], np.inf)
        around = (before[:, :, np.newaxis] + after[:, np.newaxis, :]).min(axis=0) + path.constant
        length = boundary - boundary[:, np.newaxis]
        shortest = 1 if stages[0] == 0 or stages[-1] == self._priced.problem.stages - 1 else 0
        running = costs.running[kind]
        own = running - running[:, np.newaxis] + costs.fixed[kind]
        target = self._limits.target * (1 + ROUNDING)
        kept = (length >= shortest) & (length <= longest) & (around + own < target)
        return np.where(kept, around, np.inf)

    @cached_property
    def _longest_runs(self) -> dict[int, int]:
        """The most layers of the runs from each start on, on stages of any kind."""
        longest: dict[int, int] = {}
        for around in self._around:
            inside = np.isfinite(around)
            last = inside.shape[1] - 1 - inside[:, ::-1].argmax(axis=1)
            for start in np.flatnonzero(inside.any(axis=1)).tolist():
                longest[start] = max(longest.get(start, 0), int(last[start]) - start)
        return longest

    def _fitting(self, kind: int, counts: IntArray, most_s: FloatArray) -> _Fitting:
        """The rows of `counts` [M, K] that memory and the slowest stages allow, with their costs,
        where these are below `most_s` [M].
        """
        priced, limits, prices = self._priced, self._limits, self._limits.prices
        usable = np.isfinite(priced.bytes[kind])
        held = (counts * np.where(usable, priced.bytes[kind], 0.0)).sum(axis=1)
        prefill = counts @ priced.prefill_s[kind] + priced.fixed_prefill_s[kind]
        decode = counts @ priced.decode_s[kind] + priced.fixed_decode_s[kind]
        fits = (held <= priced.memory_bytes[kind]) & ~counts[:, ~usable].any(axis=1)
        fits &= (prefill <= limits.slowest.prefill_most) & (decode <= limits.slowest.decode_most)
        own = priced.prefill_price(prices)[kind] * prefill
        own += priced.decode_price(prices)[kind] * decode
        own += prices.memory[kind] * (held - priced.memory_bytes[kind])
        rows = np.flatnonzero(fits & (own < most_s))
        return _Fitting(rows, prefill[rows], decode[rows], own[rows])

    def _of_length(
        self, kind: int, length: int, fitting: _Fitting
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]:
        """The columns of `Options` for the runs of one length."""
        width = self._priced.problem.layers + 1
        around = np.diagonal(self._around[kind], length)
        starts = np.flatnonzero(np.isfinite(around))
        least = self._tables.least(length, starts)[:, fitting.row]
        loss = self._priced.problem.theta * least
        total = loss + fitting.own_s + around[starts, np.newaxis]
        which, column = np.nonzero(total < self._limits.target)
        run = starts[which] * (width + 1) + length
        prefill, decode = fitting.prefill_s[column], fitting.decode_s[column]
        return run, fitting.row[column], prefill, decode, loss[which, column]


def _longest_runs(priced: PricedProblem, limits: ListingLimits) -> IntArray:
    """The most layers [Q] that memory and the slowest stages allow."""
    layers = priced.problem.layers
    usable = np.isfinite(priced.bytes)
    room = (
        (priced.memory_bytes, priced.bytes),
        (limits.slowest.prefill_most - priced.fixed_prefill_s, priced.prefill_s),
        (limits.slowest.decode_most - priced.fixed_decode_s, priced.decode_s),
    )
    longest = np.full(len(usable), layers, dtype=np.int64)
    for limit, each in room:
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
