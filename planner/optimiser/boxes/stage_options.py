"""The ways in which a stage may hold a run of layers, as far as they are not ruled out.

An option is a run of layers with its number of layers at each bitwidth. Memory (LLM-PQ eq. 12-13)
is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import BoolArray, FloatArray, IntArray
from planner.optimiser.relaxation.linear_programme import SlowestStages
from planner.optimiser.relaxation.prices import PathBound, PricedProblem, Prices
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
        changes = np.flatnonzero(np.diff(run)) + 1
        first = np.concatenate([np.zeros(min(1, run.size), dtype=np.int64), changes])
        return cls(run, row, prefill_s, decode_s, loss_s, run[first], first)

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


class StageLister:
    """Lists the options of each kind of stage of one problem."""

    def __init__(
        self, priced: PricedProblem, tables: SensitivityTables, limits: ListingLimits
    ) -> None:
        self._priced = priced
        self._tables = tables
        self._limits = limits
        self._longest = _longest_runs(priced, limits)
        self._least, self._most = _boundary_windows(priced, self._longest)

    def entries(self) -> int:
        """Count the options to look at, at most; most of them are ruled out at once."""
        choices = self._priced.prefill_s.shape[1]
        total = 0
        for kind, longest in enumerate(self._longest):
            around = np.isfinite(self._around(kind))
            lengths = range(int(longest) + 1)
            total += sum(int(np.trace(around, n)) * lattice_size(n, choices) for n in lengths)
        return total

    def options(self, kind: int) -> Options:
        """The options that an assignment below the target may use on a stage of this kind."""
        stages = np.flatnonzero(self._priced.kinds.of_stage == kind)
        shortest = 1 if {0, self._priced.problem.stages - 1} & set(stages.tolist()) else 0
        around = self._around(kind)
        parts = [
            self._of_length(kind, length, around)
            for length in range(shortest, int(self._longest[kind]) + 1)
        ]
        columns = zip(*parts, strict=True)
        empty = (np.zeros(0, dtype=np.int64),) * 2 + (np.zeros(0),) * 3
        return Options.of(*(map(np.concatenate, columns) if parts else empty))

    def _around(self, kind: int) -> FloatArray:
        """The least price of all other stages [L+1, L+1] around a run; infinite out of windows."""
        path, boundary = self._limits.path, np.arange(self._priced.problem.layers + 1)
        least = np.full((boundary.size, boundary.size), np.inf)
        for stage in np.flatnonzero(self._priced.kinds.of_stage == kind):
            starts, stops = (
                (boundary >= self._least[end]) & (boundary <= self._most[end])
                for end in (stage, stage + 1)
            )
            price = path.before[stage][:, np.newaxis] + path.after[stage + 1] + path.constant
            inside = starts[:, np.newaxis] & stops
            least = np.where(inside, np.minimum(least, price), least)
        return least

    def _of_length(
        self, kind: int, length: int, around_runs: FloatArray
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]:
        """The columns of `Options` for the runs of one length."""
        priced, limits, layers = self._priced, self._limits, self._priced.problem.layers
        around = np.diagonal(around_runs, length)
        starts = np.flatnonzero(np.isfinite(around))
        counts = self._tables.counts(length)
        usable = np.isfinite(priced.bytes[kind])
        held = (counts * np.where(usable, priced.bytes[kind], 0.0)).sum(axis=1)
        prefill = counts @ priced.prefill_s[kind] + priced.fixed_prefill_s[kind]
        decode = counts @ priced.decode_s[kind] + priced.fixed_decode_s[kind]
        fits = (held <= priced.memory_bytes[kind]) & ~counts[:, ~usable].any(axis=1)
        fits &= (prefill <= limits.slowest.prefill_most) & (decode <= limits.slowest.decode_most)
        rows = np.flatnonzero(fits)
        if not rows.size or not starts.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, np.zeros(0), np.zeros(0), np.zeros(0)
        prices = limits.prices
        own = priced.prefill_price(prices)[kind] * prefill[rows]
        own += priced.decode_price(prices)[kind] * decode[rows]
        own += prices.memory[kind] * (held[rows] - priced.memory_bytes[kind])
        loss = priced.problem.theta * self._tables.least(length, starts)[:, rows]
        total = loss + own + around[starts, np.newaxis]
        which, column = np.nonzero(total < limits.target)
        row, start = rows[column], starts[which]
        run = start * (layers + 1) + start + length
        return run, row, prefill[row], decode[row], loss[which, column]


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
