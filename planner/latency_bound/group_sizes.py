"""How many requests a group has after its turn, and how many of them are newcomers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, floor

import numpy as np

from planner.length_distribution import FloatArray
from planner.scheduling import RequestSchedule

_ROUNDING = 1e-9
_FEW = 12
"""Requests of a group up to which its size is counted out by chances; that of larger ones varies
little around the mean."""


def size_limits(schedule: RequestSchedule) -> tuple[int, int]:
    """The fewest and the most requests that a group keeps (ExeGPT section 5.2): within the
    tolerance of the mean one, and at least the whole numbers next to it.
    """
    mean = schedule.decode_requests / schedule.decode_micro_batches
    fewest = min(floor(mean), ceil((1 - schedule.tolerance) * mean - _ROUNDING))
    return fewest, max(ceil(mean), floor((1 + schedule.tolerance) * mean + _ROUNDING))


@dataclass(frozen=True, eq=False)
class GroupSizes:
    """Chances of `sizes` of a group after its turn, and of `newcomers` among them."""

    sizes: tuple[tuple[int, float], ...] | None
    mean: float
    newcomers: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, schedule: RequestSchedule, phases: float) -> GroupSizes:
        """The sizes in the steady state where a request stays for so many phases in the mean.

        A turn has the newcomers of the schedule, or as many as ended where else the group would be
        too small; no group goes on empty.
        """
        share = schedule.prefill_requests / schedule.decode_micro_batches
        fewest, most = size_limits(schedule)
        if most > _FEW:
            mean = min(max(share * phases, fewest), most)
            return cls(None, mean, _whole(mean / phases))
        return cls._counted(share, max(1, fewest), max(1, most), 1 - 1 / phases)

    @classmethod
    def _counted(cls, share: float, fewest: int, most: int, stays: float) -> GroupSizes:
        """Find the steady state of the chain of sizes from turn to turn, where each request stays
        with the same chance.
        """
        sizes = range(fewest, most + 1)
        moves = np.zeros((len(sizes), len(sizes)))
        joining = np.zeros((len(sizes), most + 1))
        for row, size in enumerate(sizes):
            for left in range(size + 1):
                chance = comb(size, left) * stays**left * (1 - stays) ** (size - left)
                for nominal, likely in _whole(share):
                    wanted = nominal
                    if left + wanted < fewest:
                        wanted = min(fewest - left, max(wanted, size - left))
                    wanted = min(max(wanted, int(left == 0)), most - left)
                    moves[row, max(left + wanted, fewest) - fewest] += chance * likely
                    joining[row, wanted] += chance * likely
        found = _steady(moves)
        newcomers = tuple((n, float(p)) for n, p in enumerate(found @ joining) if p > _ROUNDING)
        return cls(
            tuple(zip(sizes, found.tolist(), strict=True)),
            float(np.dot(found, sizes)),
            newcomers,
        )

    def all_ended(self, ended: FloatArray) -> FloatArray:
        """The chance that all requests of a group have ended where each has with chance `ended`."""
        ended = np.clip(ended, 0.0, 1.0)
        if self.sizes is None:
            return np.asarray(ended**self.mean)
        return np.asarray(sum(chance * ended**size for size, chance in self.sizes))


def _whole(mean: float) -> tuple[tuple[int, float], ...]:
    """The whole numbers next to `mean` with the chances that have this mean."""
    low, over = floor(mean + _ROUNDING), max(0.0, mean - floor(mean + _ROUNDING))
    return ((low, 1 - over), (low + 1, over)) if over > _ROUNDING else ((low, 1.0),)


def _steady(moves: FloatArray) -> FloatArray:
    """The chances of the states of a chain in the long run, from even ones."""
    for _ in range(6):  # 64 turns
        moves = moves @ moves
    return np.asarray(moves.mean(axis=0))
