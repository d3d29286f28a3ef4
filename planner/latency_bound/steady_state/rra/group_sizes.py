"""How many requests a group has after its turn, and how many of them are newcomers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import floor

import numpy as np

from planner.length_distribution import FloatArray
from planner.lengths import IntArray
from planner.schedule.turns import Turns
from planner.scheduling import RequestSchedule

_ROUNDING = 1e-9
_MANY_NEWCOMERS = 8
"""Newcomers of a mean turn from which on there are always some, and about as many."""
_SQUARINGS = 10
"""Of a chain's moves until nothing is left of where it began: 1024 turns."""


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """The chances `chance` of the numbers of requests `size` of a group after its turn, and those
    of the numbers of `newcomers` among them.
    """

    size: FloatArray
    chance: FloatArray
    newcomers: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, schedule: RequestSchedule, ended: float) -> GroupSizes:
        """The sizes in the steady state where such a share of requests ends from turn to turn.

        A turn has the newcomers of the schedule, and as many as ended where else the group would be
        too small; no group goes on empty (`planner.schedule.turns`).
        """
        share = schedule.prefill_requests / schedule.decode_micro_batches
        limits = Turns.of(schedule)
        fewest, most = max(1, limits.least), max(1, limits.most)
        if share >= _MANY_NEWCOMERS:
            mean = min(max(share / ended, fewest), most)
            return cls(np.array([mean]), np.ones(1), whole_numbers(mean * ended))
        return cls._of_chain(share, fewest, most, ended)

    @classmethod
    def _of_chain(cls, share: float, fewest: int, most: int, ended: float) -> GroupSizes:
        """The steady state of the chain of sizes from turn to turn, each request ending alike."""
        before = np.arange(fewest, most + 1)[:, None]
        left = np.arange(most + 1)[None, :]
        chances = _binomial(before, left, 1 - ended)
        moves = np.zeros((len(before), len(before)))
        joining = np.zeros((len(before), most + 1))
        rows = np.broadcast_to(np.arange(len(before))[:, None], chances.shape)
        for nominal, likely in whole_numbers(share):
            missing = fewest - left
            wanted = np.where(
                nominal < missing, np.minimum(missing, nominal + before - left), nominal
            )
            wanted = np.minimum(np.maximum(wanted, left == 0), most - left)
            after = np.clip(left + wanted, fewest, most) - fewest
            np.add.at(moves, (rows, after), likely * chances)
            np.add.at(joining, (rows, np.maximum(wanted, 0)), likely * chances)
        for _ in range(_SQUARINGS):
            moves = moves @ moves
        found = moves.mean(axis=0)
        newcomers = [(count, float(each)) for count, each in enumerate(found @ joining)]
        return cls(
            before[:, 0].astype(np.float64),
            found,
            tuple((count, each) for count, each in newcomers if each > _ROUNDING),
        )

    @property
    def mean(self) -> float:
        """Mean number of requests after a turn."""
        return float(np.dot(self.size, self.chance))

    @property
    def mean_newcomers(self) -> float:
        """Mean number of newcomers of a turn."""
        return sum(count * chance for count, chance in self.newcomers)

    @property
    def none_come(self) -> float:
        """The chance of a turn without newcomers."""
        return sum(chance for count, chance in self.newcomers if not count)

    def all_ended(self, ended: FloatArray) -> FloatArray:
        """The chance that all requests of a group have ended where each has with chance `ended`."""
        each = np.clip(ended, 0.0, 1.0)[:, None] ** self.size[None, :]
        return np.asarray(each @ self.chance)


def whole_numbers(mean: float) -> tuple[tuple[int, float], ...]:
    """The whole numbers next to `mean` with the chances that have this mean."""
    low = floor(mean + _ROUNDING)
    over = max(0.0, mean - low)
    return ((low, 1 - over), (low + 1, over)) if over > _ROUNDING else ((low, 1.0),)


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
    """count * log, where nothing of what cannot be is 0."""
    return np.where(count > 0, np.maximum(count, 1) * log, 0.0)


@cache
def _log_factorials(highest: int) -> FloatArray:
    from scipy.special import gammaln  # takes a tenth of a second, which commands do not wait for

    return np.asarray(gammaln(np.arange(highest + 1) + 1.0))
