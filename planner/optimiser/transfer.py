"""Bitwidth transfer (LLM-PQ Alg. 2): from adabits, relieve the slowest stage step by step.

Rounds of steps are judged by p-norms over stages that come ever nearer to the maximum; the best
plan of all rounds counts, so that the result is never worse than the start. Where several stages
are equally slow no single step relieves the slowest, which is why there are norms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.optimiser.assignment import (
    Assignment,
    SolveOptions,
    assign_bits,
    compute_seconds,
    evaluate,
    layer_counts,
    smallest_assignment,
    stage_times,
)
from planner.optimiser.boxes.search import solve_by_boxes
from planner.optimiser.feasibility import require_feasible
from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray, latency_form
from planner.optimiser.relaxation import relax
from planner.optimiser.sensitivity_tables import LossTables
from planner.optimiser.two_memories import shares_beside, with_shares

QUALITY_WEIGHT = 1e4  # of adabits: quality counts so many times the latency
NORMS = (8.0, 32.0, math.inf)
LEAST_GAIN = 1e-9  # relative; below it a step is rounding


class StepSize(NamedTuple):
    """Limits of a step: layers moved (of uneven ones, groups up to the next boundary that may be),
    and bitwidths changed by giver and taker.
    """

    moved: tuple[int, ...]
    giver_swaps: int
    taker_swaps: int


# Larger steps are tried only where smaller ones find nothing. A 16-bit layer's room takes up to
# three others to go from 8 to 4 bits.
STEP_SIZES = (StepSize((0, 1), 1, 2), StepSize((0, 1, 2), 1, 3))
# Of several kinds, whose swaps are as many times more.
KINDS_STEP_SIZES = (StepSize((0, 1), 1, 1), StepSize((0, 1), 1, 2), StepSize((2,), 0, 2))
MOST_SWAPS = 500  # that a step looks at beside each way to move layers

Step = tuple[IntArray, float]
"""Layer counts [N, C * K] after a step, and their merit in seconds: less is better."""

Moved = tuple[int, ...]
"""Layers of each kind [C] that a stage gets; negative where it gives them."""

PhaseSeconds = tuple[FloatArray, FloatArray]
"""Prefill and decode seconds per micro-batch, of some stages or of the ways to change one."""


def solve_adabits(
    problem: AssignmentProblem, options: SolveOptions, tables: LossTables | None = None
) -> Assignment:
    """The plan of least summed sensitivity, the fastest of equal ones: eq. 4 without latency
    (section 6.9), and the start of transfer (Alg. 2, line 1). Objective and bound are those of
    `problem`. InfeasibleError where nothing fits.
    """
    require_feasible(problem)
    start_s = options.clock()
    found = solve_by_boxes(_quality_first(problem), replace(options, upper_bound=np.inf), tables)
    objective = evaluate(problem, found.first_layer, found.bitwidth)
    bound = min(objective, relax(problem).bound)
    seconds = options.clock() - start_s
    return replace(found, objective=objective, bound=bound, status="adabits", seconds=seconds)


def _quality_first(problem: AssignmentProblem) -> AssignmentProblem:
    """The problem with a theta, by a bitwidth's step, at which latency only breaks ties."""
    losses = problem.sensitivity
    spread = float(losses.max(axis=1).sum() - losses.min(axis=1).sum())
    if spread <= 0:
        return problem
    some = smallest_assignment(problem)
    latency_s = stage_times(problem, some.first_layer, some.bitwidth).latency_s
    return replace(problem, theta=QUALITY_WEIGHT * max(latency_s, 1e-12) / spread)


def solve_by_transfer(
    problem: AssignmentProblem, options: SolveOptions, tables: LossTables | None = None
) -> Assignment:
    """The transferred plan with the relaxation's bound; InfeasibleError where nothing fits."""
    start_s = options.clock()
    tables = tables or LossTables(problem)
    half = None if options.time_limit_s is None else options.time_limit_s / 2
    halved = replace(options, time_limit_s=half)
    best = improve_by_transfer(problem, solve_adabits(problem, halved, tables), halved, tables)
    bound = min(best.objective, relax(problem).bound)
    return replace(best, bound=bound, status="transfer", seconds=options.clock() - start_s)


def improve_by_transfer(
    problem: AssignmentProblem, begin: Assignment, options: SolveOptions, tables: LossTables
) -> Assignment:
    """Improve `begin` by Alg. 2, lines 4 to 23; the result is never worse."""
    held = stage_times(problem, begin.first_layer, begin.bitwidth).host_bytes
    problem = with_shares(problem, shares_beside(problem, held))
    started_s, limit_s = options.clock(), options.time_limit_s

    def is_over() -> bool:
        return limit_s is not None and options.clock() - started_s >= limit_s

    counts = layer_counts(problem, begin.first_layer, begin.bitwidth)
    best = begin
    for norm in NORMS:
        if is_over():
            break
        steps = TransferSteps(problem, tables, norm, is_over)
        merit = steps.merit(counts)
        while (step := steps.best(counts, merit * (1 - LEAST_GAIN))) is not None:
            counts, merit = step
        best = min(best, assign_bits(problem, counts), key=lambda plan: plan.objective)
    return best


