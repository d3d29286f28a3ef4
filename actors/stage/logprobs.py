"""Log-probabilities of the tokens that were chosen, by the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.logprobs import NO_TOKEN, LogprobRows
from actors.messages import TokenIds


def logprob_rows(
    logits: Tensor, tokens: TokenIds, top_logprobs: Sequence[int | None]
) -> LogprobRows | None:
    """Log-probabilities of the `tokens` `[sampled]`, and of as many of the most probable ones as
    `top_logprobs` says for each row; None where no row asks.

    `logits` `[sampled, vocabulary]` are the model's: before bias, penalties and temperature. Only
    the rows that ask are looked at, in float32. A chosen token comes before others that are as
    probable; these come by their ids.
    """
    asked = [row for row, wanted in enumerate(top_logprobs) if wanted is not None]
    if not asked:
        return None
    rows = np.array(asked, dtype=np.int64)
    wanted = np.array([top_logprobs[row] for row in asked], dtype=np.int64)
    most = min(int(wanted.max()), logits.shape[-1])
    part = logits[torch.from_numpy(rows).to(logits.device)].float()
    chosen = torch.from_numpy(tokens[rows]).to(logits.device)[:, None]
    each = part.log_softmax(-1)  # row by row; a sum of one row is shared among threads
    own = each.gather(-1, chosen)[:, 0].cpu().numpy()
    order = part.topk(most, dim=-1).indices
    top, top_ids = each.gather(-1, order).cpu().numpy(), order.cpu().numpy()
    for row, token in enumerate(tokens[rows].tolist()):
        _sort_equals(top_ids[row], top[row], token, own[row])
    top_ids[np.arange(most) >= wanted[:, None]] = NO_TOKEN
    return LogprobRows(rows, own, top_ids, top)


def _sort_equals(top_ids: TokenIds, top: np.ndarray, token: int, own: np.float32) -> None:
    """Bring equally probable tokens in order, in place: the chosen `token` first, which may have
    been left out for others as probable as it, then by ids.
    """
    if len(top) and own >= top[-1] and token not in top_ids:
        top_ids[-1] = token
    order = np.lexsort((top_ids, top_ids != token, -top))
    top_ids[:] = top_ids[order]
