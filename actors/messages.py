"""The messages between scheduler, stages and driver: requests, micro-batches, sampled tokens and
figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from actors.logprobs import LogprobRows, TokenLogprobs
from actors.sampling_options import Sampling as Sampling
from quant.common.text import MOST_BEFORE

FinishReason = Literal["stop", "length", "error"]
BatchKind = Literal["prefill", "decode", "mixed"]
"""The work in a micro-batch: prompts or parts of them, decode steps, or both."""

BATCH_KINDS: tuple[BatchKind, ...] = ("prefill", "decode", "mixed")

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostKey:
    """The number under which keys and values of a request lie in the host memory of the stages of a
    pipeline, from when these are linked for the time number `epoch` until they are linked again.
    """

    number: int
    epoch: int = 0


class HeadId(str):
    """The custom_id of the head that prompts share: unlike one of a user's, of the same letters."""

    __slots__ = ()


@dataclass(frozen=True)
class SharedHead:
    """The first `tokens` tokens of a prompt, whose keys and values lie in host memory under `key`
    when the request comes into a slot.
    """

    key: int
    tokens: int


@dataclass(frozen=True)
class Request:
    """One tokenized prompt, with its own `max_new_tokens`.

    `generated`: its first new tokens where it goes on after a fault; `max_new_tokens` counts them.
    `draw_id`: what random draws are keyed by in the place of `custom_id`, unless it is empty.
    `top_logprobs`: how many of the most probable tokens are told beside each new one, with all
    their log-probabilities; None for none at all. `prompt_logprobs`: the same of each token of the
    prompt but the first one, told with the first new token. No choice depends on them.
    `expected_tokens`: the new tokens that a predictor expects of it, `generated` among them; None:
    as many as it may have.

    `host_key`: where its keys and values are kept once its prompt is computed, for other stages to
    go on with it; of a request that has `generated` tokens, where those of all tokens but the last
    one lie. `age_s`: how long ago other stages began with it, which then handed it over. `adapter`:
    the name of the one that computes it with the model; empty: the model alone. `head`: the part of
    its prompt that is restored, and not computed (None: nothing is).
    """

    custom_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    generated: tuple[int, ...] = ()
    draw_id: str = ""
    top_logprobs: int | None = None
    expected_tokens: int | None = None
    host_key: HostKey | None = None
    age_s: float | None = None
    adapter: str = ""
    head: SharedHead | None = None
    prompt_logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or self.prompt_logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        return self.prompt_logprobs is not None and not self.generated

    @property
    def shared_tokens(self) -> int:
        """How many of its first tokens are restored, and not computed."""
        return 0 if self.head is None else self.head.tokens


@dataclass(frozen=True)
class TokenRange:
    """`size` token slots of the KV cache from `begin` on, which one request holds."""

    begin: int
    size: int

    @property
    def end(self) -> int:
        """The first token slot after it."""
        return self.begin + self.size


@dataclass(frozen=True)
class Move:
    """Keys and values of `tokens` tokens that go from slot `begin` to `to`; the two may overlap."""

    begin: int
    to: int
    tokens: int


@dataclass(frozen=True)
class Park:
    """`tokens` tokens of a request from slot `begin` on, to host memory under `key`, or back."""

    key: int
    begin: int
    tokens: int


@dataclass(frozen=True)
class KvPart:
    """Keys and values of `heads` of `layers`: half-open ranges of key/value heads and layers."""

    layers: range
    heads: range

    @property
    def size(self) -> int:
        """Number of heads of all layers together."""
        return len(self.layers) * len(self.heads)


EVERY_KEY = -1
"""Stands for the keys of all requests in host memory. Keys below it are those of heads that prompts
share, which stay there when they are restored."""


