"""The options of runs with layers of several kinds, joined from those of each kind.

An option has one row of a lattice for each kind of layer. The full product of the lattices is never
made: first each kind keeps the rows that are cheap enough beside the cheapest of all other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.optimiser.boxes.stage_options import StageOptions
from planner.optimiser.problem import FloatArray, IntArray
from planner.optimiser.relaxation import RelaxedProblem
from planner.optimiser.sensitivity_tables import LossTables, compositions, lattice_size

COMPARED = 24  # options of a run that all others are compared with


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Rows [M] of one kind's lattice on one kind of stage: what their layers `need` of memory on
    device and host, prefill and decode [M, 4], their price without quality, and their `place` in
    the table of losses.
    """

    row: IntArray
    place: IntArray
    need: FloatArray
    price_s: FloatArray

    def where(self, kept: IntArray) -> OwnRows:
        return OwnRows(self.row[kept], self.place[kept], self.need[kept], self.price_s[kept])


@dataclass(frozen=True, eq=False)
class AlikeRuns:
    """Runs [A] with as many layers of each kind, `lengths` [C]: where they begin and end, and the
    least price of all other stages.
    """

    lengths: tuple[int, ...]
    starts: IntArray
    stops: IntArray
    around_s: FloatArray


class KindRows:
    """The rows of each kind of layer on each kind of stage: runs with as many layers share them.
    No layer has a choice that would cost more than `slack_s` over its cheapest.
    """

    def __init__(
        self,
        relaxed: RelaxedProblem,
        tables: LossTables,
        slack_s: float,
        slowest: tuple[float, float],
    ) -> None:
        priced, prices = relaxed.priced, relaxed.prices
        self.priced, self._tables = priced, tables
        self._choices = _promising_choices(relaxed, slack_s)
        prefill, decode = priced.prefill_price(prices), priced.decode_price(prices)
        # prices of a unit of each need, and what layers may take in all [Q, 4]
        self._price = np.column_stack([prices.memory, prices.host, prefill, decode])
        fixed = [-priced.memory_bytes, -priced.host_memory_bytes]
        fixed += [priced.fixed_prefill_s, priced.fixed_decode_s]
        self.fixed_s = (self._price * np.column_stack(fixed)).sum(axis=1)
        self.room = np.array([0.0, 0.0, *slowest]) - np.column_stack(fixed)
        self._rows: dict[tuple[int, int, int], OwnRows] = {}
        self._losses: dict[tuple[int, int, bytes], FloatArray] = {}

    def alike(self, around: FloatArray) -> Iterator[AlikeRuns]:
        """Yield the runs that `around` [L+1, L+1] has a price for, by their numbers of layers."""
        starts, stops = np.isfinite(around).nonzero()
        before = self.priced.problem.kinds_before
        lengths = before[stops] - before[starts]
        order = np.lexsort(lengths.T)
        begins = np.flatnonzero((np.diff(lengths[order], axis=0) != 0).any(axis=1)) + 1
        for own in np.split(order, begins) if starts.size else ():
            first, last = starts[own], stops[own]
            yield AlikeRuns(tuple(lengths[own[0]].tolist()), first, last, around[first, last])

    def of_kind(self, stage: int, kind: int, length: int) -> OwnRows:
        """The rows of so many layers that this kind of stage can run."""
        key = stage, kind, length
        if key not in self._rows:
            priced, choices = self.priced, self._choices[stage][kind]
            cells = kind * len(priced.problem.bitwidths) + choices
            counts = compositions(length, choices.size)
            arrays = priced.bytes, priced.host_bytes, priced.prefill_s, priced.decode_s
            need = counts @ np.column_stack([each[stage, cells] for each in arrays])
            place = self._tables.places(counts, choices)
            row = np.arange(len(counts))
            self._rows[key] = OwnRows(row, place, need, need @ self._price[stage])
        return self._rows[key]

    def losses(self, kind: int, length: int, starts: IntArray) -> FloatArray:
        """The quality terms of all rows of the kind's layers in runs from `starts` [A] on."""
        own = self.priced.problem.kinds_before[starts, kind]
        key = kind, length, own.tobytes()
        if key not in self._losses:
            theta = self.priced.problem.theta
            self._losses[key] = theta * self._tables.of_kinds[kind].least(length, own)
        return self._losses[key]

    def sizes(self, stage: int, lengths: Sequence[int]) -> list[int]:
        """How many rows the kinds' lattices have."""
        pairs = zip(self._choices[stage], lengths, strict=True)
        return [lattice_size(length, choices.size) for choices, length in pairs]

    def counts(self, stage: int, lengths: Sequence[int], row: int) -> IntArray:
        """The counts [C * K] of an option of a run with so many layers of each kind."""
        width = len(self.priced.problem.bitwidths)
        counts = np.zeros((len(lengths), width), dtype=np.int64)
        sizes = self.sizes(stage, lengths)
        for kind, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            row, own = divmod(row, size)
            choices = self._choices[stage][kind]
            counts[kind, choices] = compositions(length, choices.size)[own]
        return counts.ravel()


