"""Bias and penalties before a token is chosen, and log-probabilities of those that were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.logprobs import NO_TOKEN, LogprobRows
from actors.messages import Admission, Sampling, TokenIds


class TokenCounts:
    """The distinct tokens of one request that penalties count, and how often each was generated.

    Tokens that only the prompt has count 0. Counts are kept for these tokens alone, not over the
    whole vocabulary: a request has hundreds.
    """

    def __init__(self, prompt_tokens: Sequence[int], generated: Sequence[int], room: int) -> None:
        """`prompt_tokens` are distinct; at most `room` tokens will be generated."""
        most = len(prompt_tokens) + room
        self._tokens = np.zeros(most, dtype=np.int64)
        self._counts = np.zeros(most, dtype=np.int64)
        self._tokens[: len(prompt_tokens)] = prompt_tokens
        self._place = {token: place for place, token in enumerate(prompt_tokens)}
        for token in generated:
            self.add(token)

    @classmethod
    def of(cls, admission: Admission) -> TokenCounts:
        """The counts of a request that begins, or goes on after a fault."""
        room = admission.max_new_tokens
        return cls(admission.prompt_tokens, admission.generated, room)

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._place.setdefault(token, len(self._place))
        self._tokens[place] = token
        self._counts[place] += 1

    @property
    def tokens(self) -> TokenIds:
        """Token ids, `[distinct]`."""
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> TokenIds:
        """Number of times that each was generated, `[distinct]`."""
        return self._counts[: len(self._place)]


NO_TOKENS = TokenCounts((), (), 0)
"""The counts of a request without penalties."""


def changed_logits(
    logits: Tensor,
    sampling: Sequence[Sampling],
    counts: Sequence[TokenCounts],
    barred: Sequence[Sequence[int]] = (),
) -> Tensor:
    """`logits` `[requests, vocabulary]` in float64, biased and then penalised: by repetition (as
    transformers' processor does), then by frequency and presence.

    transformers and vLLM have the same order. Products of large logits and penalties stay finite in
    double precision. Each request's `barred` tokens get the least finite number, which no other
    token has: infinities would leave nothing to choose where all are barred.
    """
    changed = logits.to(torch.float64, copy=True)
    _add_bias(changed, sampling)
    _penalise(changed, sampling, counts)
    tokens = np.array([token for each in barred for token in each], dtype=np.int64)
    if tokens.size:
        where = _index(changed, [len(each) for each in barred], tokens)
        changed[where] = torch.finfo(torch.float64).min
    return changed


def _add_bias(logits: Tensor, sampling: Sequence[Sampling]) -> None:
    biases = [s.logit_bias for s in sampling]
    tokens = np.array([token for bias in biases for token in bias], dtype=np.int64)
    if not tokens.size:
        return
    values = np.array([value for bias in biases for value in bias.values()])
    where = _index(logits, [len(bias) for bias in biases], tokens)
    logits[where] += torch.from_numpy(values).to(logits.device)


def _penalise(logits: Tensor, sampling: Sequence[Sampling], counts: Sequence[TokenCounts]) -> None:
    lengths = [len(each.tokens) for each in counts]
    if not any(lengths):
        return

    def each(values: Sequence[float]) -> Tensor:
        return _on(np.repeat(np.array(values, dtype=np.float64), lengths), logits)

    where = _index(logits, lengths, np.concatenate([c.tokens for c in counts]))
    times = _on(np.concatenate([c.counts for c in counts]), logits)
    repetition = each([s.repetition_penalty for s in sampling])
    values = logits[where]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= each([s.frequency_penalty for s in sampling]) * times
    values -= each([s.presence_penalty for s in sampling]) * (times > 0)
    logits[where] = values


def _index(logits: Tensor, lengths: Sequence[int], tokens: TokenIds) -> tuple[Tensor, Tensor]:
    """Rows and columns of `tokens`: the first `lengths[0]` of them belong to row 0, and so on."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return _on(rows, logits), _on(tokens, logits)


def _on(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device)


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