@dataclass(frozen=True)
class Admission:
    """A request that takes a slot, as stages must know it.

    `room` is its range of the KV cache, which is cleared for it. `generated`, `draw_id`, `adapter`
    and `top_logprobs` as in `Request`.
    `prompt_tokens`: the distinct tokens of its prompt where a penalty counts them, else empty;
    `prompt_end`: its last ones where stop strings are looked for behind them, else empty;
    `prompt_ids`: all of them where `prompt_logprobs` of each are told, else empty. They are sent
    once; the stage that samples keeps them, and the tokens that it has chosen.
    """

    slot: int
    custom_id: str
    max_new_tokens: int
    sampling: Sampling
    generated: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    room: TokenRange = TokenRange(0, 0)
    draw_id: str = ""
    top_logprobs: int | None = None
    prompt_end: tuple[int, ...] = ()
    adapter: str = ""
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    @classmethod
    def of(cls, slot: int, request: Request, room: TokenRange = TokenRange(0, 0)) -> Admission:
        sampling = request.sampling
        counted = sampling.repetition_penalty != 1
        return cls(
            slot,
            request.custom_id,
            request.max_new_tokens,
            sampling,
            request.generated,
            tuple(sorted(set(request.prompt_ids))) if counted else (),
            room,
            request.draw_id,
            request.top_logprobs,
            request.prompt_ids[-MOST_BEFORE:] if sampling.stop else (),
            request.adapter,
            request.prompt_ids if request.scores_prompt else (),
            request.prompt_logprobs if request.scores_prompt else None,
        )


@dataclass(frozen=True)
class MicroBatch:
    """One pass through the pipeline: for each request its slot, its tokens' start and count.

    `slots`, `starts`, `counts`, `begins`: `[requests]`; the hidden states that travel with it are
    the requests' new tokens one after the other, `[sum(counts), hidden_size]`. `begins` are the
    first token slots of the requests' ranges in the KV cache: the token at position p of a request
    has the token slot begin + p. `admitted` lists the requests that begin with this micro-batch.
    `moves` are made before it, in their order, and before the rooms of `admitted` are cleared.
    `samples` `[requests]` tells whose next token is sampled (None: everyone's): a part of a prompt
    that is not the last one has none yet. `sizes` `[requests]` are the token slots of the requests'
    ranges (None: not told), which may have grown. `scored` `[requests]`: behind how many of a
    request's new tokens, from the first on, the log-probability of the prompt's next one is told
    (None: of nobody's).

    Requests that are preempted have their tokens parked in host memory, or not: `drops` are keys of
    what is forgotten there first of all, `parks` are made then, before the moves, and `restores`
    after rooms are cleared. `keeps` are copied there when it has been computed, where there is
    room, for other stages to go on with, or for other prompts to begin with.
    """

    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    admitted: tuple[Admission, ...] = ()
    moves: tuple[Move, ...] = ()
    samples: npt.NDArray[np.bool_] | None = None
    sizes: npt.NDArray[np.int64] | None = None
    parks: tuple[Park, ...] = ()
    restores: tuple[Park, ...] = ()
    drops: tuple[int, ...] = ()
    keeps: tuple[Park, ...] = ()
    scored: npt.NDArray[np.int64] | None = None

    @cached_property
    def decode_rows(self) -> npt.NDArray[np.bool_]:
        """Whose one new token attends to earlier ones, `[requests]`, decoded or of a prompt."""
        rows: npt.NDArray[np.bool_] = (self.counts == 1) & (self.starts > 0)
        return rows

    @cached_property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token to what its slot holds."""
        return bool(self.decode_rows.all())

    @cached_property
    def kind(self) -> BatchKind:
        if self.is_decode:
            return "decode"
        return "mixed" if self.decode_rows.any() else "prefill"

    @property
    def decode_tokens(self) -> int:
        """Number of its decode rows; its other new tokens are those of prompts."""
        return int(self.decode_rows.sum())

    @cached_property
    def lengths(self) -> TokenIds:
        """Tokens of every request with the new ones, `[requests]`."""
        return self.starts + self.counts

    @property
    def positions(self) -> TokenIds:
        """Position of every new token within its request, `[sum(counts)]`."""
        first = np.repeat(
            self.starts - np.concatenate([[0], np.cumsum(self.counts)[:-1]]), self.counts
        )
        positions: TokenIds = np.arange(int(self.counts.sum()), dtype=np.int64) + first
        return positions

    def passes(self, tokens_at_once: int) -> list[MicroBatch]:
        """Parts of at most `tokens_at_once` new tokens, in order, without admissions and moves."""
        parts: list[MicroBatch] = []
        first = tokens = 0
        for row, count in enumerate(self.counts.tolist()):
            if tokens and tokens + count > tokens_at_once:
                parts.append(self.of_rows(slice(first, row)))
                first, tokens = row, 0
            tokens += count
        return [*parts, self.of_rows(slice(first, None))]

    @property
    def by_token(self) -> MicroBatch:
        """Its new tokens as requests of one new token each, in order."""
        slots, begins = (np.repeat(each, self.counts) for each in (self.slots, self.begins))
        return MicroBatch(slots, self.positions, np.ones_like(slots), begins)

    def of_rows(self, rows: slice | TokenIds) -> MicroBatch:
        return MicroBatch(self.slots[rows], self.starts[rows], self.counts[rows], self.begins[rows])

    @cached_property
    def sampled_rows(self) -> TokenIds:
        """The requests whose next token is sampled, by their place in it, `[sampled]`."""
        everyone: TokenIds = np.arange(len(self.slots))
        return everyone if self.samples is None else everyone[self.samples]

    @property
    def last_token_rows(self) -> TokenIds:
        """Row of the last new token of each sampled request in the flattened batch, `[sampled]`."""
        rows: TokenIds = (np.cumsum(self.counts) - 1)[self.sampled_rows]
        return rows

    @property
    def scored_tokens(self) -> int:
        """Number of tokens behind which the prompt's next one is scored."""
        return 0 if self.scored is None else int(self.scored.sum())

    @property
    def head_rows(self) -> TokenIds:
        """Rows of the flattened batch that the LM head computes: the last new token of each sampled
        request, then the `scored_tokens`.
        """
        if self.scored is None:
            return self.last_token_rows
        first = np.cumsum(self.counts) - self.counts - np.cumsum(self.scored) + self.scored
        scored = np.arange(self.scored_tokens) + np.repeat(first, self.scored)
        return np.concatenate([self.last_token_rows, scored])