def _promising_choices(relaxed: RelaxedProblem, slack_s: float) -> list[list[IntArray]]:
    """The choices of each kind of layer [C] on each kind of stage [Q] that are cheap enough for
    some layer.
    """
    problem = relaxed.priced.problem
    prices = relaxed.priced.layer_prices(relaxed.prices)
    least = prices.min(axis=2, keepdims=True)
    over = np.where(np.isfinite(prices), prices - np.where(np.isfinite(least), least, 0.0), np.inf)
    found = []
    for own in over:
        kinds = [own[problem.kind_of_layer == kind] for kind in range(problem.kinds)]
        found.append([np.flatnonzero((each <= slack_s).any(axis=0)) for each in kinds])
    return found


def joined_rows(rows: Sequence[IntArray], sizes: Sequence[int]) -> IntArray:
    """One number [M] for the rows [M] of all kinds in lattices of such sizes."""
    joined = np.zeros_like(rows[0])
    for own, size in zip(reversed(rows), reversed(sizes), strict=True):
        joined = joined * size + own
    return joined


class Makeup:
    """The options of alike runs on one kind of stage below `target` seconds; each kind keeps the
    rows that fit, and are below the target, beside the least of the others.
    """

    def __init__(self, rows: KindRows, stage: int, runs: AlikeRuns, target: float) -> None:
        self._rows, self._stage, self._runs = rows, stage, runs
        own = [rows.of_kind(stage, kind, length) for kind, length in enumerate(runs.lengths)]
        self._own = self._fitting(own)
        self._loss: list[FloatArray] = []  # [A, M] of each kind
        self._over: list[FloatArray] = []  # [A, M], price and loss above the kind's least
        self._slack: FloatArray = np.zeros(runs.starts.size)
        if self.has_options:
            self._keep_cheap(target)

    @property
    def has_options(self) -> bool:
        return all(each.row.size for each in self._own)

    def entries(self, most: int) -> int:
        """Count the options to look at; up to `most` exactly."""
        if not self.has_options:
            return 0
        slack, runs = float(self._slack.max()), int(self._runs.starts.size)
        over, *others = (each.min(axis=0) for each in self._over)
        for place, other in enumerate(others, 1):
            found = _Pairs(over, other, slack)
            if place == len(others) or found.count * runs > most:
                return found.count * runs
            over = found.sums
        return int(over.size) * runs

    def options(self) -> StageOptions:
        problem, stage, slack = self._rows.priced.problem, self._stage, self._slack
        picks, need = self._joined(float(slack.max()))
        parts = zip(self._over, picks, strict=True)
        over = np.asarray(sum(each[:, pick] for each, pick in parts))
        which, option = np.nonzero(over < slack[:, np.newaxis])
        losses = zip(self._loss, picks, strict=True)
        loss = np.asarray(sum(each[which, pick[option]] for each, pick in losses))
        costs = need[option, 2], need[option, 3], loss
        kept = unbeaten(costs, over[which, option], which)
        which, option, loss = which[kept], option[kept], loss[kept]
        picks = [pick[option] for pick in picks]
        places = [own.row[pick] for own, pick in zip(self._own, picks, strict=True)]
        return StageOptions(
            self._runs.starts[which] * (problem.layers + 1) + self._runs.stops[which],
            joined_rows(places, self._rows.sizes(stage, self._runs.lengths)),
            need[option, 2] + self._rows.priced.fixed_prefill_s[stage],
            need[option, 3] + self._rows.priced.fixed_decode_s[stage],
            loss,
        )

    def _fitting(self, own: list[OwnRows]) -> list[OwnRows]:
        if not all(each.row.size for each in own):
            return own
        least = [each.need.min(axis=0) for each in own]
        room = self._rows.room[self._stage] - sum(least)
        return [
            each.where(np.flatnonzero((each.need - low <= room).all(axis=1)))
            for each, low in zip(own, least, strict=True)
        ]

    def _keep_cheap(self, target: float) -> None:
        runs = self._runs
        loss = [
            self._rows.losses(kind, length, runs.starts)[:, own.place]
            for kind, (length, own) in enumerate(zip(runs.lengths, self._own, strict=True))
        ]
        worth = [own.price_s + each for own, each in zip(self._own, loss, strict=True)]
        least = [each.min(axis=1, keepdims=True) for each in worth]
        fixed = self._rows.fixed_s[self._stage] + runs.around_s
        self._slack = target - fixed - sum(each[:, 0] for each in least)
        for kind, each in enumerate(worth):
            over = each - least[kind]
            kept = np.flatnonzero((over < self._slack[:, np.newaxis]).any(axis=0))
            self._own[kind] = self._own[kind].where(kept)
            self._over.append(over[:, kept])
            self._loss.append(loss[kind][:, kept])

    def _joined(self, slack: float) -> tuple[list[IntArray], FloatArray]:
        """Rows of each kind that fit together, with what they need, within the most slack."""
        room = self._rows.room[self._stage]
        least = [each.need.min(axis=0) for each in self._own]
        over = self._over[0].min(axis=0)
        picks, need = [np.arange(over.size)], self._own[0].need
        for kind, own in enumerate(self._own[1:], 1):
            pairs = _Pairs(over, self._over[kind].min(axis=0), slack)
            left, right = pairs.places
            together = need[left] + own.need[right]
            fits = np.flatnonzero((together + sum(least[kind + 1 :]) <= room).all(axis=1))
            picks = [*(pick[left[fits]] for pick in picks), right[fits]]
            over, need = pairs.sums[fits], together[fits]
        return picks, need


