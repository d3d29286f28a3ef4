"""Choosing the next token of every request in one batched call, and telling when a request ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, log
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from actors.messages import (
    NOTHING_SAMPLED,
    Admission,
    FinishReason,
    MicroBatch,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.sampling_options import stop_begin
from actors.stage.model_config import end_tokens, read_config
from actors.stage.penalties import NO_TOKENS, TokenCounts, changed_logits, logprob_rows
from quant.common.text import MOST_BEFORE, Decoder, text_after


@dataclass
class _Running:
    """A request in a slot, its new tokens, the tokens that its penalties count, and those that none
    of its first `min_tokens` may be.
    """

    admission: Admission
    token_ids: list[int]
    counts: TokenCounts
    ends: Sequence[int]

    @classmethod
    def of(cls, admission: Admission, eos: frozenset[int]) -> _Running:
        sampling = admission.sampling
        counts = TokenCounts.of(admission) if sampling.penalises else NO_TOKENS
        ends = sorted(eos.union(sampling.stop_token_ids)) if sampling.min_tokens else ()
        return cls(admission, list(admission.generated), counts, ends)

    @property
    def barred(self) -> Sequence[int]:
        """Tokens that its next one must not be."""
        return self.ends if len(self.token_ids) < self.sampling.min_tokens else ()

    @property
    def sampling(self) -> Sampling:
        return self.admission.sampling

    def draw(self) -> float:
        """The draw in [0, 1) for its next token; 0 where the choice is greedy."""
        if self.sampling.temperature == 0:
            return 0.0
        name = self.admission.draw_id or self.admission.custom_id
        return uniform_draw(self.sampling.seed, name, len(self.token_ids))

    def give(self, token: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token)
        if self.counts is not NO_TOKENS:
            self.counts.add(token)


class Sampler:
    """Keeps the running requests of the last stage by slot.

    `eos_token_ids` end a request unless its sampling says `ignore_eos`; `tokenizer` is only needed
    for stop strings and is loaded by `for_checkpoint` when the first request brings one.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        tokenizer: Decoder | None = None,
        folder: Path | None = None,
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._folder = folder
        self._running: dict[int, _Running] = {}

    @classmethod
    def for_checkpoint(cls, folder: Path) -> Sampler:
        """A sampler with the checkpoint's own end tokens."""
        return cls(tuple(end_tokens(folder).sources), folder=folder)

    def sample(self, batch: MicroBatch, logits: Tensor) -> Sampled:
        """One token for each sampled request of `batch`; `logits`: `[sampled, vocabulary]`, of
        which nothing is read where there are none.
        """
        for admission in batch.admitted:
            self._running[admission.slot] = _Running.of(admission, self._eos)
        slots = batch.slots[batch.sampled_rows].tolist()
        if not slots:
            return NOTHING_SAMPLED
        running = [self._running[slot] for slot in slots]
        finite = logits.amax(-1).isfinite()  # the largest of a row with NaN is NaN
        if not finite.all():
            logits = logits.masked_fill(~finite[:, None], 0.0)
        tokens = next_tokens(logits, running)
        asked = [request.admission.top_logprobs for request in running]
        logprobs = logprob_rows(logits, tokens, asked)
        reasons = []
        for slot, request, token, is_finite in zip(
            slots, running, tokens, finite.tolist(), strict=True
        ):
            request.give(int(token))
            reason = self._finish_reason(request) if is_finite else "error"
            reasons.append(reason)
            if reason is not None:
                del self._running[slot]
        return Sampled(tokens, tuple(reasons), logprobs)

    def _finish_reason(self, request: _Running) -> FinishReason | None:
        sampling, token_ids = request.sampling, request.token_ids
        if len(token_ids) > sampling.min_tokens:
            is_eos = not sampling.ignore_eos and token_ids[-1] in self._eos
            if is_eos or token_ids[-1] in sampling.stop_token_ids:
                return "stop"
            if sampling.stop and self._meets_stop_string(request):
                return "stop"
        return "length" if len(token_ids) >= request.admission.max_new_tokens else None

    def _meets_stop_string(self, request: _Running) -> bool:
        """Whether the newest token completes a stop string; only the tail of the text can hold it.

        Every token stands for at least one byte, and a character has at most four. Special tokens
        are kept in the text, as users may want to stop at one. What ends with the first
        `min_tokens` is passed over.
        """
        sampling, token_ids = request.sampling, request.token_ids
        tail = max(len(s.encode()) for s in sampling.stop) + 4
        before = (*request.admission.prompt_end, *token_ids[-tail - MOST_BEFORE : -tail])
        early = max(0, sampling.min_tokens - max(0, len(token_ids) - tail))
        text_of = partial(text_after, self._decoder(), before, skip_special_tokens=False)
        try:
            text = text_of(token_ids[-tail:])
            early_text = text_of(token_ids[-tail:][:early]) if early else ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # such as a Rust panic; the driver decodes all and reports it
            return False
        return stop_begin(text, sampling.stop, early_text) is not None

    def _decoder(self) -> Decoder:
        if self._tokenizer is None:
            assert self._folder is not None, "given where there is no tokenizer"
            self._tokenizer = AutoTokenizer.from_pretrained(
                self._folder, config=read_config(self._folder), trust_remote_code=False
            )
        return self._tokenizer


