"""Log-probabilities in a message of sampled tokens: arrays `[asked, 1 + most]` of ids and values.

The first column has the places of the tokens and the values of those that were chosen, the others
the most probable tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.logprobs import MOST_TOP_LOGPROBS, NO_TOKEN, LogprobRows
from actors.messages import TokenIds
from actors.transport.message_limits import refuse

_MOST_COLUMNS = 1 + MOST_TOP_LOGPROBS
_NO_IDS: TokenIds = np.zeros(0, dtype=np.int64)


def logprob_arrays(asked: LogprobRows | None) -> tuple[TokenIds, Tensor | None]:
    """Ids, flat, and values `[asked, 1 + most]` in float32."""
    if asked is None:
        return _NO_IDS, None
    ids: TokenIds = np.column_stack([asked.rows, asked.top_ids]).ravel()
    return ids, torch.from_numpy(np.column_stack([asked.chosen, asked.top]))


def check_logprob_sizes(tokens: int, rows: int, columns: int) -> None:
    """Raise `StageLostError` for sizes of log-probabilities that so many tokens do not have."""
    if rows > tokens or columns > _MOST_COLUMNS or bool(rows) != bool(columns):
        refuse(
            f"says {rows} rows of {columns} log-probabilities for {tokens} tokens, each of which "
            f"has at most {_MOST_COLUMNS}"
        )


def logprobs_of(ids: TokenIds, values: Tensor, tokens: int) -> LogprobRows | None:
    """The log-probabilities of some of so many `tokens`; raises as `check_logprob_sizes`.

    `values` are copied: they lie in the memory of the message.
    """
    if not len(values):
        return None
    ids, found = ids.reshape(values.shape), values.numpy().copy()
    rows, top_ids = ids[:, 0], ids[:, 1:]
    if rows[0] < 0 or rows[-1] >= tokens or (np.diff(rows) < 1).any():
        refuse("has log-probabilities of tokens that there are not")
    if (top_ids < NO_TOKEN).any() or np.isnan(found).any():
        refuse("has log-probabilities that are none")
    return LogprobRows(rows, found[:, 0], top_ids, found[:, 1:])