def unbeaten(
    costs: tuple[FloatArray, FloatArray, FloatArray], over_s: FloatArray, run: IntArray
) -> IntArray:
    """The options but most of those that one of the same `run` [M], which rises, is below or level
    with in all `costs` [M]: compared with the few of each run that are the least `over_s` [M].
    """
    begins = np.flatnonzero(np.append(True, run[1:] != run[:-1])).tolist()
    parts = []
    for begin, end in zip(begins, [*begins[1:], run.size], strict=True):
        left = np.arange(begin, end)
        if left.size > 4 * COMPARED:
            own = [each[begin:end] for each in costs]
            least = np.argpartition(over_s[begin:end], COMPARED)[:COMPARED] + begin
            for one in least[over_s[least].argsort()].tolist():
                better = left == one
                if not better.any():
                    continue  # what it would beat was beaten with it
                for values, each in zip(own, costs, strict=True):
                    better |= values < each[one]
                left, own = left[better], [values[better] for values in own]
        parts.append(left)
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


class _Pairs:
    """The pairs of values [M] and [P] whose sum is below a limit, found without making all."""

    def __init__(self, left: FloatArray, right: FloatArray, limit: float) -> None:
        self._left, self._right = left, right
        self._order = np.argsort(right)
        self._counts = np.searchsorted(right[self._order], limit - left)
        self.count = int(self._counts.sum())

    @cached_property
    def places(self) -> tuple[IntArray, IntArray]:
        """Where the pairs' values are [count]."""
        left = np.repeat(np.arange(self._left.size), self._counts)
        begins = np.repeat(self._counts.cumsum() - self._counts, self._counts)
        return left, self._order[np.arange(self.count) - begins]

    @property
    def sums(self) -> FloatArray:
        left, right = self.places
        return np.asarray(self._left[left] + self._right[right])
