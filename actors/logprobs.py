"""Log-probabilities of tokens as the messages between stages and driver have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError

MOST_TOP_LOGPROBS = 20
"""Most tokens beside the chosen one that a request may ask for, as in OpenAI's interface."""

NO_TOKEN = -1
"""Stands in `LogprobRows.top_ids` behind the last token that a request asked for."""

LEAST_LOGPROB = -9999.0
"""OpenAI's value for tokens that cannot be chosen, whose logarithm is no number of JSON."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Logarithm of a token's probability; `top`: the most probable ids with theirs, best first;
    `rank`: the tokens that are more probable, and 1.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """Log-probabilities of those tokens that some are asked of.

    `rows` `[asked]` are their places, ascending: in a micro-batch first its sampled rows, then the
    tokens of prompts, in its order; of one prompt the positions. `chosen` and `ranks` `[asked]` are
    of the token that is there; `top_ids` and `top` `[asked, most]` have the most probable tokens,
    best first, and `NO_TOKEN` behind the last one that a request asked for.
    """

    rows: npt.NDArray[np.int64]
    chosen: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]

    def between(self, begin: int, end: int, first: int = 0) -> LogprobRows:
        """Those of the places from `begin` to `end`, which are called `first` and so on."""
        here = slice(*np.searchsorted(self.rows, (begin, end)).tolist())
        return LogprobRows(
            self.rows[here] - begin + first,
            self.chosen[here],
            self.ranks[here],
            self.top_ids[here],
            self.top[here],
        )

    @classmethod
    def joined(cls, parts: Sequence[LogprobRows]) -> LogprobRows | None:
        """The `parts`, each of later places than the one before; None of none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        most = max(part.top.shape[1] for part in parts)
        missing = [((0, 0), (0, most - part.top.shape[1])) for part in parts]
        padded = list(zip(parts, missing, strict=True))
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate(
                [np.pad(part.top_ids, by, constant_values=NO_TOKEN) for part, by in padded]
            ),
            np.concatenate([np.pad(part.top, by) for part, by in padded]),
        )

    def by_row(self) -> dict[int, TokenLogprobs]:
        """The log-probabilities by place."""
        arrays = (self.rows, self.chosen, self.ranks, self.top_ids, self.top)
        columns = (each.tolist() for each in arrays)
        found: dict[int, TokenLogprobs] = {}
        for row, chosen, rank, ids, values in zip(*columns, strict=True):
            top = zip(ids, values, strict=True)
            told = tuple(each for each in top if each[0] != NO_TOKEN)
            found[row] = TokenLogprobs(chosen, told, rank)
        return found


def check_top_logprobs(wanted: int | None, name: str = "top_logprobs") -> None:
    """Raise `SpecError` for a number of most probable tokens that cannot be told."""
    if wanted is not None and not (type(wanted) is int and 0 <= wanted <= MOST_TOP_LOGPROBS):
        raise SpecError(
            f"{name} is {wanted!r:.80}; it must be a whole number from 0 to "
            f"{MOST_TOP_LOGPROBS}, or None"
        )
