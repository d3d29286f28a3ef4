"""Choosing the next token of every request in one batched call, and telling when a request ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, log
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoTokenizer

from actors.logprobs import LogprobRows
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
from actors.stage.grammar import Answer, Grammars, vocabulary_of
from actors.stage.log_probabilities import logprob_rows, most_probable, scores
from actors.stage.model_config import read_config
from quant.common.text import MOST_BEFORE, Decoder, text_after
from quant.devices import on_device, on_host


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
        room = admission.max_new_tokens
        return cls(admission.prompt_tokens, admission.generated, room)

    def add(self, token: int) -> None:
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
    token has: infinities, which grammars give, would leave nothing to choose where all are barred.
    """
    changed = logits.to(torch.float64, copy=True)
    _add_bias(changed, sampling)
    _penalise(changed, sampling, counts)
    tokens = np.array([token for each in barred for token in each], dtype=np.int64)
    if tokens.size:
        where = _index(changed, [len(each) for each in barred], tokens)
        changed[where] = changed[where].clamp(max=torch.finfo(torch.float64).min)
    return changed


def _add_bias(logits: Tensor, sampling: Sequence[Sampling]) -> None:
    biases = [s.logit_bias for s in sampling]
    tokens = np.array([token for bias in biases for token in bias], dtype=np.int64)
    if not tokens.size:
        return
    values = np.array([value for bias in biases for value in bias.values()])
    where = _index(logits, [len(bias) for bias in biases], tokens)
    logits[where] += on_device(logits.device, values)[0]


def _penalise(logits: Tensor, sampling: Sequence[Sampling], counts: Sequence[TokenCounts]) -> None:
    lengths = [len(each.tokens) for each in counts]
    if not any(lengths):
        return

    def each(values: Sequence[float]) -> npt.NDArray[np.float64]:
        return np.repeat(np.array(values, dtype=np.float64), lengths)

    where = _index(logits, lengths, np.concatenate([c.tokens for c in counts]))
    times, repetition, frequency, presence = on_device(
        logits.device,
        np.concatenate([c.counts for c in counts]),
        each([s.repetition_penalty for s in sampling]),
        each([s.frequency_penalty for s in sampling]),
        each([s.presence_penalty for s in sampling]),
    )
    values = logits[where]
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= frequency * times
    values -= presence * (times > 0)
    logits[where] = values


