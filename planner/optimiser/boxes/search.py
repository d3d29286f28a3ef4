"""Exact search over how slow the slowest stage may be, prefill by decode.

Once the slowest prefill and decode are held within a box, the stages of an assignment are coupled
by their boundaries only, and the best one is a shortest path over boundaries through the options of
each stage. Boxes are split until none can hold anything better than the best path found by more
than the gap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.optimiser.boxes.stage_options import Options
from planner.optimiser.problem import FloatArray
from planner.optimiser.relaxation.prices import PricedProblem, Prices

LEAST_GAP = 1e-9  # relative; above the rounding of sums
TRIP_STEPS = 4


@dataclass(frozen=True, eq=False)
class Path:
    """One option for each stage: (run, counts row), decode seconds [N], slowest, objective."""

    picks: tuple[tuple[int, int], ...]
    decode_s: FloatArray
    slowest_prefill_s: float
    slowest_decode_s: float
    objective: float


@dataclass(frozen=True, eq=False)
class Box:
    """Limits in seconds on the slowest prefill and decode, and what each stage may hold [N]."""

    prefill_least: float
    decode_least: float
    options: tuple[Options, ...]


@dataclass(frozen=True, eq=False)
class Relaxed:
    """A bound on a box in seconds, the path that attains it, and each option's cost by stage.

    `tables` [N] of [L+1, L+1] are the least costs of each stage's runs, and `before` [N+1, L+1]
    that of the stages before each boundary, to which `constant` comes. `other` is the path at a
    neighbouring trip price, where one lies between two.
    """

    bound: float
    path: Path
    trip: float
    costs: tuple[FloatArray, ...]
    tables: tuple[FloatArray, ...]
    before: FloatArray
    constant: float
    other: Path | None = None


class BoxSearch:
    """Branch and bound over boxes for one problem.

    Only assignments below `limit` seconds are sought; `best` is the best path seen, below or not.
    """

    def __init__(
        self,
        priced: PricedProblem,
        prices: Prices,
        relative_gap: float,
        limit: float,
        out_of_time: Callable[[], bool],
    ) -> None:
        self._priced = priced
        self._form = priced.form
        self._kinds = priced.kinds.of_stage
        self._prices = prices
        self._unpriced = replace(
            prices, prefill=0.0 * prices.prefill, decode=0.0 * prices.decode, trip=0.0
        )
        self._gap = max(relative_gap, LEAST_GAP)
        self._limit = limit
        self._out_of_time = out_of_time
        self.best: Path | None = None

    @property
    def target(self) -> float:
        """Seconds below which an assignment is still of interest."""
        found = math.inf if self.best is None else self.best.objective
        return min(self._limit, found * (1 - self._gap))

    def run(self, box: Box, bound: float) -> float:
        """Search `box` until nothing is left or time is up; return the bound proven, in seconds."""
        order = itertools.count()
        heap = [(bound, next(order), box)]
        while heap and heap[0][0] < self.target:
            if self._out_of_time():
                return heap[0][0]
            bound, _, box = heapq.heappop(heap)
            for part_bound, part in self._parts(box, bound):
                heapq.heappush(heap, (part_bound, next(order), part))
        return self.target

    def _parts(self, box: Box, bound: float) -> Iterator[tuple[float, Box]]:
        """Yield the parts of a box that may hold something better, with the bound on each."""
        while True:
            plain = self._plain(box)
            if plain is None or plain.bound >= self.target:
                return
            box = self._filtered(box, plain)
            tighter = self._tightened(box, plain)
            if tighter is None:
                break
            box = tighter
        priced = self._relaxed(box, self._prices)
        if priced is None or priced.bound >= self.target:
            return
        box = self._filtered(box, priced)
        bound = max(bound, plain.bound, priced.bound)
        for part in self._halves(box, plain):
            yield bound, part

    def _plain(self, box: Box) -> Relaxed | None:
        """The relaxation without prices on the slowest stages, at the best trip price."""
        low = self._relaxed(box, self._unpriced)
        if low is None or self._trip_excess(box, low.path) <= 0:
            return low
        high = self._relaxed(box, replace(self._unpriced, trip=1.0))
        if high is None or self._trip_excess(box, high.path) >= 0:
            return high
        best = max(low, high, key=lambda found: found.bound)
        for _ in range(TRIP_STEPS):
            rise, fall = (self._trip_excess(box, found.path) for found in (low, high))
            start, stop = low.bound - rise * low.trip, high.bound - fall * high.trip
            trip = (stop - start) / (rise - fall)
            middle = self._relaxed(box, replace(self._unpriced, trip=trip))
            if middle is None:
                return None
            best = max(best, middle, key=lambda found: found.bound)
            if middle.bound >= (start + rise * trip) * (1 - LEAST_GAP):
                break
            if self._trip_excess(box, middle.path) > 0:
                low = middle
            else:
                high = middle
        return replace(best, path=low.path, other=high.path)

    def _trip_excess(self, box: Box, path: Path) -> float:
        """Seconds by which a path's trips exceed the least decode rounds of the box."""
        trips_s = float(self._form.trips_s(float(path.decode_s.sum())))
        return trips_s - self._form.decode_max * box.decode_least

    def _relaxed(self, box: Box, prices: Prices) -> Relaxed | None:
        """The best path at these prices; None where it is not below the target."""
        constant = self._priced.constant(prices, box.prefill_least, box.decode_least)
        costs, tables = self._costs(box, prices)
        before = _before(tables)
        bound = constant + float(before[-1, -1])
        if bound >= self.target or math.isinf(bound):
            return None
        path = self._path(box, tables, costs, before)
        if self.best is None or path.objective < self.best.objective:
            self.best = path
        return Relaxed(bound, path, prices.trip, tuple(costs), tuple(tables), before, constant)

    def _costs(self, box: Box, prices: Prices) -> tuple[list[FloatArray], list[FloatArray]]:
        """Price each stage's options, [M], and find the least price of each run, [L+1, L+1]."""
        width = self._priced.problem.layers + 1
        prefill, decode = self._priced.prefill_price(prices), self._priced.decode_price(prices)
        found: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        keys = [(id(o), int(k)) for o, k in zip(box.options, self._kinds, strict=True)]
        for key, options in zip(keys, box.options, strict=True):
            if key in found:
                continue
            kind = key[1]
            cost = options.loss_s + prefill[kind] * options.prefill_s
            cost += decode[kind] * options.decode_s
            table = np.full(width * width, np.inf)
            if cost.size:
                table[options.runs] = np.minimum.reduceat(cost, options.first)
            found[key] = cost, table.reshape(width, width)
        return [found[key][0] for key in keys], [found[key][1] for key in keys]

    def _path(
        self,
        box: Box,
        tables: list[FloatArray],
        costs: list[FloatArray],
        before: FloatArray,
    ) -> Path:
        """The path behind a shortest distance, and its true objective."""
        stop = self._priced.problem.layers
        width = stop + 1
        picks, sums = [], []
        for stage in range(len(tables) - 1, -1, -1):
            start = int((before[stage] + tables[stage][:, stop]).argmin())
            options, run = box.options[stage], start * width + stop
            place = int((options.runs == run).argmax())
            first, end = options.first[place], options.end[place]
            option = int(first + costs[stage][first:end].argmin())
            picks.append((run, int(options.row[option])))
            sums.append(
                (options.prefill_s[option], options.decode_s[option], options.loss_s[option])
            )
            stop = start
        prefill, decode, loss = np.array(sums[::-1]).T
        slowest = float(prefill.max()), float(decode.max())
        objective = self._form.of_stages(prefill, decode) + float(loss.sum())
        return Path(tuple(picks[::-1]), decode, *slowest, objective)

    def _filtered(self, box: Box, found: Relaxed) -> Box:
        """The box without the options that no path below the target uses."""
        after, width = _after(found.tables), len(found.tables[0])
        stages: dict[int, list[int]] = {}
        for stage, options in enumerate(box.options):
            stages.setdefault(id(options), []).append(stage)
        kept: dict[int, Options] = {}
        for same in stages.values():
            options, alike = box.options[same[0]], np.array(same)[:, np.newaxis]
            starts, stops = options.runs // width, options.runs % width
            around = (found.before[alike, starts] + after[alike + 1, stops]).min(axis=0)
            most = np.repeat(self.target - found.constant - around, options.end - options.first)
            kept[id(options)] = options.where(found.costs[same[0]] < most)
        return replace(box, options=tuple(kept[id(options)] for options in box.options))

    def _tightened(self, box: Box, found: Relaxed) -> Box | None:
        """The box without options that are too slow for the target; None if the path stays."""
        form = self._form
        slack = self.target - found.bound
        prefill_most = _ratio(slack, form.prefill_max) + box.prefill_least
        decode_most = _ratio(slack, (1 - found.trip) * form.decode_max) + box.decode_least
        path = found.path
        if path.slowest_prefill_s < prefill_most and path.slowest_decode_s < decode_most:
            return None
        return _below(box, prefill_most, decode_most)

    def _halves(self, box: Box, found: Relaxed) -> tuple[Box, ...]:
        """Split the box in two, so that the path's cost above the bound is in neither or halved."""
        form, path = self._form, found.path
        prefill_gap = form.prefill_max * (path.slowest_prefill_s - box.prefill_least)
        decode_gap = form.decode_max * (path.slowest_decode_s - box.decode_least)
        trip_gap = 0.0
        if found.other is not None:
            trip_gap = self._trip_excess(box, path)
        if trip_gap > max(prefill_gap, decode_gap) and found.other is not None:
            return _split_stage(box, path.decode_s, found.other.decode_s)
        if prefill_gap >= decode_gap:
            middle = (box.prefill_least + path.slowest_prefill_s) / 2
            least = _least_above(middle, [o.prefill_s for o in _distinct(box.options)])
            below = _below(box, middle, math.inf)
            return (below,) if least is None else (below, replace(box, prefill_least=least))
        middle = (box.decode_least + path.slowest_decode_s) / 2
        least = _least_above(middle, [o.decode_s for o in _distinct(box.options)])
        below = _below(box, math.inf, middle)
        return (below,) if least is None else (below, replace(box, decode_least=least))


