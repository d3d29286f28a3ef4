"""Log-probabilities of chosen tokens, and of the most probable ones beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError

MOST_TOP_LOGPROBS = 20
"""Most tokens beside the chosen one that a request may ask for, as in OpenAI's interface."""

NO_TOKEN = -1
"""Stands in `LogprobRows.top_ids` behind the last token that a request asked for."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithm of a token's probability; `top`: ids and log-probabilities of the most
    probable tokens, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """Log-probabilities of those requests of a micro-batch that ask for them.

    `rows` `[asked]` are their places among its sampled rows, ascending; `chosen` `[asked]` is of
    the token that was chosen; `top_ids` and `top` `[asked, most]` have the most probable tokens,
    best first, and `NO_TOKEN` behind the last one that a request asked for.
    """

    rows: npt.NDArray[np.int64]
    chosen: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int64]
    top: npt.NDArray[np.float32]

    def by_row(self) -> dict[int, TokenLogprobs]:
        """The log-probabilities by place among the sampled rows."""
        return {
            row: TokenLogprobs(
                chosen,
                tuple(
                    (token, value)
                    for token, value in zip(ids, values, strict=True)
                    if token != NO_TOKEN
                ),
            )
            for row, chosen, ids, values in zip(
                self.rows.tolist(),
                self.chosen.tolist(),
                self.top_ids.tolist(),
                self.top.tolist(),
                strict=True,
            )
        }


def check_top_logprobs(wanted: int | None) -> None:
    """Raise `SpecError` for a number of most probable tokens that cannot be told."""
    if wanted is not None and not (type(wanted) is int and 0 <= wanted <= MOST_TOP_LOGPROBS):
        raise SpecError(
            f"top_logprobs is {wanted!r:.80}; it must be a whole number from 0 to "
            f"{MOST_TOP_LOGPROBS}, or None"
        )