def next_tokens(logits: Tensor, running: Sequence[_Running]) -> TokenIds:
    """Next tokens `[requests]` of requests whose `logits` are `[requests, vocabulary]`.

    Requests with a bias, penalties or barred tokens are handled apart from the others, which keep
    the type of their logits and lose no time by them.
    """
    changing = [bool(r.sampling.changes_logits or r.barred) for r in running]
    if not any(changing):
        return _choose(logits, running)
    tokens = np.empty(len(running), dtype=np.int64)
    for changes in {*changing}:
        rows = [row for row, each in enumerate(changing) if each == changes]
        group = [running[row] for row in rows]
        part = logits[torch.tensor(rows, device=logits.device)]
        if changes:
            barred = [[t for t in r.barred if t < part.shape[-1]] for r in group]
            sampling, counts = [r.sampling for r in group], [r.counts for r in group]
            part = changed_logits(part, sampling, counts, barred)
        tokens[rows] = _choose(part, group)
    return tokens


def _choose(logits: Tensor, running: Sequence[_Running]) -> TokenIds:
    return choose_tokens(logits, [r.sampling for r in running], [r.draw() for r in running])


def uniform_draw(seed: int, custom_id: str, position: int) -> float:
    """A number in [0, 1) that depends only on the request and the token's position in it."""
    digest = hashlib.blake2b(f"{seed}\0{position}\0{custom_id}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "big") >> 11) * 2.0**-53)


def choose_tokens(logits: Tensor, sampling: Sequence[Sampling], draws: Sequence[float]) -> TokenIds:
    """Next tokens `[requests]` for `logits` `[requests, vocabulary]`, by inverse transform of
    `draws`.
    """
    tokens = logits.max(-1).indices  # of bfloat16 on a CPU six times as fast as argmax
    random_rows = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        chosen = [sampling[i] for i in random_rows]
        probabilities, order = filtered_probabilities(logits[rows].double(), chosen)
        cumulative = probabilities.cumsum(-1)
        u = torch.tensor([[draws[i]] for i in random_rows], dtype=cumulative.dtype)
        rank = torch.searchsorted(cumulative, u.to(logits.device) * cumulative[:, -1:], right=True)
        last_kept = (probabilities > 0).sum(-1, keepdim=True) - 1
        tokens[rows] = order.gather(-1, rank.minimum(last_kept))[:, 0]
    result: TokenIds = tokens.cpu().numpy().astype(np.int64)
    return result


def filtered_probabilities(logits: Tensor, sampling: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order after temperature, top-k, top-p and min-p, and the token
    of each.

    Both are `[requests, vocabulary]`; removed tokens have probability 0. The filters have
    transformers' order, and the most probable token always stays, as there. `logits` in float64 are
    overwritten, and freed as soon as they are sorted: `planner.costs.memory` counts the bytes.
    """
    device, vocabulary = logits.device, logits.shape[-1]

    def each(values: Sequence[float]) -> Tensor:
        return torch.tensor([[v] for v in values], device=device, dtype=torch.float64)

    scaled = logits.double()
    del logits
    # The greatest logit becomes 0 first: no temperature, however small, then makes infinities.
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= each([s.temperature for s in sampling])
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = each([min(s.top_k or vocabulary, vocabulary) for s in sampling])
    scaled.masked_fill_(torch.arange(vocabulary, device=device) >= top_k, -torch.inf)
    probabilities = scaled.softmax(-1)
    sums = probabilities.cumsum(-1)
    before = sums.sub_(probabilities)
    top_p = each([s.top_p for s in sampling])
    probabilities.masked_fill_((before >= top_p) & (top_p < 1), 0.0)
    # The most probable token has 0 here: tokens of less than `min_p` of its probability go.
    least = each([log(s.min_p) if s.min_p else -inf for s in sampling])
    probabilities.masked_fill_(scaled < least, 0.0)
    # In order, as threads would share the sum of a single row, and come to another last bit.
    probabilities /= torch.cumsum(probabilities, -1, out=sums)[..., -1:]
    return probabilities, order