def _before(tables: Sequence[FloatArray]) -> FloatArray:
    """Least price of the stages before each boundary [N+1, L+1]."""
    before = np.full((len(tables) + 1, len(tables[0])), np.inf)
    before[0, 0] = 0.0
    for stage, table in enumerate(tables):
        (before[stage][:, np.newaxis] + table).min(axis=0, out=before[stage + 1])
    return before


def _after(tables: Sequence[FloatArray]) -> FloatArray:
    """Least price of the stages after each boundary [N+1, L+1]."""
    after = np.full((len(tables) + 1, len(tables[0])), np.inf)
    after[-1, -1] = 0.0
    for stage in range(len(tables) - 1, -1, -1):
        (tables[stage] + after[stage + 1]).min(axis=1, out=after[stage])
    return after


def _least_above(middle: float, seconds: list[FloatArray]) -> float | None:
    """The least seconds above `middle`; None if the path's slow options are filtered away."""
    above = [values[values > middle] for values in seconds]
    return min((float(values.min()) for values in above if values.size), default=None)


def _below(box: Box, prefill_most: float, decode_most: float) -> Box:
    """The box without options above these seconds."""
    kept = {
        id(options): options.where(
            (options.prefill_s <= prefill_most) & (options.decode_s <= decode_most)
        )
        for options in _distinct(box.options)
    }
    return replace(box, options=tuple(kept[id(options)] for options in box.options))


def _split_stage(box: Box, decode_s: FloatArray, other_s: FloatArray) -> tuple[Box, ...]:
    """Split the stage where two paths' decode seconds differ most, at the middle of both."""
    stage = int(np.abs(decode_s - other_s).argmax())
    middle = float(decode_s[stage] + other_s[stage]) / 2
    options = box.options[stage]
    halves = []
    for mask in (options.decode_s <= middle, options.decode_s > middle):
        changed = list(box.options)
        changed[stage] = options.where(mask)
        halves.append(replace(box, options=tuple(changed)))
    return tuple(halves)


def _distinct(options: tuple[Options, ...]) -> list[Options]:
    """The lists of options, each shared one once."""
    return list({id(each): each for each in options}.values())


def _ratio(slack: float, weight: float) -> float:
    """Divide a slack by a weight; infinite for a weight of zero."""
    return slack / weight if weight > 0 else math.inf
