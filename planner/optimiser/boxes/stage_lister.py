"""Listing the ways in which a stage may hold a run of layers, with the least sensitivity of each.

An option is a run of layers with its number of layers of each kind at each bitwidth. Memory (LLM-PQ
eq. 12-13) is kept exactly: options that do not fit are never listed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from planner.optimiser.assignment import OutOfTimeError
from planner.optimiser.boxes.kind_options import KindRows, Makeup
from planner.optimiser.boxes.stage_options import StageOptions, joined_options
from planner.optimiser.feasibility import run_sums
from planner.optimiser.prices import PricedProblem, PricedStages
from planner.optimiser.problem import AssignmentProblem, BoolArray, FloatArray, IntArray
from planner.optimiser.relaxation import RelaxedProblem
from planner.optimiser.sensitivity_tables import LossTables, lattice_size

MOST_ENTRIES = 60_000_000  # options looked at for one limit: about 2 GB and 10 s; else the ILP
MOST_ROWS = 500_000  # of one kind's lattice: a tenth of a second
MOST_ROWS_IN_ALL = 15_000_000  # of all lattices: 1 GB
MOST_NUMBER = 2**62  # that an option's rows may make together
MOST_JOINED = 30_000_000  # the same where options have several kinds of layers
ROUNDING = 1e-9  # relative; of a quotient that should be a whole number of layers

_Each = TypeVar("_Each")


def has_one_row(problem: AssignmentProblem) -> bool:
    """Whether an option is one row of the only table: one kind, each bitwidth once, one memory."""
    each_once = len(set(problem.bitwidths)) == len(problem.bitwidths)
    return problem.kinds == 1 and each_once and len(problem.memories) == 1


class StageLister:
    """Lists the options below `target` seconds, with stages of at most `slowest` prefill and decode
    seconds; the prices of `relaxed` rule most of them out. OutOfTimeError while listing.
    """

    def __init__(
        self,
        relaxed: RelaxedProblem,
        tables: LossTables,
        target: float,
        slowest: tuple[float, float],
        out_of_time: Callable[[], bool],
    ) -> None:
        self._priced, self._prices, self._path = relaxed.priced, relaxed.prices, relaxed.path
        self._tables, self._target, self._slowest = tables, target, slowest
        self._out_of_time = out_of_time
        self._relaxed, self._is_joined = relaxed, not has_one_row(relaxed.priced.problem)
        self._fits = _fitting_runs(self._priced, slowest)
        self._inside = _boundaries(self._priced, self._fits)
        stages = self._priced.priced_stages(self._prices)
        self._around = [self._around_runs(kind, stages) for kind in range(len(self._fits))]

    @property
    def has_too_many(self) -> bool:
        """Whether there are more options to look at than time and memory allow for; most of them
        are ruled out at once.
        """
        if self._is_joined:
            return self._joined_entries() > MOST_JOINED
        choices = self._priced.prefill_s.shape[1]
        lengths = np.concatenate(
            [stops - starts for starts, stops in (np.isfinite(a).nonzero() for a in self._around)]
        )
        counted = enumerate(np.bincount(lengths).tolist())
        entries = sum(int(runs) * lattice_size(length, choices) for length, runs in counted)
        return entries > MOST_ENTRIES

    def _joined_entries(self) -> int:
        """Count the options to join, exactly up to the most that are."""
        if self._has_too_many_rows():
            return MOST_JOINED + 1
        total = 0
        for makeup in self._in_time(itertools.chain(*self._makeups)):
            if total <= MOST_JOINED:
                total += makeup.entries(MOST_JOINED - total)
        return total

    def _has_too_many_rows(self) -> bool:
        """Whether lattices are too large to be kept, or their rows to be numbered together."""
        rows: dict[tuple[int, int, int], int] = {}
        for stage, around in enumerate(self._around):
            for runs in self._in_time(self._rows.alike(around)):
                sizes = self._rows.sizes(stage, runs.lengths)
                if max(sizes) > MOST_ROWS or math.prod(sizes) > MOST_NUMBER:
                    return True
                for kind, size in enumerate(sizes):
                    rows[stage, kind, runs.lengths[kind]] = size
        return sum(rows.values()) > MOST_ROWS_IN_ALL

    def counts(self, kind: int, run: int, row: int) -> IntArray:
        """The counts [C * K] of an option of a kind of stage."""
        before = self._priced.problem.kinds_before
        start, stop = divmod(run, len(before))
        lengths = (before[stop] - before[start]).tolist()
        if self._is_joined:
            return self._rows.counts(kind, lengths, row)
        return np.asarray(self._tables.of_kinds[0].counts(lengths[0])[row])

    def options(self, kind: int) -> StageOptions:
        if self._is_joined:
            return joined_options(
                [
                    makeup.options()
                    for makeup in self._in_time(self._makeups[kind])
                    if makeup.has_options
                ]
            )
        starts, stops = np.isfinite(self._around[kind]).nonzero()
        lengths = np.unique(stops - starts).tolist()
        if not lengths:
            return joined_options([])
        (tables,) = self._tables.of_kinds
        tables.fill(self._longest_runs[0])
        counts = [tables.counts(length) for length in lengths]
        # Nothing is cheaper than no loss of quality, wherever the run lies.
        least = [np.diagonal(self._around[kind], length).min() for length in lengths]
        most_s = np.repeat(self._target - np.array(least), [len(each) for each in counts])
        row, *seconds = self._fitting(kind, np.concatenate(counts), most_s)
        offsets = np.cumsum([0, *map(len, counts)]).tolist()
        cuts = pairwise(np.searchsorted(row, offsets).tolist())
        return joined_options(
            [
                self._of_length(kind, length, row[i:j] - offset, *(each[i:j] for each in seconds))
                for length, (i, j), offset in self._in_time(
                    zip(lengths, cuts, offsets, strict=False)
                )
            ]
        )

    def _in_time(self, parts: Iterable[_Each]) -> Iterator[_Each]:
        for each in parts:
            if self._out_of_time():
                raise OutOfTimeError
            yield each

    def _around_runs(self, kind: int, stages: PricedStages) -> FloatArray:
        """The least price of all other stages [L+1, L+1]; infinite if none is below the target."""
        path, boundary = self._path, np.arange(self._priced.problem.layers + 1)
        alike = np.flatnonzero(self._priced.kinds.of_stage == kind)
        before = np.where(self._inside[alike], path.before[alike], np.inf)
        after = np.where(self._inside[alike + 1], path.after[alike + 1], np.inf)
        around = (before[:, :, np.newaxis] + after[:, np.newaxis, :]).min(axis=0) + path.constant
        length = boundary - boundary[:, np.newaxis]
        shortest = 1 if alike[0] == 0 or alike[-1] == self._priced.problem.stages - 1 else 0
        own = stages.runs(kind) + stages.fixed[kind]
        target = self._target * (1 + ROUNDING)
        kept = (length >= shortest) & self._fits[kind] & (around + own < target)
        return np.where(kept, around, np.inf)

    @cached_property
    def _rows(self) -> KindRows:
        slack_s = self._target * (1 + ROUNDING) - self._path.bound
        return KindRows(self._relaxed, self._tables, slack_s, self._slowest)

    @cached_property
    def _makeups(self) -> list[list[Makeup]]:
        """The makeups of the runs of each kind of stage, with the rows that their target leaves."""
        for tables, longest in zip(self._tables.of_kinds, self._longest_runs, strict=True):
            tables.fill(longest)
        rows = self._rows
        return [
            [Makeup(rows, stage, runs, self._target) for runs in self._in_time(rows.alike(around))]
            for stage, around in enumerate(self._around)
        ]

    @cached_property
    def _longest_runs(self) -> list[dict[int, int]]:
        """By kind of layer, the longest runs of its own layers that begin at each of them."""
        before = self._priced.problem.kinds_before
        longest: list[dict[int, int]] = [{} for _ in range(before.shape[1])]
        for around in self._around:
            inside = np.isfinite(around)
            last = inside.shape[1] - 1 - inside[:, ::-1].argmax(axis=1)
            for start in np.flatnonzero(inside.any(axis=1)).tolist():
                lengths = before[last[start]] - before[start]
                for own, at, length in zip(
                    longest, before[start].tolist(), lengths.tolist(), strict=True
                ):
                    own[at] = max(own.get(at, 0), length)
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
    ) -> StageOptions:
        width = self._priced.problem.layers + 1
        around = np.diagonal(self._around[kind], length)
        starts = np.flatnonzero(np.isfinite(around))
        (tables,) = self._tables.of_kinds
        loss = self._priced.problem.theta * tables.least(length, starts)[:, row]
        total = loss + own_s + around[starts, np.newaxis]
        which, column = np.nonzero(total < self._target)
        run = starts[which] * (width + 1) + length
        seconds = prefill_s[column], decode_s[column], loss[which, column]
        return StageOptions(run, row[column], *seconds)


def _fitting_runs(priced: PricedProblem, slowest: tuple[float, float]) -> list[BoolArray]:
    """Whether memory and the slowest stages allow a kind of stage a run [Q], each [L+1, L+1]."""
    problem, usable = priced.problem, np.isfinite(priced.bytes)
    limits = (
        (priced.memory_bytes, priced.bytes),
        (priced.host_memory_bytes, priced.host_bytes),
        (slowest[0] - priced.fixed_prefill_s, priced.prefill_s),
        (slowest[1] - priced.fixed_decode_s, priced.decode_s),
    )
    boundary = np.arange(problem.layers + 1)
    length = boundary - boundary[:, np.newaxis]
    fits = []
    for stage in range(len(usable)):
        kept = length >= 0
        for limit, each in limits:
            own = np.where(usable[stage], each[stage], np.inf)
            least = own.reshape(problem.kinds, -1).min(axis=1)
            if problem.kinds == 1:
                kept = kept & (
                    length <= _most_layers(limit[stage], float(least[0]), problem.layers)
                )
            else:
                kept = kept & (run_sums(least, problem) <= limit[stage] * (1 + ROUNDING))
        fits.append(kept)
    return fits


def _most_layers(limit: float, each: float, layers: int) -> int:
    if np.isinf(each):
        return 0
    if np.isinf(limit) or each == 0:
        return layers
    return int(np.floor(np.clip(limit / each * (1 + ROUNDING), 0.0, layers)))


def _boundaries(priced: PricedProblem, fits: list[BoolArray]) -> BoolArray:
    """Where each stage, and the end, may begin [N+1, L+1], if the stages hold runs that fit."""
    of_stage, layers = priced.kinds.of_stage.tolist(), priced.problem.layers
    after = np.zeros((len(of_stage) + 1, layers + 1), dtype=bool)
    before = after.copy()
    before[0, 0] = after[-1, -1] = True
    for stage, kind in enumerate(of_stage):
        before[stage + 1] = before[stage] @ fits[kind]
    for stage, kind in reversed(list(enumerate(of_stage))):
        after[stage] = fits[kind] @ after[stage + 1]
    inside = before & after
    inside[1:-1, [0, -1]] = False
    return inside
