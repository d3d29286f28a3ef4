"""The steps of bitwidth transfer (LLM-PQ Alg. 2, lines 5 to 16), all combinations of one at once.

A step takes up to two layers from a stage, which may change the bitwidth of one it keeps, and gives
them to another, which may change some of its own to make room: the paper's rules
(b_st, b_pi, nums). Where several stages are equally slow no single step relieves the slowest, so
steps can be judged by a p-norm over stages in place of the maximum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from planner.optimiser.quality_tables import QualityTables, rank_of_counts
from planner.optimiser.stage_kinds import latency_weights


@dataclass(frozen=True)
class _Reach:
    """How far a step may go: layers moved, and bitwidths changed by giver and taker."""

    moved: tuple[int, ...]
    giver_swaps: int
    taker_swaps: int


# A wider reach is tried only where a narrower one finds nothing. A 16-bit layer's room takes up to
# three others to go from 8 to 4 bits.
REACHES = (_Reach((0, 1), 1, 2), _Reach((0, 1, 2), 1, 3))


@dataclass(frozen=True, eq=False)
class Step:
    """Layer counts [N, K] after a step, and their merit in seconds: less is better."""

    counts: IntArray
    merit: float


@dataclass(frozen=True, eq=False)
class _Changes:
    """Ways a stage may change: its counts [C, K] and what follows from them [C]."""

    counts: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    loss_s: FloatArray


class TransferSteps:
    """What one step can reach from a plan's counts; `norm` is p, infinite for the true maximum."""

    def __init__(self, problem: AssignmentProblem, tables: QualityTables, norm: float) -> None:
        self._problem = problem
        self._tables = tables
        self._norm = norm
        self._weights = latency_weights(problem)
        self._swaps = _swaps(len(problem.bitwidths))
        self._losses: dict[tuple[bytes, int], float] = {}
        self._known: dict[tuple[bytes, int, int, int, int], _Changes | None] = {}

    def merit(self, counts: IntArray) -> float:
        """Seconds of a plan that fits; its objective if the norm is infinite."""
        prefill, decode = self._times(counts)
        none = np.zeros(0)
        total = self._seconds(list(prefill[:, np.newaxis]), list(decode[:, np.newaxis]), none, none)
        first = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
        runs = zip(counts, first[:-1], strict=True)
        return float(total[0]) + sum(self._run_loss(row, int(at)) for row, at in runs)

    def best(self, counts: IntArray, below: float) -> Step | None:
        """The best step to a merit below `below`; the slowest stages give first, then others."""
        prefill, decode = self._times(counts)
        slowest = list(dict.fromkeys([int(decode.argmax()), int(prefill.argmax())]))
        others = [stage for stage in range(len(counts)) if stage not in slowest]
        for reach in REACHES:
            for givers in (slowest, others):
                steps = list(self._steps(counts, givers, reach))
                step = min(steps, key=lambda each: each.merit, default=None)
                if step is not None and step.merit < below:
                    return step
        return None

    def _steps(self, counts: IntArray, givers: Sequence[int], reach: _Reach) -> Iterator[Step]:
        """The best step for each giver, number of moved layers and taker."""
        ends = (0, len(counts) - 1)
        for giver, moved in itertools.product(givers, reach.moved):
            if counts[giver].sum() - moved < (1 if giver in ends else 0):
                continue
            takers = [stage for stage in range(len(counts)) if stage != giver]
            for taker in takers if moved or takers else [giver]:
                step = self._step(counts, giver, taker, moved, reach)
                if step is not None:
                    yield step

    def _step(
        self, counts: IntArray, giver: int, taker: int, moved: int, reach: _Reach
    ) -> Step | None:
        """The best way to move layers from `giver` to `taker`; both may be a lone stage."""
        sizes = counts.sum(axis=1)
        sizes[giver] -= moved
        sizes[taker] += moved
        first = np.concatenate([[0], np.cumsum(sizes)])
        give = self._changes(counts[giver], giver, -moved, int(first[giver]), reach.giver_swaps)
        take = self._changes(counts[taker], taker, moved, int(first[taker]), reach.taker_swaps)
        if give is None or take is None:
            return None
        rest = [stage for stage in range(len(counts)) if stage not in (giver, taker)]
        prefill, decode = self._times(counts)
        pair = (1, -1) if giver == taker else (-1, 1)
        alone = giver == taker
        give_p, give_d = give.prefill_s.reshape(pair), give.decode_s.reshape(pair)
        shape = (1, give.prefill_s.size) if alone else (give.prefill_s.size, take.prefill_s.size)
        stages_p = [np.broadcast_to(give_p, shape)]
        stages_d = [np.broadcast_to(give_d, shape)]
        loss = np.broadcast_to(give.loss_s.reshape(pair), shape)
        if not alone:
            stages_p.append(np.broadcast_to(take.prefill_s, shape))
            stages_d.append(np.broadcast_to(take.decode_s, shape))
            loss = loss + take.loss_s
        fixed = sum(self._run_loss(counts[j], int(first[j])) for j in rest)
        merit = self._seconds(stages_p, stages_d, prefill[rest], decode[rest]) + loss + fixed
        row, column = np.unravel_index(int(merit.argmin()), merit.shape)
        changed = counts.copy()
        changed[giver] = give.counts[column if alone else row]
        if not alone:
            changed[taker] = take.counts[column]
        return Step(changed, float(merit[row, column]))

    def _seconds(
        self,
        prefill_s: Sequence[FloatArray],
        decode_s: Sequence[FloatArray],
        rest_prefill_s: FloatArray,
        rest_decode_s: FloatArray,
    ) -> FloatArray:
        """The latency's merit where the stages that change take arrays of seconds."""
        weights = self._weights
        slowest_p = self._largest(prefill_s, rest_prefill_s, weights.prefill_floor_s)
        slowest_d = self._largest(decode_s, rest_decode_s, weights.decode_floor_s)
        sum_p = sum(prefill_s) + rest_prefill_s.sum()
        sum_d = sum(decode_s) + rest_decode_s.sum()
        rounds = np.maximum(
            weights.decode_max * slowest_d, weights.round_trips * (sum_d + weights.trip_s)
        )
        fill = weights.constant_s + weights.prefill_max * slowest_p + sum_p
        total: FloatArray = fill + weights.decode_each * sum_d + rounds
        return total

    def _largest(
        self, changing: Sequence[FloatArray], rest: FloatArray, floor: float
    ) -> FloatArray:
        """The p-norm of the stages' seconds, at least the floor."""
        most = np.full(1, rest.max(initial=floor))
        for values in changing:
            most = np.maximum(most, values)
        if math.isinf(self._norm):
            return most
        unit = np.where(most > 0, most, 1.0)
        powers = [(values / unit) ** self._norm for values in changing]
        powers += [(value / unit) ** self._norm for value in rest]
        total = np.asarray(sum(powers))
        return np.maximum(unit * total ** (1 / self._norm), floor)

    def _changes(
        self, counts: IntArray, stage: int, moved: int, first: int, swaps: int
    ) -> _Changes | None:
        """All counts of a stage after `moved` layers came (or went) and some changed bitwidth."""
        key = (counts.tobytes(), stage, moved, first, swaps)
        if key not in self._known:
            self._known[key] = self._find_changes(counts, stage, moved, first, swaps)
        return self._known[key]

    def _find_changes(
        self, counts: IntArray, stage: int, moved: int, first: int, swaps: int
    ) -> _Changes | None:
        problem, choices = self._problem, counts.size
        ways = itertools.combinations_with_replacement(range(choices), abs(moved))
        moving = [np.bincount(np.array(way, dtype=np.int64), minlength=choices) for way in ways]
        grown = counts + (1 if moved > 0 else -1) * np.array(moving)
        every = (grown[:, np.newaxis, :] + self._swaps[swaps]).reshape(-1, choices)
        every = np.unique(every[(every >= 0).all(axis=1)], axis=0)
        fits = (every * problem.layer_bytes[stage]).sum(axis=1) <= problem.memory_bytes[stage]
        every = every[fits & ~every[:, ~problem.available[stage]].any(axis=1)]
        if not len(every):
            return None
        prefill = every @ problem.prefill_s[stage] + problem.fixed_prefill_s[stage]
        decode = every @ problem.decode_s[stage] + problem.fixed_decode_s[stage]
        loss = self._loss(every, first)
        return _Changes(every, prefill, decode, loss)

    def _times(self, counts: IntArray) -> tuple[FloatArray, FloatArray]:
        problem = self._problem
        return (
            (counts * problem.prefill_s).sum(axis=1) + problem.fixed_prefill_s,
            (counts * problem.decode_s).sum(axis=1) + problem.fixed_decode_s,
        )

    def _run_loss(self, counts: IntArray, first: int) -> float:
        """theta * omega of one stage's counts [K]."""
        key = (counts.tobytes(), first)
        if key not in self._losses:
            self._losses[key] = float(self._loss(counts[np.newaxis], first)[0])
        return self._losses[key]

    def _loss(self, counts: IntArray, first: int) -> FloatArray:
        """theta * omega [C] of counts [C, K] of equal sums, of the layers from `first` on."""
        length = int(counts[0].sum())
        table = self._tables.least(length, np.array([first]))[0]
        loss: FloatArray = self._problem.theta * table[rank_of_counts(counts, length)]
        return loss


def _swaps(choices: int) -> tuple[IntArray, ...]:
    """Changes of counts [S, K] when none, up to one, two or three layers change bitwidth."""
    unit = np.eye(choices, dtype=np.int64)
    pairs = itertools.permutations(range(choices), 2)
    none = np.zeros((1, choices), dtype=np.int64)
    one = np.concatenate([none, *(unit[[target]] - unit[[source]] for source, target in pairs)])
    found = [none, one]
    for _ in range(max(reach.taker_swaps for reach in REACHES) - 1):
        more = (found[-1][:, np.newaxis, :] + one).reshape(-1, choices)
        found.append(np.unique(more, axis=0))
    return tuple(found)
