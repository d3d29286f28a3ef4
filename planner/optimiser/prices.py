"""Prices of the constraints that couple stages, and the bound that they prove.

Lagrangian relaxation of LLM-PQ eq. 4-16: each stage's share in the slowest prefill and decode
(eq. 5-6) and its memory (eq. 12-13) get a price. A layer then takes the bitwidth that is cheapest
on its stage, and the best boundaries are a shortest path, which keeps eq. 15-16 exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.optimiser.problem import (
    AssignmentProblem,
    FloatArray,
    IntArray,
    latency_form,
)


@dataclass(frozen=True, eq=False)
class StageKinds:
    """Stages of one kind cost the same; first and last, which need a layer, stand alone. `of_stage`
    [N] is each stage's kind, `example` [Q] a stage of each, `count` [Q]; the order of kinds does
    not depend on that of the stages between.
    """

    of_stage: IntArray
    example: IntArray
    count: IntArray


def stage_kinds(problem: AssignmentProblem) -> StageKinds:
    """Group the stages between the ends by their rows of the problem's arrays."""
    last = problem.stages - 1
    # Transfers enter through constants only.
    columns = (
        problem.prefill_s,
        problem.decode_s,
        problem.layer_bytes,
        problem.available,
        problem.fixed_prefill_s[:, np.newaxis],
        problem.fixed_decode_s[:, np.newaxis],
        *(np.column_stack(memory) for memory in problem.memories[1:]),
        problem.memory_bytes[:, np.newaxis],
    )
    rows = [row.tobytes() for row in np.concatenate(columns, axis=1)]
    ends = 1 if last == 0 else 2
    place = {row: ends + index for index, row in enumerate(sorted(set(rows[1:last])))}
    of_stage = np.array([place.get(row, 0) for row in rows], dtype=np.int64)
    of_stage[0], of_stage[last] = 0, ends - 1
    _, example, count = np.unique(of_stage, return_index=True, return_counts=True)
    return StageKinds(of_stage, example, count)


