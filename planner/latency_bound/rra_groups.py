"""RRA in its steady state: how many requests a group has after its turn and at each step after it.

A phase begins with a turn, after which a group makes `decode_steps` steps, or as many as some of
its requests want. One that had no newcomers comes to its next turn earlier than others by a pass,
and makes a step more as it waits for these, which counts where turns are small and frequent.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import floor

import numpy as np

from planner.latency_bound.schedules import completions
from planner.latency_bound.timeline import even_shares
from planner.lengths import FloatArray, IntArray, LengthDistribution, RequestLengths
from planner.schedule.turns import Turns, evened
from planner.scheduling import RequestSchedule

_ROUNDING = 1e-9
_MANY_NEWCOMERS = 8
"""Newcomers of a mean turn from which on there are always some, and about as many."""
_UNEVEN, _MOST_MORE = 3, 2
"""Newcomers up to which their numbers change as their prompts are evened, and by how many at most;
of more that are wanted, as many come in the mean."""
_PROMPTS = 1024
"""Prompts that stand for all."""
_SQUARINGS = 10
"""Of a chain's moves until nothing is left of where it began: 1024 turns."""


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """The chances `chance` of the numbers of requests `size` of a group after its turn, and those
    of the numbers 0, 1, … of `newcomers` of groups that had requests, and of empty ones [2, n].
    """

    size: FloatArray
    chance: FloatArray
    newcomers: FloatArray

    @classmethod
    def of(cls, schedule: RequestSchedule, prompts: LengthDistribution, ended: float) -> GroupSizes:
        """The steady state where such a share ends from turn to turn; too small a group takes as
        many newcomers more as ended, and none goes on empty (`planner.schedule.turns`).
        """
        share = schedule.prefill_requests / schedule.decode_micro_batches
        limits = Turns.of(schedule)
        fewest, most = max(1, limits.least), max(1, limits.most)
        if share >= _MANY_NEWCOMERS:
            mean = min(max(share / ended, fewest), most)
            empty = ended**mean
            counts, chances = zip(*whole_numbers(mean * ended), strict=True)
            newcomers = np.zeros((2, max(counts) + 1))
            newcomers[:, counts] = np.outer((1 - empty, empty), chances)
            return cls(np.array([mean]), np.ones(1), newcomers)
        # what evening depends on, so that all schedules that share it share its cache
        plain = RequestSchedule(
            "rra", 1, 1, 1, 1, 1, schedule.mean_prompt_tokens, schedule.tolerance
        )
        return _steady_sizes((fewest, most), ended, _evening(plain, prompts), whole_numbers(share))

    @property
    def mean(self) -> float:
        return float(np.dot(self.size, self.chance))

    @property
    def mean_newcomers(self) -> float:
        return float(self.newcomers.sum(axis=0) @ np.arange(self.newcomers.shape[1]))

    @property
    def none_come(self) -> float:
        """The chance of a turn without newcomers, which only groups with requests have."""
        return float(self.newcomers[0, 0])

    @property
    def empty(self) -> float:
        return float(self.newcomers[1].sum())

    def all_ended(self, ended: FloatArray) -> FloatArray:
        """The chance that all requests of a group have ended where each has with chance `ended`."""
        each = np.clip(ended, 0.0, 1.0)[:, None] ** self.size[None, :]
        return np.asarray(each @ self.chance)


def _steady_sizes(
    limits: tuple[int, int],
    ended: float,
    evening: tuple[tuple[int, FloatArray], ...],
    nominal: tuple[tuple[int, float], ...],
) -> GroupSizes:
    """The steady state of a group of the fewest to the most requests after a turn, each of which
    has `ended` with such a chance until the next; turns have the `nominal` newcomers with their
    chances, and `evening` more.
    """
    fewest, most = limits
    before = np.arange(fewest, most + 1)[:, None]
    left = np.arange(most + 1)[None, :]
    sizes, chances = len(before), _binomial(before, left, 1 - ended)
    row = np.broadcast_to(np.arange(sizes)[:, None], chances.shape)
    missing, room = fewest - left, most - left
    moves, joining = np.zeros(sizes**2), np.zeros(2 * sizes * (most + 1))
    for number, likely in nominal:
        refilled = np.minimum(missing, number + before - left)
        wanted = np.where(number < missing, refilled, number)
        wanted = np.minimum(np.maximum(wanted, left == 0), room)
        least = np.maximum(np.where(wanted >= missing, missing, 0), 1)
        for more, shares in evening:
            changed = np.minimum(np.maximum(wanted + more, least), room)
            count = np.where(wanted > 0, changed, 0)
            weights = (likely * chances * shares[np.minimum(wanted, _UNEVEN + 1)]).ravel()
            after = np.maximum(left + count - fewest, 0)
            moves += np.bincount((row * sizes + after).ravel(), weights, len(moves))
            place = ((left == 0) * sizes + row) * (most + 1) + count
            joining += np.bincount(place.ravel(), weights, len(joining))
    after_many = moves.reshape(sizes, sizes)
    for _ in range(_SQUARINGS):
        after_many = after_many @ after_many
    found = after_many.mean(axis=0)
    newcomers = found @ joining.reshape(2, sizes, most + 1)
    return GroupSizes(before[:, 0].astype(np.float64), found, newcomers)


