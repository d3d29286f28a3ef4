"""The ways in which a stage may hold a run of layers, as far as they are not ruled out.

An option is a run of layers with its number of layers at each bitwidth. Memory (LLM-PQ eq. 12-13)
is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.optimiser.prices import PricedProblem, PricedStages
from planner.optimiser.problem import BoolArray, FloatArray, IntArray
from planner.optimiser.relaxation import RelaxedProblem
from planner.optimiser.sensitivity_tables import SensitivityTables, lattice_size

ROUNDING = 1e-9  # relative; of a quotient that should be a whole number of layers


@dataclass(frozen=True, eq=False)
class StageOptions:
    """The options [M] of one kind of stage. `run` is start * (layers + 1) + stop, `row` the row in
    its length's lattice; times are seconds with the fixed part. `runs` [R] are the distinct runs,
    `first` [R] where each begins.
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
    ) -> StageOptions:
        begins = np.ones(run.size, dtype=bool)
        np.not_equal(run[1:], run[:-1], out=begins[1:])
        first = begins.nonzero()[0]
        return cls(run, row, prefill_s, decode_s, loss_s, run[first], first)

    @cached_property
    def end(self) -> IntArray:
        """Where each run ends [R]."""
        return np.append(self.first[1:], self.run.size)

    def where(self, kept: BoolArray) -> StageOptions:
        if kept.all():
            return self
        seconds = self.prefill_s[kept], self.decode_s[kept], self.loss_s[kept]
        return StageOptions.of(self.run[kept], self.row[kept], *seconds)


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
        """The options of a stage of this kind."""
        starts, stops = np.isfinite(self._around[kind]).nonzero()
        lengths = np.unique(stops - starts).tolist()
        if not lengths:
            return StageOptions.of(*(np.zeros(0, dtype=np.int64),) * 2, *(np.zeros(0),) * 3)
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
        return StageOptions.of(*map(np.concatenate, zip(*parts, strict=True)))

    def _around_runs(self, kind: int, longest: int, stages: PricedStages) -> FloatArray:
        """The least price of all other stages [L+1, L+1] around a run; infinite where none is below
        the target.
        """
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
