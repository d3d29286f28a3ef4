"""Log-probabilities of the tokens that are chosen, and of those of prompts, by the model's own
distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from actors.logprobs import NO_TOKEN, LogprobRows
from actors.messages import TokenIds
from quant.devices import on_device, on_host

LOGITS_AT_ONCE = 1 << 23
"""Logits of prompts that are computed together: some 100 MB with what is made of them, and enough
rows that the head's weights are read for few of them in vain."""


def rows_at_once(vocabulary: int) -> int:
    return max(1, LOGITS_AT_ONCE // vocabulary)


def most_probable(
    logits: Tensor, tokens: Tensor, top_logprobs: Sequence[int | None]
) -> tuple[Tensor, ...]:
    """What `logprob_rows` makes its rows of, on the device: log-probabilities and ranks of the
    `tokens` `[rows]`, the most probable ones, and theirs; nothing where no row asks.

    `logits` `[rows, vocabulary]` are the model's: before bias, penalties and temperature. Only the
    rows that ask are looked at, in float32.
    """
    asked = [row for row, wanted in enumerate(top_logprobs) if wanted is not None]
    if not asked:
        return ()
    most = min(max(wanted or 0 for wanted in top_logprobs), logits.shape[-1])
    if len(asked) < len(logits):
        (rows,) = on_device(logits.device, np.array(asked, dtype=np.int64))
        logits, tokens = logits[rows], tokens[rows]
    part = logits.float()
    each = part.log_softmax(-1)  # row by row; a sum of one row is shared among threads
    order = part.topk(most, dim=-1).indices
    own, top = each.gather(-1, tokens[:, None]), each.gather(-1, order)
    better = each.gt_(own).sum(-1)  # as floats: a sum of truth values takes ten times as long
    return own[:, 0], 1 + better.long(), order, top


def logprob_rows(
    tokens: TokenIds,
    top_logprobs: Sequence[int | None],
    own: npt.NDArray[np.float32],
    ranks: TokenIds,
    top_ids: TokenIds,
    top: npt.NDArray[np.float32],
) -> LogprobRows:
    """The log-probabilities that `most_probable` has found, of each row as many as `top_logprobs`
    says. A chosen token comes before others that are as probable; these come by their ids.
    """
    rows = np.array([row for row, wanted in enumerate(top_logprobs) if wanted is not None])
    wanted = np.array([top_logprobs[row] for row in rows], dtype=np.int64)
    if top_ids.shape[1]:
        top_ids = _equals_sorted(top_ids, top, tokens[rows], own)
        top_ids[np.arange(top_ids.shape[1]) >= wanted[:, None]] = NO_TOKEN
    return LogprobRows(rows, own, ranks, top_ids, top)


def _equals_sorted(
    top_ids: TokenIds, top: npt.NDArray[np.float32], tokens: TokenIds, own: npt.NDArray[np.float32]
) -> TokenIds:
    """`top_ids` `[rows, most]` with equally probable tokens in order: the chosen one of the
    `tokens` first, which may have been left out for others as probable as it, then by ids.
    """
    is_other = top_ids != tokens[:, None]
    left_out = is_other.all(axis=1) & (own >= top[:, -1])
    is_last = np.arange(top.shape[1]) == top.shape[1] - 1
    ids = np.where(left_out[:, None] & is_last, tokens[:, None], top_ids)
    order = np.lexsort((ids, ids != tokens[:, None], -top), axis=-1)
    found: TokenIds = np.take_along_axis(ids, order, axis=-1)
    return found


def scores(
    parts: Iterable[Tensor], tokens: TokenIds, asked: Sequence[int | None], first: int
) -> tuple[LogprobRows | None, npt.NDArray[np.bool_]]:
    """Log-probabilities of `tokens` `[rows]`, which are called `first` and so on, by logits that
    come in `parts`, `[rows, vocabulary]` together; and whether those of each row are finite. What
    those have that are not has no meaning.
    """
    found: list[LogprobRows] = []
    finite: list[npt.NDArray[np.bool_]] = []
    begin = 0
    for logits in parts:
        here = slice(begin, begin + len(logits))
        has_meaning = logits.amax(-1).isfinite()
        if logits.device.type != "cpu" or not has_meaning.all():  # which would wait for a GPU
            logits = logits.masked_fill(~has_meaning[:, None], 0.0)
        (own,) = on_device(logits.device, tokens[here])
        probable = most_probable(logits, own, asked[here])
        are_finite, *arrays = on_host(has_meaning, *probable)
        made = logprob_rows(tokens[here], asked[here], *arrays)
        found.append(made.between(0, len(logits), first + begin))
        finite.append(are_finite)
        begin = here.stop
    return LogprobRows.joined(found), np.concatenate(finite)