def whole_numbers(mean: float) -> tuple[tuple[int, float], ...]:
    """The whole numbers next to `mean` with the chances that have this mean."""
    low = floor(mean + _ROUNDING)
    over = max(0.0, mean - low)
    return ((low, 1 - over), (low + 1, over)) if over > _ROUNDING else ((low, 1.0),)


@lru_cache(maxsize=256)
def _evening(
    schedule: RequestSchedule, prompts: LengthDistribution
) -> tuple[tuple[int, FloatArray], ...]:
    """How many more come than wanted as prompts are evened, by chance, where 0, 1, … to `_UNEVEN`
    are wanted.
    """
    texts = [prompts.quantile(share) for share in even_shares(_PROMPTS).tolist()]
    chances = np.zeros((2 * _MOST_MORE + 1, _UNEVEN + 2))
    chances[_MOST_MORE] = 1.0
    for wanted in range(1, _UNEVEN + 1):
        most, place, counts = wanted + _MOST_MORE, 0, []
        while place + most <= _PROMPTS:
            counts.append(evened(schedule, wanted, most, texts[place : place + most]))
            place += counts[-1]
        more = np.maximum(np.array(counts) - wanted, -_MOST_MORE) + _MOST_MORE
        chances[:, wanted] = np.bincount(more, minlength=len(chances)) / len(counts)
    return tuple((row - _MOST_MORE, each) for row, each in enumerate(chances) if each.any())


def _binomial(tried: IntArray, found: IntArray, chance: float) -> FloatArray:
    """The chance of `found` successes of `tried`, each of such a `chance`; 0 where more."""
    highest = int(tried.max())
    factorials = _log_factorials(highest)
    rest = np.maximum(tried - found, 0)
    logs = factorials[tried] - factorials[found] - factorials[rest]
    with np.errstate(divide="ignore"):
        logs = logs + _times_log(found, np.log(chance)) + _times_log(rest, np.log1p(-chance))
    return np.where(found <= tried, np.exp(logs), 0.0)


def _times_log(count: IntArray, log: float) -> FloatArray:
    return np.where(count > 0, np.maximum(count, 1) * log, 0.0)


@cache
def _log_factorials(highest: int) -> FloatArray:
    from scipy.special import gammaln  # takes a tenth of a second, which commands do not wait for

    return np.asarray(gammaln(np.arange(highest + 1) + 1.0))


_ROUNDS_TO_SETTLE, _SETTLED = 4, 1e-4
_NEVER, _RARE = 1 << 30, 1e-12


@dataclass(frozen=True, eq=False)
class Phases:
    """`sizes` of groups after their turns, and of each step after it [decode_steps]: the chance
    `reached` that a group still has requests, and then how many in the mean (`requests`), with
    `answer_tokens` each before the one that is fed. Phases without newcomers have `waits` more.
    """

    sizes: GroupSizes
    reached: FloatArray
    requests: FloatArray
    answer_tokens: FloatArray
    waits: int

    @classmethod
    def of(cls, schedule: RequestSchedule, lengths: RequestLengths) -> Phases:
        steps, waits = schedule.decode_steps, int(Turns.of(schedule).is_near((1,)))
        short, long = (completions(lengths.outputs, count) for count in (steps, steps + 1))
        more = 0.0  # share of phases with a step more
        for _ in range(_ROUNDS_TO_SETTLE):
            ended = (1 - more) / short.phases + more / long.phases
            sizes = GroupSizes.of(schedule, lengths.prompts, min(1.0, ended))
            before, more = more, waits * sizes.none_come
            if abs(more - before) < _SETTLED:
                break
        left = (1 - more) * short.decoding / short.phases
        left += more * long.decoding[:-1] / long.phases
        reached = 1 - sizes.all_ended(1 - left)
        requests = np.divide(sizes.mean * left, reached, out=np.ones(steps), where=reached > 0)
        tokens = (1 - more) * short.answer_tokens + more * long.answer_tokens[:-1]
        return cls(sizes, reached, np.maximum(requests, 1.0), tokens, waits)

    @property
    def none_come_later(self) -> float:
        """The chance of no newcomers at a later turn of a request's group."""
        return float(self.sizes.none_come / max(1 - self.sizes.empty, _RARE))

    def empty_after(self, share: float) -> int:
        """The steps after which a group is empty, of groups of which such a share are so later."""
        if share < 1 - self.sizes.empty:
            return _NEVER
        return len(self.reached) - bisect_right(self._reached_upwards, share)

    @cached_property
    def _reached_upwards(self) -> list[float]:
        found: list[float] = self.reached[::-1].tolist()
        return found
