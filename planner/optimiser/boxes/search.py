"""Exact search to a proven gap, over how slow the slowest stage may be, prefill by decode. The
relaxation bounds the objective and prices what couples stages; under a limit a little above, the
few ways of filling a stage are listed. Within a box of limits the best assignment is a shortest
path over boundaries; boxes are split until none can hold anything better by more than the gap. If
nothing lies below the limit it is raised, up to any known plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.optimiser.assignment import (
    Assignment,
    OutOfTimeError,
    SolveOptions,
    assign_bits,
    conclude,
    smallest_assignment,
)
from planner.optimiser.boxes.few_bitwidths import has_many, solve_with_few
from planner.optimiser.boxes.stage_lister import StageLister, has_one_row
from planner.optimiser.boxes.stage_options import Box, StageOptions, least_above
from planner.optimiser.feasibility import require_feasible
from planner.optimiser.milp import solve_exactly
from planner.optimiser.prices import Prices
from planner.optimiser.problem import AssignmentProblem, FloatArray
from planner.optimiser.relaxation import ROUNDING, RelaxedProblem, relax
from planner.optimiser.sensitivity_tables import LossTables
from planner.optimiser.shared_hosts import solve_sharing

GROWTH = (1.02, 1.06, 1.2, 1.6)  # limits tried, over the bound; each costs more than the last
NARROW_GROWTH = (1.002, 1.005, 1.01, 1.02, 1.03, 1.045, 1.06, 1.1, 1.2, 1.6)
"""Limits where kinds of layers multiply the options with each; after few options the next is left
out."""
FEW_OPTIONS = 5_000  # found in a hundredth of a second
REACH = 1.4  # times as far over the bound as the limit, at which what is sought is tried at once
LEAST_GAP = 1e-9  # relative; above the rounding of sums
TRIP_STEPS = 4


def solve_by_boxes(
    problem: AssignmentProblem,
    options: SolveOptions,
    tables: LossTables | None = None,
) -> Assignment:
    """The best assignment within the gap, or found in time; InfeasibleError where nothing fits."""
    tables = tables or LossTables(problem)
    if problem.hosts:
        return solve_sharing(problem, options, partial(solve_by_boxes, tables=tables))
    require_feasible(problem)
    if has_many(problem):
        return solve_with_few(problem, options, tables, solve_by_boxes)
    start_s = options.clock()
    return _BoxMethod(relax(problem), tables, options, start_s).result()


class _BoxMethod:
    def __init__(
        self,
        relaxed: RelaxedProblem,
        tables: LossTables,
        options: SolveOptions,
        start_s: float,
    ) -> None:
        self._relaxed, self._problem = relaxed, relaxed.priced.problem
        self._tables, self._options, self._start_s = tables, options, start_s
        self._found: Assignment | None = None
        self._bound = relaxed.bound
        self._listed = 0

    def result(self) -> Assignment:
        """Raise the limit until the best plan lies below it, or nothing of interest does."""
        options = self._options
        for limit, nearer in self._limits():
            if limit <= self._bound:
                continue
            is_done = self._search(limit) or (nearer < limit and self._search(nearer))
            if self._out_of_time():
                break
            if not is_done:
                limit_s = options.time_limit_s
                if limit_s is not None:
                    limit_s = max(limit_s - (options.clock() - self._start_s), limit_s / 10)
                return solve_exactly(self._problem, replace(options, time_limit_s=limit_s))
        best, rounding = self._found, 2 * ROUNDING
        if best is None and self._bound < options.target * (1 - rounding):
            best = self._best
        return conclude(best, self._bound, options, self._start_s, rounding)

    def _limits(self) -> Iterator[tuple[float, float]]:
        """Yield each limit, and a nearer one should that be too far."""
        even, lowest = has_one_row(self._problem), self._relaxed.bound
        leaves_out = False
        for growth in (*(GROWTH if even else NARROW_GROWTH), math.inf):
            if leaves_out and math.isfinite(growth):
                leaves_out = False
                continue
            raised = growth * lowest if math.isfinite(growth) else growth
            target = self._target()
            nearer = min(target, raised)
            is_near = not even and target - lowest <= REACH * (raised - lowest)
            yield target if is_near else nearer, nearer
            leaves_out = not even and self._listed < FEW_OPTIONS
            if self._bound >= self._target() * (1 - ROUNDING):
                return

    def _target(self) -> float:
        gap = max(self._options.relative_gap, ROUNDING)
        if self._found is None and math.isfinite(self._options.target):
            return self._options.target
        return min(self._options.target, self._best.objective * (1 - gap))

    @property
    def _best(self) -> Assignment:
        if self._found is None:
            self._found = smallest_assignment(self._problem)
        return self._found

    def _search(self, limit: float) -> bool:
        """Search everything below `limit`, in time; False if that is too much to list."""
        relaxed = self._relaxed
        slowest = relaxed.programme.slowest_stages(limit)
        if slowest is None:
            self._bound = max(self._bound, limit)
            return True
        lister = StageLister(relaxed, self._tables, limit, slowest, self._out_of_time)
        try:
            if lister.has_too_many:
                return False
            kinds = [lister.options(kind) for kind in range(relaxed.priced.kinds.count.size)]
        except OutOfTimeError:
            return True
        self._listed = sum(options.run.size for options in kinds)
        stages = tuple(kinds[kind] for kind in relaxed.priced.kinds.of_stage)
        form = relaxed.priced.form
        box = Box(form.prefill_floor_s, form.decode_floor_s, stages)
        search = BoxSearch(relaxed, self._options.relative_gap, limit, self._out_of_time)
        bound = search.run(box, self._bound)
        found_s = math.inf if self._found is None else self._found.objective
        if search.best is not None and search.best.objective < found_s:
            found = self._assignment(lister, search.best)
            self._found = found if found.objective < found_s else self._found
        self._bound = max(self._bound, bound)
        return True

    def _assignment(self, lister: StageLister, path: BoxPath) -> Assignment:
        kinds = self._relaxed.priced.kinds.of_stage.tolist()
        rows = [lister.counts(kind, *pick) for kind, pick in zip(kinds, path.picks, strict=True)]
        return assign_bits(self._problem, np.stack(rows))

    def _out_of_time(self) -> bool:
        limit_s = self._options.time_limit_s
        return limit_s is not None and self._options.clock() - self._start_s > limit_s


@dataclass(frozen=True, eq=False)
class BoxPath:
    """One option for each stage: (run, counts row), decode seconds [N], slowest, objective."""

    picks: tuple[tuple[int, int], ...]
    decode_s: FloatArray
    slowest_prefill_s: float
    slowest_decode_s: float
    objective: float


@dataclass(frozen=True, eq=False)
class BoxBound:
    """A bound on a box in seconds and the path that attains it. `tables` [N] of [L+1, L+1] are the
    least costs of each stage's runs, `before` [N+1, L+1] that of the stages before each boundary;
    `other` is the path at a neighbouring trip price.
    """

    bound: float
    path: BoxPath
    trip: float
    costs: list[FloatArray]
    tables: list[FloatArray]
    before: FloatArray
    constant: float
    other: BoxPath | None = None


class BoxSearch:
    """Branch and bound over boxes for assignments below `limit` seconds; `best` so far."""

    def __init__(
        self,
        relaxed: RelaxedProblem,
        relative_gap: float,
        limit: float,
        out_of_time: Callable[[], bool],
    ) -> None:
        self._priced, self._prices = relaxed.priced, relaxed.prices
        self._form = relaxed.priced.form
        none = np.zeros_like(relaxed.prices.prefill)
        self._unpriced = replace(relaxed.prices, prefill=none, decode=none, trip=0.0)
        self._gap = max(relative_gap, LEAST_GAP)
        self._limit, self._out_of_time = limit, out_of_time
        self.best: BoxPath | None = None

    @property
    def target(self) -> float:
        found = math.inf if self.best is None else self.best.objective
        return min(self._limit, found * (1 - self._gap))

    def run(self, box: Box, bound: float) -> float:
        """Search until nothing is left or time is up; return the bound proven, in seconds."""
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
        while True:
            if self._out_of_time():
                yield bound, box
                return
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

    def _plain(self, box: Box) -> BoxBound | None:
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

    def _trip_excess(self, box: Box, path: BoxPath) -> float:
        trips_s = float(self._form.trips_s(float(path.decode_s.sum())))
        return trips_s - self._form.decode_max * box.decode_least

    def _relaxed(self, box: Box, prices: Prices) -> BoxBound | None:
        constant = self._priced.constant(prices, box.prefill_least, box.decode_least)
        costs, tables = self._costs(box, prices)
        before = _before(tables)
        bound = constant + float(before[-1, -1])
        if bound >= self.target or math.isinf(bound):
            return None
        path = self._path(box, tables, costs, before)
        if self.best is None or path.objective < self.best.objective:
            self.best = path
        return BoxBound(bound, path, prices.trip, costs, tables, before, constant)

    def _costs(self, box: Box, prices: Prices) -> tuple[list[FloatArray], list[FloatArray]]:
        """Price each stage's options, [M], and find the least price of each run, [L+1, L+1]."""
        width = self._priced.problem.layers + 1
        prefill, decode = self._priced.prefill_price(prices), self._priced.decode_price(prices)
        found: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        kinds = self._priced.kinds.of_stage.tolist()
        keys = [(id(options), kind) for options, kind in zip(box.options, kinds, strict=True)]
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
    ) -> BoxPath:
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
        return BoxPath(tuple(picks[::-1]), decode, *slowest, objective)

    def _filtered(self, box: Box, found: BoxBound) -> Box:
        after, width = _after(found.tables), len(found.tables[0])
        stages: dict[int, list[int]] = {}
        for stage, options in enumerate(box.options):
            stages.setdefault(id(options), []).append(stage)
        kept: dict[int, StageOptions] = {}
        for same in stages.values():
            options, alike = box.options[same[0]], np.array(same)[:, np.newaxis]
            starts, stops = options.runs // width, options.runs % width
            around = (found.before[alike, starts] + after[alike + 1, stops]).min(axis=0)
            most = np.repeat(self.target - found.constant - around, options.end - options.first)
            kept[id(options)] = options.where(found.costs[same[0]] < most)
        return replace(box, options=tuple(kept[id(options)] for options in box.options))

    def _tightened(self, box: Box, found: BoxBound) -> Box | None:
        """The box without options that are too slow for the target; None if the path stays."""
        form, slack, path = self._form, self.target - found.bound, found.path
        prefill_most = _ratio(slack, form.prefill_max) + box.prefill_least
        decode_most = _ratio(slack, (1 - found.trip) * form.decode_max) + box.decode_least
        if path.slowest_prefill_s < prefill_most and path.slowest_decode_s < decode_most:
            return None
        return box.below(prefill_most, decode_most)

    def _halves(self, box: Box, found: BoxBound) -> tuple[Box, ...]:
        form, path, other = self._form, found.path, found.other
        prefill_gap = form.prefill_max * (path.slowest_prefill_s - box.prefill_least)
        decode_gap = form.decode_max * (path.slowest_decode_s - box.decode_least)
        if other is not None and self._trip_excess(box, path) > max(prefill_gap, decode_gap):
            return box.split_stage(path.decode_s, other.decode_s)
        if prefill_gap >= decode_gap:
            middle = (box.prefill_least + path.slowest_prefill_s) / 2
            least = least_above(middle, (each.prefill_s for each in box.distinct))
            below = box.below(middle, math.inf)
            return (below,) if least is None else (below, replace(box, prefill_least=least))
        middle = (box.decode_least + path.slowest_decode_s) / 2
        least = least_above(middle, (each.decode_s for each in box.distinct))
        below = box.below(math.inf, middle)
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


def _ratio(slack: float, weight: float) -> float:
    return slack / weight if weight > 0 else math.inf