def each_stage_alone(problem: AssignmentProblem) -> StageKinds:
    stages = np.arange(problem.stages)
    return StageKinds(stages, stages, np.ones_like(stages))


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of objective per second of a stage's prefill and decode, and per byte on the device
    and the host, by kind [Q], on top of its own; `trip` is the part of the decode rounds that is
    priced by the trip round all stages.
    """

    prefill: FloatArray
    decode: FloatArray
    memory: FloatArray
    host: FloatArray
    trip: float


@dataclass(frozen=True, eq=False)
class PathBound:
    """A bound in seconds, and the least price of stages 0 to j-1 up to a boundary, `before` [N+1,
    L+1], and `after`.
    """

    bound: float
    constant: float
    before: FloatArray
    after: FloatArray


class PricedProblem:
    """A problem's costs by kind of stage [Q]; `bytes` are infinite where a device lacks bits."""

    def __init__(self, problem: AssignmentProblem, kinds: StageKinds | None = None) -> None:
        self.problem = problem
        self.form = latency_form(problem)
        self.kinds = stage_kinds(problem) if kinds is None else kinds
        example = self.kinds.example
        self.prefill_s = problem.prefill_s[example]
        self.decode_s = problem.decode_s[example]
        self.bytes = np.where(problem.available[example], problem.layer_bytes[example], np.inf)
        self.fixed_prefill_s = problem.fixed_prefill_s[example]
        self.fixed_decode_s = problem.fixed_decode_s[example]
        self.memory_bytes = problem.memory_bytes[example]
        self.host_bytes = problem.host_bytes[example]
        self.host_memory_bytes = problem.host_memory_bytes[example]
        self.loss_s = problem.theta * problem.sensitivity

    def prefill_price(self, prices: Prices) -> FloatArray:
        """Seconds of objective that a second of prefill on a stage of each kind costs [Q]."""
        return self.form.prefill_each + prices.prefill

    def decode_price(self, prices: Prices) -> FloatArray:
        """Seconds of objective that a second of decode on a stage of each kind costs [Q]."""
        form = self.form
        return form.decode_each + prices.decode + prices.trip * form.round_trips

    def constant(self, prices: Prices, prefill_least: float, decode_least: float) -> float:
        """The bound without layers, if the slowest stages take at least so many seconds."""
        form, count = self.form, self.kinds.count
        prefill = form.prefill_max - float(count @ prices.prefill)
        decode = (1 - prices.trip) * form.decode_max - float(count @ prices.decode)
        trips = prices.trip * form.round_trips * form.trip_s
        return form.constant_s + prefill * prefill_least + decode * decode_least + trips

    def transfer_price(
        self, prices: Prices, prefill_s: FloatArray, decode_s: FloatArray
    ) -> FloatArray:
        """The price of such transfers as part of all; a bound may leave out the slowest's."""
        trips = prices.trip * self.form.round_trips
        return self.form.transfer_each * prefill_s + trips * decode_s

    def path_bound(self, prices: Prices) -> PathBound:
        stages = self.priced_stages(prices)
        constant = self.constant(prices, self.form.prefill_floor_s, self.form.decode_floor_s)
        kinds, layers = self.kinds.of_stage.tolist(), self.problem.layers
        before, after = [boundary(layers, 0)], [boundary(layers, layers)]
        last = len(kinds) - 1
        for stage, kind in enumerate(kinds):
            before.append(stages.onward(before[-1], kind, stage in (0, last)))
        for stage, kind in reversed(list(enumerate(kinds))):
            after.append(stages.back(after[-1], kind, stage in (0, last)))
        bound = constant + float(before[-1][-1])
        return PathBound(bound, constant, np.array(before), np.array(after[::-1]))

    def layer_prices(self, prices: Prices) -> FloatArray:
        """The prices of layers by kind of stage and choice [Q, L, K]; infinite what it lacks."""
        prefill, decode = self.prefill_price(prices), self.decode_price(prices)
        usable = np.isfinite(self.bytes)
        held = prices.memory[:, np.newaxis] * np.where(usable, self.bytes, 0.0)
        if len(self.problem.memories) > 1:
            held += prices.host[:, np.newaxis] * self.host_bytes
        place = prefill[:, np.newaxis] * self.prefill_s + decode[:, np.newaxis] * self.decode_s
        place = np.where(usable, place + held, np.inf)
        return np.asarray(self.problem.by_layer(place) + self.loss_s)

    def priced_stages(self, prices: Prices) -> PricedStages:
        """The cost of a stage of each kind at these prices, by where its layers begin and end."""
        prefill, decode = self.prefill_price(prices), self.decode_price(prices)
        each = self.layer_prices(prices).min(axis=2)
        fixed = prefill * self.fixed_prefill_s + decode * self.fixed_decode_s
        fixed = fixed - prices.memory * self.memory_bytes - prices.host * self.host_memory_bytes
        return PricedStages(each, fixed, np.array(self.problem.joined, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class PricedStages:
    """Prices in seconds by kind of stage: `each` [Q, L] of layers, infinite where the stage can run
    none like it, `fixed` [Q] of all else; no stage begins at one of the layers `joined`.
    """

    each: FloatArray
    fixed: FloatArray
    joined: IntArray

    @cached_property
    def running(self) -> FloatArray:
        """The sums of layers that a stage can run, by where they end [Q, L+1]."""
        able = np.where(np.isfinite(self.each), self.each, 0.0)
        return np.concatenate([np.zeros((len(able), 1)), able.cumsum(axis=1)], axis=1)

    @cached_property
    def _runs(self) -> dict[int, FloatArray]:
        """The prices of all runs of those kinds of stage that cannot hold every layer."""
        lacking = np.flatnonzero(~np.isfinite(self.each).all(axis=1)).tolist()
        return {kind: self._run_prices(kind) for kind in lacking}

    def runs(self, kind: int) -> FloatArray:
        """The price of layers by where their run begins and ends [L+1, L+1]; infinite where it ends
        before it begins, or has layers that the stage cannot run.
        """
        return self._runs[kind] if kind in self._runs else self._run_prices(kind)

    def _run_prices(self, kind: int) -> FloatArray:
        running, lacks = self.running[kind], ~np.isfinite(self.each[kind])
        lacked = np.concatenate([[0], lacks.cumsum()])
        prices = running - running[:, np.newaxis]
        prices[lacked != lacked[:, np.newaxis]] = np.inf
        prices[np.tri(len(running), k=-1, dtype=bool)] = np.inf
        return np.asarray(prices)

    def onward(self, before: FloatArray, kind: int, is_end: bool) -> FloatArray:
        """The least price [L+1] with one more stage; the ends, `is_end`, hold a layer at least."""
        if kind in self._runs:
            return self._opened(self._between(before, self._runs[kind], kind, is_end))
        return self._opened(self._with_one_more(before, self.running[kind], kind, is_end))

    def back(self, after: FloatArray, kind: int, is_end: bool) -> FloatArray:
        """The least price [L+1] with one more stage, from that of the stages after it."""
        if kind in self._runs:
            return self._opened(self._between(after, self._runs[kind].T, kind, is_end))
        running = -self.running[kind, ::-1]
        found = self._with_one_more(after[::-1], running, kind, is_end)
        return self._opened(found[::-1])

    def _opened(self, prices: FloatArray) -> FloatArray:
        """The prices where a boundary may be, infinite elsewhere."""
        if self.joined.size:
            prices[self.joined] = np.inf
        return prices

    def _with_one_more(
        self, lowest: FloatArray, running: FloatArray, kind: int, is_end: bool
    ) -> FloatArray:
        lowest = np.minimum.accumulate(lowest - running)
        if is_end:
            lowest = np.concatenate([[np.inf], lowest[:-1]])
        return np.asarray(lowest + running + self.fixed[kind])

    def _between(self, lowest: FloatArray, runs: FloatArray, kind: int, is_end: bool) -> FloatArray:
        found = lowest[:, np.newaxis] + runs
        if is_end:
            np.fill_diagonal(found, np.inf)
        return np.asarray(found.min(axis=0) + self.fixed[kind])


def boundary(layers: int, place: int) -> FloatArray:
    """Prices [L+1] of zero at one boundary and infinity at all others."""
    prices = np.full(layers + 1, np.inf)
    prices[place] = 0.0
    return prices


def onto_simplex(values: FloatArray, count: IntArray, total: float) -> FloatArray:
    """Project `values` [Q] on the non-negative ones whose sum, each `count` times, is `total`."""
    if total <= 0:
        return np.zeros_like(values)
    order = np.argsort(-values)
    sums = np.cumsum(count[order] * values[order]) - total
    level = sums / np.cumsum(count[order])
    last = int(np.flatnonzero(values[order] > level)[-1])
    return np.asarray(np.maximum(values - level[last], 0.0))