class _Changes(NamedTuple):
    counts: IntArray
    seconds: PhaseSeconds
    loss_s: FloatArray


class TransferSteps:
    """Finds the best step; `norm` is p, infinite for the maximum. A step (Alg. 2, lines 5 to 16)
    takes up to two layers from a stage, which may change the bitwidth of one, and gives them to
    another, which may change some to make room: rules (b_st, b_pi, nums). All variants are looked
    at together, none once time `is_over`. Uneven layers are given to neighbours only: others' kinds
    would change.
    """

    def __init__(
        self,
        problem: AssignmentProblem,
        tables: LossTables,
        norm: float,
        is_over: Callable[[], bool],
    ) -> None:
        self._problem, self._tables, self._norm = problem, tables, norm
        self._is_over = is_over
        self._form = latency_form(problem)
        self._sizes = STEP_SIZES if problem.kinds == 1 else KINDS_STEP_SIZES
        choices = len(problem.bitwidths)
        pairs = (problem.kinds * choices * (choices - 1)) ** 2 // 2
        most = max(size.taker_swaps for size in self._sizes) if pairs <= MOST_SWAPS else 1
        self._swaps = _swaps(problem.kinds, choices, most)
        self._losses: dict[tuple[bytes, int], float] = {}
        self._known: dict[tuple[bytes, int, Moved, int, int], _Changes | None] = {}

    def merit(self, counts: IntArray) -> float:
        """Seconds of a plan that fits; its objective if the norm is infinite."""
        stages = zip(*compute_seconds(self._problem, counts), strict=True)
        seconds = [(np.array([prefill]), np.array([decode])) for prefill, decode in stages]
        first = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
        runs = zip(counts, first[:-1], strict=True)
        losses = sum(self._run_loss(row, int(at)) for row, at in runs)
        return float(self._latency(seconds, (np.zeros(0), np.zeros(0)))[0]) + losses

    def best(self, counts: IntArray, below: float) -> Step | None:
        """The best step to a merit below `below`; the slowest stages give first, then others."""
        prefill, decode = compute_seconds(self._problem, counts)
        slowest = list(dict.fromkeys([int(decode.argmax()), int(prefill.argmax())]))
        others = [stage for stage in range(len(counts)) if stage not in slowest]
        for size in self._sizes:
            for givers in (slowest, others):
                steps = list(self._steps(counts, givers, size))
                step = min(steps, key=lambda each: each[1], default=None)
                if step is not None and step[1] < below:
                    return step
        return None

    def _steps(self, counts: IntArray, givers: Sequence[int], size: StepSize) -> Iterator[Step]:
        ends = (0, len(counts) - 1)
        for giver, moved in itertools.product(givers, size.moved):
            for taker, layers in self._moves(counts, giver, moved):
                if self._is_over():
                    return
                if counts[giver].sum() - sum(layers) < (1 if giver in ends else 0):
                    continue
                step = self._step(counts, (giver, taker), layers, size)
                if step is not None:
                    yield step

    def _moves(self, counts: IntArray, giver: int, moved: int) -> Iterator[tuple[int, Moved]]:
        """Yield the stages that may take so many layers or groups, and how many of each kind."""
        problem = self._problem
        takers = [stage for stage in range(len(counts)) if stage != giver]
        if moved == 0 or problem.is_even:
            layers = (moved,) if problem.is_even else (0,) * problem.kinds
            yield from ((taker, layers) for taker in (takers if moved or takers else [giver]))
            return
        first = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
        borders = problem.open_boundaries
        for taker, border in ((giver - 1, first[giver]), (giver + 1, first[giver + 1])):
            place = int(np.searchsorted(borders, border)) + (moved if taker < giver else -moved)
            if taker in takers and 0 <= place < borders.size:
                found = problem.kinds_before[borders[place]] - problem.kinds_before[border]
                if first[giver] <= borders[place] <= first[giver + 1]:
                    yield taker, tuple(np.abs(found).tolist())

    def _step(
        self, counts: IntArray, pair: tuple[int, int], moved: Moved, size: StepSize
    ) -> Step | None:
        giver, taker = pair
        sizes = counts.sum(axis=1)
        sizes[giver] -= sum(moved)
        sizes[taker] += sum(moved)
        first = np.concatenate([[0], np.cumsum(sizes)])
        given = tuple(-each for each in moved)
        give = self._changes(counts[giver], giver, given, int(first[giver]), size.giver_swaps)
        take = self._changes(counts[taker], taker, moved, int(first[taker]), size.taker_swaps)
        if give is None or take is None:
            return None
        others = [stage for stage in range(len(counts)) if stage not in pair]
        fixed = sum(self._run_loss(counts[j], int(first[j])) for j in others)
        prefill, decode = compute_seconds(self._problem, counts)
        unchanged = prefill[others], decode[others]
        changed = counts.copy()
        if giver == taker:
            merit = self._latency([give.seconds], unchanged) + give.loss_s + fixed
            best = int(merit.argmin())
            changed[giver] = give.counts[best]
            return changed, float(merit[best])
        rows = give.seconds[0][:, np.newaxis], give.seconds[1][:, np.newaxis]
        loss = give.loss_s[:, np.newaxis] + take.loss_s
        merit = self._latency([rows, take.seconds], unchanged) + loss + fixed
        row, column = np.unravel_index(int(merit.argmin()), merit.shape)
        changed[giver], changed[taker] = give.counts[row], take.counts[column]
        return changed, float(merit[row, column])

    def _latency(self, changing: Sequence[PhaseSeconds], others: PhaseSeconds) -> FloatArray:
        prefill_s, decode_s = zip(*changing, strict=True)
        return self._form.seconds(
            self._largest(prefill_s, others[0], self._form.prefill_floor_s),
            self._largest(decode_s, others[1], self._form.decode_floor_s),
            np.asarray(sum(prefill_s) + others[0].sum()),
            np.asarray(sum(decode_s) + others[1].sum()),
        )

    def _largest(
        self, changing: Sequence[FloatArray], others: FloatArray, floor: float
    ) -> FloatArray:
        most = np.full(1, others.max(initial=floor))
        for values in changing:
            most = np.maximum(most, values)
        if math.isinf(self._norm):
            return most
        unit = np.where(most > 0, most, 1.0)
        powers = [(values / unit) ** self._norm for values in changing]
        powers += [(value / unit) ** self._norm for value in others]
        total = np.asarray(sum(powers))
        return np.maximum(unit * total ** (1 / self._norm), floor)

    def _changes(
        self, counts: IntArray, stage: int, moved: Moved, first: int, swaps: int
    ) -> _Changes | None:
        key = (counts.tobytes(), stage, moved, first, swaps)
        if key not in self._known:
            self._known[key] = self._find_changes(counts, stage, moved, first, swaps)
        return self._known[key]

    def _find_changes(
        self, counts: IntArray, stage: int, moved: Moved, first: int, swaps: int
    ) -> _Changes | None:
        problem, cells = self._problem, counts.size
        own = np.arange(cells).reshape(problem.kinds, -1).tolist()
        of_kinds = [
            itertools.combinations_with_replacement(row, abs(each))
            for row, each in zip(own, moved, strict=True)
        ]
        ways = (list(itertools.chain(*way)) for way in itertools.product(*of_kinds))
        moving = [np.bincount(np.array(way, dtype=np.int64), minlength=cells) for way in ways]
        grown = counts + (1 if sum(moved) > 0 else -1) * np.array(moving)
        swapped = self._swaps[min(swaps, len(self._swaps) - 1)]
        every = (grown[:, np.newaxis, :] + swapped).reshape(-1, cells)
        every = np.unique(every[(every >= 0).all(axis=1)], axis=0)
        fits = ~every[:, ~problem.available[stage]].any(axis=1)
        for each in problem.memories:
            fits &= (every * each.layer_bytes[stage]).sum(axis=1) <= each.limit_bytes[stage]
        every = every[fits]
        if not len(every):
            return None
        seconds = (
            every @ problem.prefill_s[stage] + problem.fixed_prefill_s[stage],
            every @ problem.decode_s[stage] + problem.fixed_decode_s[stage],
        )
        return _Changes(every, seconds, self._loss(every, first))

    def _run_loss(self, counts: IntArray, first: int) -> float:
        """The quality term theta * omega of one stage's counts [C * K]."""
        key = (counts.tobytes(), first)
        if key not in self._losses:
            self._losses[key] = float(self._loss(counts[np.newaxis], first)[0])
        return self._losses[key]

    def _loss(self, counts: IntArray, first: int) -> FloatArray:
        """The quality terms [M] of counts [M, C * K] of the same layers, from `first` on."""
        return np.asarray(self._problem.theta * self._tables.least(first, counts))


def _swaps(kinds: int, choices: int, most: int) -> tuple[IntArray, ...]:
    """Changes of counts [S, C * K] where up to none, one ... `most` layers change bitwidth."""
    cells = kinds * choices
    unit = np.eye(cells, dtype=np.int64)
    own = np.arange(cells).reshape(kinds, choices).tolist()
    pairs = itertools.chain(*(itertools.permutations(row, 2) for row in own))
    none = np.zeros((1, cells), dtype=np.int64)
    one = np.concatenate([none, *(unit[[target]] - unit[[source]] for source, target in pairs)])
    found = [none, one]
    for _ in range(most - 1):
        more = (found[-1][:, np.newaxis, :] + one).reshape(-1, cells)
        found.append(np.unique(more, axis=0))
    return tuple(found)
