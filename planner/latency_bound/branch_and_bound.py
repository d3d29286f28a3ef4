"""Branch and bound over integer controls: the most throughput within a bound on latency.

This is ExeGPT's Algorithm 1 for any number of controls x_1, x_2, ...: throughput and latency rise
with each of them, up to tolerances. So no point of a block has more throughput than its upper
corner and none has less latency than its lower corner, and a block is of no interest where the
upper corner is no faster than the best point so far, or the lower corner is too late. For functions
that are monotone this leaves out nothing; where they are so only within the tolerances eps_T
(`Tolerance.throughput`) and eps_L (`Tolerance.latency`), the best point of all is at most eps_T
above the one that is found.

Slips of the printed listing that are corrected here:

- line 3 takes the lower corner for T* whether or not it keeps the bound. Here T* is nothing until a
  point keeps the bound.
- The upper corner of the first block is never looked at, though the text ends the search where it
  keeps the bound; line 4 queues `B`, which is B_0, without its `upp`.
- line 4 sorts the queue "by lower bound", but line 6 takes its greatest: that is the throughput of
  the upper corner, an upper bound.
- line 8 says nothing of the case that neither corner keeps the bound: line 10 would always split
  the same way. The text takes the longer side; here it is the side along which throughput falls the
  most between the corners, which are known by then.
- lines 11 to 14 go on splitting a block of one point for ever. It is left once it is evaluated.
- lines 15 to 17 look for T* among the upper corners of new blocks only and forget the corners of
  line 7 and the lower ones. Here every point that is evaluated and keeps the bound is considered.
- line 18 keeps a block unless its upper corner is slower than T* by eps_T. That much is needed to
  find the very best in spite of eps_T, but not to come within eps_T of it.

Two additions make evaluations few. A point on the diagonal of the box begins as T*. And before a
block is split it is cut down along each side by bisection: from the lower corner as far as latency
allows, from the upper corner as far back as throughput exceeds T* (the reduction of monotonic
optimisation, ExeGPT's reference [43]); the first points that this looks at are those of line 7.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.latency_bound.timeline import DOES_NOT_FIT, Performance

ControlPoint = tuple[int, ...]
PerformanceOf = Callable[[ControlPoint], Performance]
"""The performance of a point. Where requests have no room, it states the throughput that they would
have beside an infinite latency; `DOES_NOT_FIT` tells nothing of the points below."""


@dataclass(frozen=True)
class Tolerance:
    """How far performance may fall, relatively, where it should rise with a control: `throughput`
    (eps_T, by which the best point may also be better than the one found) and `latency` (eps_L).
    """

    throughput: float = 0.02
    latency: float = 0.02


@dataclass(frozen=True)
class ControlBox:
    low: ControlPoint
    high: ControlPoint

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(high - low for low, high in zip(self.low, self.high, strict=True))

    def at(self, share: float) -> ControlPoint:
        steps = zip(self.low, self.widths, strict=True)
        return tuple(low + round(share * width) for low, width in steps)

    def halves(self, control: int) -> tuple[ControlBox, ControlBox]:
        middle = (self.low[control] + self.high[control]) // 2
        below = ControlBox(self.low, _with(self.high, control, middle))
        return below, ControlBox(_with(self.low, control, middle + 1), self.high)


class Evaluations:
    """Points that were evaluated, and the best of them that keeps the bound, if it has `more_than`
    so many requests per second.
    """

    def __init__(self, performance: PerformanceOf, bound_s: float, more_than: float = 0.0) -> None:
        self._performance, self.bound_s = performance, bound_s
        self._known: dict[ControlPoint, Performance] = {}
        self.throughput = more_than
        """Requests per second of the best point so far, or those that are to be exceeded."""
        self.best: ControlPoint | None = None

    def __call__(self, point: ControlPoint) -> Performance:
        if point not in self._known:
            found = self._known[point] = self._performance(point)
            if found.keeps(self.bound_s) and found.requests_per_s > self.throughput:
                self.throughput, self.best = found.requests_per_s, point
        return self._known[point]

    def most(self, point: ControlPoint) -> float:
        """Requests per second that no point below is known to exceed."""
        found = self(point)
        return math.inf if found == DOES_NOT_FIT else found.requests_per_s

    @property
    def count(self) -> int:
        return len(self._known)


def best_within(
    ranges: Sequence[range], evaluated: Evaluations, tolerance: Tolerance = Tolerance()
) -> ControlPoint | None:
    """The point of the box with the most throughput of those within the bound; None where no point
    keeps it, or none is faster than what was known. Throughput and latency rise with the values of
    each of `ranges`, within the tolerance.
    """
    whole = _whole_box(ranges)
    if not evaluated(whole.high).keeps(evaluated.bound_s):
        _BranchAndBound(evaluated, tolerance).run(whole)
    return evaluated.best


def throughput_on_diagonal(ranges: Sequence[range], evaluated: Evaluations) -> float:
    """Requests per second of the best point on the diagonal of the box, for few evaluations; 0
    where none keeps the bound.
    """
    whole = _whole_box(ranges)
    if evaluated(whole.low).keeps(evaluated.bound_s):
        _climb(whole, evaluated)
    return evaluated.throughput


def _whole_box(ranges: Sequence[range]) -> ControlBox:
    return ControlBox(tuple(each[0] for each in ranges), tuple(each[-1] for each in ranges))


class _BranchAndBound:
    """Takes blocks from a queue, most promising first, cuts them down and splits them."""

    def __init__(self, evaluated: Evaluations, tolerance: Tolerance) -> None:
        self._evaluated = evaluated
        self._latest_s = evaluated.bound_s * (1 + tolerance.latency)
        self._queue: list[tuple[float, int, ControlBox]] = []
        self._serial = itertools.count()

    def run(self, whole: ControlBox) -> None:
        if not self._in_time(whole.low):
            return
        _climb(whole, self._evaluated)
        self._add(whole)
        while self._queue:
            _, _, block = heapq.heappop(self._queue)
            if not self._is_faster(block.high):
                return
            cut = self._cut(block)
            if cut is not None and cut.low != cut.high:
                for half in cut.halves(self._side(cut)):
                    self._add(half)

    def _in_time(self, point: ControlPoint) -> bool:
        return self._evaluated(point).keeps(self._latest_s)

    def _is_faster(self, point: ControlPoint) -> bool:
        return self._evaluated.most(point) > self._evaluated.throughput

    def _add(self, block: ControlBox) -> None:
        if self._is_faster(block.high) and self._in_time(block.low):
            place = -self._evaluated.most(block.high), next(self._serial)
            heapq.heappush(self._queue, (*place, block))

    def _cut(self, block: ControlBox) -> ControlBox | None:
        """Cut off what is too late, then what is too slow; None where nothing is left."""
        upward = (
            self._steps(block.low, control, width, self._in_time)
            for control, width in enumerate(block.widths)
        )
        high = tuple(low + steps for low, steps in zip(block.low, upward, strict=True))
        if not self._is_faster(high):
            return None
        downward = (
            self._steps(high, control, -width, self._is_faster)
            for control, width in enumerate(ControlBox(block.low, high).widths)
        )
        low = tuple(top - steps for top, steps in zip(high, downward, strict=True))
        still = self._in_time(low) and self._is_faster(high)
        return ControlBox(low, high) if still else None

    def _steps(
        self, corner: ControlPoint, control: int, width: int, holds: Callable[[ControlPoint], bool]
    ) -> int:
        """Steps from a corner along a control, down where `width` is below 0, for which `holds`."""
        sign = 1 if width >= 0 else -1
        return _reach(
            abs(width), lambda k: holds(_with(corner, control, corner[control] + sign * k))
        )

    def _side(self, block: ControlBox) -> int:
        """The control along which to split: of corners that keep the bound with one control low,
        that of the fastest (lines 7 to 10), else of the slowest.
        """
        corners = {
            control: _with(block.high, control, block.low[control])
            for control, width in enumerate(block.widths)
            if width
        }
        most = {control: self._evaluated.most(corner) for control, corner in corners.items()}
        bound_s = self._evaluated.bound_s
        within = [each for each in corners if self._evaluated(corners[each]).keeps(bound_s)]
        return max(within, key=most.__getitem__) if within else min(most, key=most.__getitem__)


def _climb(whole: ControlBox, evaluated: Evaluations) -> None:
    steps = max(whole.widths)
    _reach(steps, lambda k: evaluated(whole.at(k / steps)).keeps(evaluated.bound_s))


def _with(point: ControlPoint, control: int, value: int) -> ControlPoint:
    return (*point[:control], value, *point[control + 1 :])


def _reach(steps: int, holds: Callable[[int], bool]) -> int:
    """The most steps for which something holds that holds for none, and for all below any."""
    if steps == 0 or holds(steps):
        return steps
    return bisect_left(range(1, steps), True, key=lambda k: not holds(k))
