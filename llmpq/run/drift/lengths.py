"""The lengths of a run's rows, as they are so far: of those that ended, and of those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.messages import Request
from planner.length_distribution import LengthDistribution
from planner.lengths import MOST_SAMPLED, MOST_UNSEEN, Lengths
from planner.workload import Workload

FloatArray = npt.NDArray[np.float64]

MOST_KEPT = 8192
"""Rows that are kept at most, the latest ones: lengths may change within a file."""


def length_weights(ended: Sequence[int], running: Sequence[int]) -> FloatArray | None:
    """The share of all rows [ended] that each row of `ended` tokens stands for; None while more
    than `MOST_UNSEEN` of them are longer than any that ended.

    Rows that end first are the short ones, so their mean is too small. `running` has the tokens so
    far of rows in flight, which are longer than that: each of them counts for the rows that ended
    with more (the estimator of Kaplan and Meier, 1958). Rows beyond the longest that ended count as
    long as that one.
    """
    if not ended:
        return None
    lengths, counts = np.unique(np.asarray(ended, dtype=np.int64), return_counts=True)
    known = np.sort(np.concatenate([ended, np.asarray(running, dtype=np.int64)]))
    at_risk = len(known) - np.searchsorted(known, lengths)  # rows that got as many tokens
    survival = np.cumprod(1 - counts / at_risk)
    if survival[-1] > MOST_UNSEEN:
        return None
    mass = -np.diff(survival, prepend=1.0)
    mass[-1] += survival[-1]
    weights: FloatArray = (mass / counts)[np.searchsorted(lengths, ended)]
    return weights


class LengthRecord:
    """The prompt and output tokens of the latest rows of a run.

    `ended` counts the rows that ended. A row in error says nothing of lengths.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.ended = 0
        self._prompts: deque[int] = deque(maxlen=most)
        self._pairs: deque[tuple[int, int]] = deque(maxlen=most)

    def begin(self, request: Request) -> None:
        """Note a row that is handed to the stages."""
        self._prompts.append(len(request.prompt_ids))

    def end(self, request: Request, tokens: int) -> None:
        """Note a row that ended with so many new tokens."""
        self.ended += 1
        self._pairs.append((len(request.prompt_ids), max(1, tokens)))

    def forget(self) -> None:
        """Leave out the lengths so far, as rows of another kind follow; `ended` counts on."""
        self._prompts.clear()
        self._pairs.clear()

    def prompts(self, latest: int = MOST_KEPT) -> Sequence[int]:
        """Tokens of the prompts of the latest rows that began: long prompts do not end later."""
        return list(self._prompts)[-latest:]

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return float(np.mean(self._prompts)) if self._prompts else 0.0

    def outputs(self, running: Sequence[int], latest: int = MOST_KEPT) -> OutputLengths | None:
        """The lengths of outputs of the latest rows that ended, where rows in flight have got
        `running` tokens; None while too little is known of the long ones.
        """
        pairs = tuple(self._pairs)[-latest:]
        weights = length_weights([output for _, output in pairs], running)
        return None if weights is None else OutputLengths(pairs, weights)


class OutputLengths:
    """Rows that ended, (prompt, output) tokens each, and the share that each stands for."""

    def __init__(self, pairs: Sequence[tuple[int, int]], weights: FloatArray) -> None:
        self._pairs = np.array(pairs, dtype=np.int64)
        self._weights = weights

    @property
    def mean(self) -> float:
        """Mean tokens of an output."""
        return float(self._weights @ self._pairs[:, 1])

    @property
    def distribution(self) -> LengthDistribution:
        """The distribution of outputs."""
        lengths, places = np.unique(self._pairs[:, 1], return_inverse=True)
        shares = np.bincount(places, weights=self._weights)
        kept = shares > 0
        shares = shares[kept] / shares[kept].sum()
        return LengthDistribution(tuple(lengths[kept].tolist()), tuple(shares.tolist()))

    @property
    def longest(self) -> int:
        """Tokens of the longest output so far."""
        return int(self._pairs[:, 1].max())

    @property
    def mean_so_far(self) -> float:
        """Mean tokens that a row in flight has, which is also what it lacks: by the time that they
        take, long rows are met more often.
        """
        outputs = self._pairs[:, 1]
        return float(self._weights @ outputs**2) / (2 * self.mean)

    def lengths(self, room: Workload) -> Lengths:
        """A sample for planning, in no particular order; slots must still have `room`."""
        order = np.argsort(self._pairs[:, 1], kind="stable")
        shares = np.cumsum(self._weights[order])
        at = (np.arange(MOST_SAMPLED - 1) + 0.5) / (MOST_SAMPLED - 1)
        chosen = self._pairs[order][np.minimum(np.searchsorted(shares, at), len(order) - 1)]
        pairs = np.minimum(
            np.vstack([chosen, (room.prompt_length, room.new_tokens)]),
            (room.prompt_length, room.new_tokens),
        )
        pairs[:, 1] = np.minimum(pairs[:, 1], room.total_length - pairs[:, 0])
        rows = np.random.default_rng(0).permutation(pairs).tolist()
        return Lengths.of(
            ((prompt, output) for prompt, output in rows),
            "finished rows",
            room.new_tokens,
            room.slot_tokens,
        )