def _index(logits: Tensor, lengths: Sequence[int], tokens: TokenIds) -> tuple[Tensor, Tensor]:
    """Rows and columns of `tokens`: the first `lengths[0]` of them belong to row 0, and so on."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    on_rows, columns = on_device(logits.device, rows, tokens)
    return on_rows, columns


class _Running:
    """A request in a slot, its new tokens, those that its penalties count, and its grammar."""

    def __init__(self, admission: Admission, eos: frozenset[int], grammars: Grammars) -> None:
        self.admission = admission
        self.sampling = sampling = admission.sampling
        self.token_ids = list(admission.generated)
        self.counts = TokenCounts.of(admission) if sampling.penalises else NO_TOKENS
        ends = sorted(eos.union(sampling.stop_token_ids)) if sampling.min_tokens else []
        self._ends = ends  # which none of its first `min_tokens` may be
        self.is_finite = True  # what was computed of its prompt
        self.answer: Answer | None = None
        self._ignored: Sequence[int] = ()
        if sampling.structured_outputs:
            self.answer = grammars.begin(sampling.structured_outputs, self.token_ids)
            self._ignored = sorted(eos) if sampling.ignore_eos else ()

    @property
    def barred(self) -> Sequence[int]:
        """Tokens that its next one must not be, unless a grammar leaves no other."""
        return self._ends if len(self.token_ids) < self.sampling.min_tokens else self._ignored

    def draw(self) -> float:
        """The draw in [0, 1) for its next token; 0 where the choice is greedy."""
        if self.sampling.temperature == 0:
            return 0.0
        name = self.admission.draw_id or self.admission.custom_id
        return uniform_draw(self.sampling.seed, name, len(self.token_ids))

    def give(self, token: int) -> None:
        self.token_ids.append(token)
        if self.counts is not NO_TOKENS:
            self.counts.add(token)
        if self.answer is not None:
            self.answer.give(token)


class Sampler:
    """Keeps the running requests of the last stage by slot.

    `eos_token_ids` end a request unless its sampling says `ignore_eos`; `tokenizer` is only needed
    for stop strings and grammars, and is loaded from `folder` when the first request brings one.
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
        self._grammars = Grammars(lambda: vocabulary_of(self._decoder(), eos_token_ids))

    def sample(self, batch: MicroBatch, logits: Tensor, scored: Iterable[Tensor] = ()) -> Sampled:
        """One token for each sampled request of `batch`; `logits`: `[sampled, vocabulary]`, of
        which nothing is read where there are none. `scored` are those of prompts, part by part,
        `[scored tokens, vocabulary]` together.
        """
        for admission in batch.admitted:
            self._running[admission.slot] = _Running(admission, self._eos, self._grammars)
        slots = batch.slots[batch.sampled_rows].tolist()
        of_prompts = self._scores(batch, len(slots), scored)
        if not slots:
            return replace(NOTHING_SAMPLED, logprobs=of_prompts) if of_prompts else NOTHING_SAMPLED
        running = [self._running[slot] for slot in slots]
        finite = logits.amax(-1).isfinite()  # the largest of a row with NaN is NaN
        if logits.device.type != "cpu":  # looking first would wait for the GPU
            logits.masked_fill_(~finite[:, None], 0.0)
        elif not finite.all():
            logits = logits.masked_fill(~finite[:, None], 0.0)
        allowed = self._grammars.masked(logits, [request.answer for request in running])
        chosen = next_tokens(allowed, running)
        asked = [request.admission.top_logprobs for request in running]
        probable = most_probable(logits, chosen, asked)
        tokens, are_finite, *found = on_host(chosen, finite, *probable)
        of_tokens = logprob_rows(tokens, asked, *found) if found else None
        logprobs = LogprobRows.joined([each for each in (of_tokens, of_prompts) if each])
        reasons = []
        for slot, request, token, is_finite in zip(
            slots, running, tokens, are_finite.tolist(), strict=True
        ):
            request.give(int(token))
            has_meaning = is_finite and request.is_finite
            reason = self._finish_reason(request) if has_meaning else "error"
            reasons.append(reason)
            if reason is not None:
                del self._running[slot]
        going_on = zip(running, reasons, strict=True)
        self._grammars.look_ahead([r.answer for r, ends in going_on if r.answer and not ends])
        return Sampled(tokens, tuple(reasons), logprobs)

    def _scores(self, batch: MicroBatch, first: int, parts: Iterable[Tensor]) -> LogprobRows | None:
        """Log-probabilities of the tokens of prompts whose logits are the `parts`, which are called
        `first` and so on.
        """
        if batch.scored is None:
            return None
        counts = batch.scored.tolist()
        rows = [row for row, count in enumerate(counts) if count]
        running = [self._running[slot] for slot in batch.slots[rows].tolist()]
        tokens, asked = list[int](), list[int | None]()
        for row, request in zip(rows, running, strict=True):
            begin = int(batch.starts[row]) + 1
            tokens += request.admission.prompt_ids[begin : begin + counts[row]]
            asked += [request.admission.prompt_logprobs] * counts[row]
        found, finite = scores(parts, np.array(tokens, dtype=np.int64), asked, first)
        owners = np.repeat(np.arange(len(rows)), [counts[row] for row in rows])
        for owner in owners[~finite].tolist():
            running[owner].is_finite = False
        return found

    def _finish_reason(self, request: _Running) -> FinishReason | None:
        sampling, token_ids, answer = request.sampling, request.token_ids, request.answer
        if answer is not None and answer.is_complete:
            return "error" if answer.is_broken else "stop"
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


