"""Every way a stage may hold a run of layers that is not yet ruled out, with what it costs.

An option is a run of layers with its number of layers at each bitwidth. Memory (LLM-PQ eq. 12-13)
is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.optimiser.boxes.multipliers import PathBound, PricedProblem, Prices
from planner.optimiser.problem import BoolArray, FloatArray, IntArray
from planner.optimiser.quality_tables import QualityTables, lattice_size

ROUNDING = 1e-9  # relative; of a quotient that should be a whole number of layers


@dataclass(frozen=True, eq=False)
class Options:
    """The options [M] of one kind of stage; those of the same run are neighbours.

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
        """Options in this order."""
        changes = np.flatnonzero(np.diff(run)) + 1
        first = np.concatenate([np.zeros(min(1, run.size), dtype=np.int64), changes])
        return cls(run, row, prefill_s, decode_s, loss_s, run[first], first)

    def where(self, kept: BoolArray) -> Options:
        """Only those marked [M]."""
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
class Reach:
    """What is known of all assignments below `target` seconds: the slowest stages' limits in
    seconds, and prices with their bound.
    """

    target: float
    prefill_most: float
    decode_most: float
    prices: Prices
    path: PathBound


class StageLister:
    """Lists the options of each kind of stage of one problem."""

    def __init__(self, priced: PricedProblem, tables: QualityTables, reach: Reach) -> None:
        self._priced = priced
        self._tables = tables
        self._reach = reach
        self._longest = _longest_runs(priced, reach)
        self._least, self._most = _boundary_windows(priced, self._longest)

    def entries(self) -> int:
        """At most so many options are looked at, of which most are ruled out at once."""
        choices = self._priced.prefill_s.shape[1]
        total = 0
        for kind, longest in enumerate(self._longest):
            rest = np.isfinite(self._rest(kind))
            lengths = range(int(longest) + 1)
            total += sum(int(np.trace(rest, n)) * lattice_size(n, choices) for n in lengths)
        return total

    def options(self, kind: int) -> Options:
        """Those that an assignment below the target may use on a stage of this kind."""
        stages = np.flatnonzero(self._priced.kinds.of_stage == kind)
        shortest = 1 if {0, self._priced.problem.stages - 1} & set(stages.tolist()) else 0
        rest = self._rest(kind)
        parts = [
            self._of_length(kind, length, rest)
            for length in range(shortest, int(self._longest[kind]) + 1)
        ]
        columns = zip(*parts, strict=True)
        empty = (np.zeros(0, dtype=np.int64),) * 2 + (np.zeros(0),) * 3
        return Options.of(*(map(np.concatenate, columns) if parts else empty))

    def _rest(self, kind: int) -> FloatArray:
        """The least price of all other stages [L+1, L+1] around a run; infinite out of windows."""
        path, boundary = self._reach.path, np.arange(self._priced.problem.layers + 1)
        rest = np.full((boundary.size, boundary.size), np.inf)
        for stage in np.flatnonzero(self._priced.kinds.of_stage == kind):
            starts, stops = (
                (boundary >= self._least[end]) & (boundary <= self._most[end])
                for end in (stage, stage + 1)
            )
            around = path.before[stage][:, np.newaxis] + path.after[stage + 1] + path.constant
            inside = starts[:, np.newaxis] & stops
            rest = np.where(inside, np.minimum(rest, around), rest)
        return rest

    def _of_length(
        self, kind: int, length: int, rest: FloatArray
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]:
        """The columns of `Options` for the runs of one length."""
        priced, reach, layers = self._priced, self._reach, self._priced.problem.layers
        around = np.diagonal(rest, length)
        starts = np.flatnonzero(np.isfinite(around))
        counts = self._tables.counts(length)
        usable = np.isfinite(priced.bytes[kind])
        held = (counts * np.where(usable, priced.bytes[kind], 0.0)).sum(axis=1)
        prefill = counts @ priced.prefill_s[kind] + priced.fixed_prefill_s[kind]
        decode = counts @ priced.decode_s[kind] + priced.fixed_decode_s[kind]
        fits = (held <= priced.memory_bytes[kind]) & ~counts[:, ~usable].any(axis=1)
        fits &= (prefill <= reach.prefill_most) & (decode <= reach.decode_most)
        rows = np.flatnonzero(fits)
        if not rows.size or not starts.size:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, np.zeros(0), np.zeros(0), np.zeros(0)
        prices = reach.prices
        own = (1.0 + prices.prefill[kind]) * prefill[rows]
        own += priced.decode_price(prices)[kind] * decode[rows]
        own += prices.memory[kind] * (held[rows] - priced.memory_bytes[kind])
        loss = priced.problem.theta * self._tables.least(length, starts)[:, rows]
        total = loss + own + around[starts, np.newaxis]
        which, column = np.nonzero(total < reach.target)
        row, start = rows[column], starts[which]
        run = start * (layers + 1) + start + length
        return run, row, prefill[row], decode[row], loss[which, column]


def _longest_runs(priced: PricedProblem, reach: Reach) -> IntArray:
    """The most layers [Q] that memory and the slowest stages allow."""
    layers = priced.problem.layers
    usable = np.isfinite(priced.bytes)
    room = (
        (priced.memory_bytes, priced.bytes),
        (reach.prefill_most - priced.fixed_prefill_s, priced.prefill_s),
        (reach.decode_most - priced.fixed_decode_s, priced.decode_s),
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