@dataclass(frozen=True)
class Sampled:
    """The last stage's answer: `token_ids` `[sampled]`, and why a request ended, if it did.

    Both are in the order of the micro-batch's `sampled_rows`, and empty where nothing was sampled.
    The reason "error" means that its logits were not finite; the token has no meaning then.
    `logprobs` are those of the requests that ask for them, None where none does; of prompts, too.
    """

    token_ids: TokenIds
    finish_reasons: tuple[FinishReason | None, ...]
    logprobs: LogprobRows | None = None


NOTHING_SAMPLED = Sampled(np.zeros(0, dtype=np.int64), ())


@dataclass(frozen=True)
class Finished:
    """An ended request, with its new tokens (EOS included); `error` says what went wrong, the
    log-probabilities are as in `Progress`.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: LogprobRows | None = None


@dataclass(frozen=True)
class Progress:
    """The new tokens of a request of a live run since the last one told of it, or all of them where
    only whole answers are told of; where it has ended with them, why, and `error` as in `Finished`.
    `logprobs` are those of the tokens where the request asks for them, else empty. `age_s`: how
    long ago the stages began with it, where others go on with it now. `shared_tokens`, told with
    the first ones: how many of its prompt's were restored, and not computed; `prompt_logprobs`,
    told with them too: those of the prompt's tokens by position, without the first one.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    age_s: float | None = None
    shared_tokens: int = 0
    prompt_logprobs: LogprobRows | None = None


@dataclass(eq=False)
class KnownLogprobs:
    """Log-probabilities that were told of a request: of its new tokens, and of its prompt."""

    own: list[TokenLogprobs] = field(default_factory=list)
    prompt: LogprobRows | None = None

    def add(self, told: Progress) -> None:
        self.own += told.logprobs
        self.prompt = told.prompt_logprobs or self.prompt


@dataclass(frozen=True, eq=False)
class SlotTokens:
    """The request in each KV slot of the first stage in a `run`, with its new tokens."""

    run: int | None
    slots: Mapping[int, tuple[str, TokenIds]]