def next_tokens(logits: Tensor, running: Sequence[_Running]) -> Tensor:
    """Next tokens `[requests]` of requests whose `logits` are `[requests, vocabulary]`.

    Requests with a bias, penalties or barred tokens are handled apart from the others, which keep
    the type of their logits and lose no time by them.
    """
    changing = [bool(r.sampling.changes_logits or r.barred) for r in running]
    if not any(changing):
        return _choose(logits, running)
    tokens = torch.empty(len(running), dtype=torch.int64, device=logits.device)
    for changes in {*changing}:
        rows = [row for row, each in enumerate(changing) if each == changes]
        group = [running[row] for row in rows]
        (where,) = on_device(logits.device, np.array(rows))
        part = logits[where]
        if changes:
            barred = [[t for t in r.barred if t < part.shape[-1]] for r in group]
            sampling, counts = [r.sampling for r in group], [r.counts for r in group]
            part = changed_logits(part, sampling, counts, barred)
        tokens[where] = _choose(part, group)
    return tokens


def _choose(logits: Tensor, running: Sequence[_Running]) -> Tensor:
    return choose_tokens(logits, [r.sampling for r in running], [r.draw() for r in running])


def uniform_draw(seed: int, custom_id: str, position: int) -> float:
    """A number in [0, 1) that depends only on the request and the token's position in it."""
    digest = hashlib.blake2b(f"{seed}\0{position}\0{custom_id}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "big") >> 11) * 2.0**-53)


def choose_tokens(logits: Tensor, sampling: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Next tokens `[requests]` for `logits` `[requests, vocabulary]`, by inverse transform of
    `draws`.
    """
    tokens: Tensor = logits.max(-1).indices  # of bfloat16 on a CPU six times as fast as argmax
    random_rows = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if random_rows:
        drawn = np.array([[draws[i]] for i in random_rows])
        rows, u = on_device(logits.device, np.array(random_rows), drawn)
        chosen = [sampling[i] for i in random_rows]
        probabilities, order = filtered_probabilities(logits[rows].double(), chosen)
        cumulative = probabilities.cumsum(-1)
        rank = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        last_kept = (probabilities > 0).sum(-1, keepdim=True) - 1
        tokens[rows] = order.gather(-1, rank.minimum(last_kept))[:, 0]
    return tokens


def filtered_probabilities(logits: Tensor, sampling: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order after temperature, top-k, top-p and min-p, and the token
    of each.

    Both are `[requests, vocabulary]`; removed tokens have probability 0. The filters have
    transformers' order, and the most probable token always stays, as there. `logits` in float64 are
    overwritten, and freed as soon as they are sorted: `planner.costs.memory` counts the bytes.
    """
    device, vocabulary = logits.device, logits.shape[-1]

    top_ks = [min(s.top_k or vocabulary, vocabulary) for s in sampling]
    # The most probable token will have 0: tokens of less than `min_p` of its probability go.
    least_ones = [log(s.min_p) if s.min_p else -inf for s in sampling]
    parameters = [s.temperature for s in sampling], top_ks, [s.top_p for s in sampling], least_ones
    (table,) = on_device(device, np.array(parameters, dtype=np.float64))
    temperature, top_k, top_p, least = table[..., None]
    scaled = logits.double()
    del logits
    # The greatest logit becomes 0 first: no temperature, however small, then makes infinities.
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= temperature
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    scaled.masked_fill_(torch.arange(vocabulary, device=device) >= top_k, -torch.inf)
    probabilities = scaled.softmax(-1)
    sums = probabilities.cumsum(-1)
    before = sums.sub_(probabilities)
    probabilities.masked_fill_((before >= top_p) & (top_p < 1), 0.0)
    probabilities.masked_fill_(scaled < least, 0.0)
    # In order, as threads would share the sum of a single row, and come to another last bit.
    probabilities /= torch.cumsum(probabilities, -1, out=sums)[..., -1:]
    return probabilities, order
