"""The messages between scheduler, stages and driver: requests, micro-batches, sampled tokens and
figures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.logprobs import LogprobRows, TokenLogprobs
from actors.sampling_options import Sampling as Sampling

Transport = Literal["auto", "ray", "gloo"]
"""How tensors go between stages; auto: gloo where it connects, else Ray."""

TRANSPORTS: tuple[Transport, ...] = ("auto", "ray", "gloo")

FinishReason = Literal["stop", "length", "error"]
BatchKind = Literal["prefill", "decode", "mixed"]
"""The work in a micro-batch: prompts or parts of them, decode steps, or both."""

BATCH_KINDS: tuple[BatchKind, ...] = ("prefill", "decode", "mixed")

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One tokenized prompt, with its own `max_new_tokens`.

    `generated`: its first new tokens where it goes on after a fault; `max_new_tokens` counts them.
    `draw_id`: what random draws are keyed by in the place of `custom_id`, unless it is empty.
    `top_logprobs`: how many of the most probable tokens are told beside each new one, with all
    their log-probabilities; None for none at all. No choice depends on it. `expected_tokens`: the
    new tokens that a predictor expects of it, `generated` among them; None: as many as it may have.
    """

    custom_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    generated: tuple[int, ...] = ()
    draw_id: str = ""
    top_logprobs: int | None = None
    expected_tokens: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A part of the requests of the run of this number; after the `last` part no more come."""

    run: int
    requests: tuple[Request, ...]
    last: bool


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
    """`tokens` tokens whose keys and values go from token slot `begin` on to `to` on.

    The two may overlap.
    """

    begin: int
    to: int
    tokens: int


@dataclass(frozen=True)
class Park:
    """`tokens` tokens of a request whose keys and values go from token slot `begin` on to host
    memory, to lie there under `key`; or the way back.
    """

    key: int
    begin: int
    tokens: int


EVERY_KEY = -1
"""Stands for the keys of all that lies in host memory."""


@dataclass(frozen=True)
class Admission:
    """A request that takes a slot, as stages must know it.

    `room` is its range of the KV cache, which is cleared for it. `generated`, `draw_id` and
    `top_logprobs` as in `Request`.
    `prompt_tokens`: the distinct tokens of its prompt where a penalty counts them, else empty. They
    are sent once; the stage that samples keeps them, and the tokens that it has chosen.
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

    @classmethod
    def of(cls, slot: int, request: Request, room: TokenRange = TokenRange(0, 0)) -> Admission:
        """The admission of `request` to `slot`, with this room in the KV cache."""
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
    ranges (None: not told), which may have grown.

    Requests that are preempted have their tokens parked in host memory, or not: `drops` are keys of
    what is forgotten there first of all, `parks` are made then, before the moves, and `restores`
    after rooms are cleared.
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

    @cached_property
    def decode_rows(self) -> npt.NDArray[np.bool_]:
        """Whose one new token attends to earlier ones, `[requests]`; to a stage, a single last
        token of a prompt in parts is such a step too.
        """
        rows: npt.NDArray[np.bool_] = (self.counts == 1) & (self.starts > 0)
        return rows

    @cached_property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token to what its slot holds."""
        return bool(self.decode_rows.all())

    @cached_property
    def kind(self) -> BatchKind:
        """The work in it."""
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
        """Parts of at most `tokens_at_once` new tokens, but at least one request each.

        They have the requests in order, no admissions and no moves.
        """
        parts: list[MicroBatch] = []
        first = tokens = 0
        for row, count in enumerate(self.counts.tolist()):
            if tokens and tokens + count > tokens_at_once:
                parts.append(self.of_rows(slice(first, row)))
                first, tokens = row, 0
            tokens += count
        return [*parts, self.of_rows(slice(first, None))]

    def of_rows(self, rows: slice | TokenIds) -> MicroBatch:
        """Some of its requests: their tokens and where these lie."""
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


@dataclass(frozen=True)
class Sampled:
    """The last stage's answer: `token_ids` `[sampled]`, and why a request ended, if it did.

    Both are in the order of the micro-batch's `sampled_rows`, and empty where nothing was sampled.
    The reason "error" means that its logits were not finite; the token has no meaning then.
    `logprobs` are those of the requests that ask for them, None where none does.
    """

    token_ids: TokenIds
    finish_reasons: tuple[FinishReason | None, ...]
    logprobs: LogprobRows | None = None


NOTHING_SAMPLED = Sampled(np.zeros(0, dtype=np.int64), ())


@dataclass(frozen=True)
class Finished:
    """A request that has ended, with its new tokens (EOS included).

    `error` says what went wrong, unless logits were not finite.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True)
class Progress:
    """The new tokens of a request of a live run since the last one told of it; where it has ended
    with them, why, and `error` as in `Finished`. `logprobs` are those of the tokens where the
    request asks for them, else empty.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class PhaseWork:
    """The work of a stage in micro-batches of one kind; `sampled` of their `requests` gave a token.

    `full_micro_batches` have at least nine tenths of the planned size; `full_sizes` is the sum of
    their shares of it, so that `full_s / full_sizes` is the seconds of a planned micro-batch. No
    size is planned for mixed ones.
    """

    micro_batches: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    full_micro_batches: int = 0
    full_s: float = 0.0
    full_sizes: float = 0.0
    sampled: int = 0

    def since(self, earlier: PhaseWork) -> PhaseWork:
        """The work that was done after `earlier`."""
        return PhaseWork(**_differences(self, earlier))


@dataclass(frozen=True)
class Supervision:
    """What was done about requests that outgrew their reservation, which is doubled then.

    `grown`: how often it grew where it was, or at the cost of moves. Else the request was preempted
    and came back to the queue: `parked` times with its keys and values in host memory, which are
    `parked_tokens` tokens in all and `parked_now` at present, and `recomputed` times without; then
    `recomputed_tokens` tokens are computed again.
    """

    grown: int = 0
    parked: int = 0
    parked_tokens: int = 0
    parked_now: int = 0
    recomputed: int = 0
    recomputed_tokens: int = 0

    def after(self, earlier: Supervision) -> Supervision:
        """Both together; what is parked at present is that of this one."""
        counts = {f.name: getattr(self, f.name) + getattr(earlier, f.name) for f in fields(self)}
        return Supervision(**counts | {"parked_now": self.parked_now})

    def since(self, earlier: Supervision) -> Supervision:
        """What was done after `earlier`; what is parked at present is that of this one."""
        return Supervision(**_differences(self, earlier) | {"parked_now": self.parked_now})

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return self.parked + self.recomputed

    @property
    def doublings(self) -> int:
        """How often a reservation was doubled."""
        return self.grown + self.preemptions


NO_SUPERVISION = Supervision()


@dataclass(frozen=True)
class QueueDepth:
    """The queue of the first stage's scheduler: requests that wait and requests in KV slots, and
    micro-batches on their way through the pipeline. `supervision` is of all runs so far.
    """

    waiting: int
    in_slots: int
    slots: int
    micro_batches: int
    supervision: Supervision = NO_SUPERVISION

    def since(self, earlier: QueueDepth | None) -> QueueDepth:
        """The queue as it is, with the supervision after `earlier`."""
        if earlier is None:
            return self
        return replace(self, supervision=self.supervision.since(earlier.supervision))


@dataclass(frozen=True)
class LayersLoaded:
    """How many of its `layers` a stage has `done`: read for their importance, or loaded with
    their weights. None before it has begun either.
    """

    what: Literal["importance", "weights"] | None = None
    done: int = 0
    layers: int = 0


@dataclass(frozen=True)
class StageStats:
    """The figures of a stage so far.

    `busy_s` includes the micro-batch that is being computed, up to now; the other figures count
    those that are done: `prefill`, `decode` and `mixed` the micro-batches of each kind, `*_tokens`
    all tokens of prompts and of decode steps, also those of mixed micro-batches. Only the first
    stage has a `queue`.
    """

    busy_s: float
    prefill_tokens: int
    decode_tokens: int
    micro_batches: int
    weight_bytes: int
    kv_cache_bytes: int
    prefill: PhaseWork = PhaseWork()
    decode: PhaseWork = PhaseWork()
    queue: QueueDepth | None = None
    mixed: PhaseWork = PhaseWork()

    @property
    def sampled_tokens(self) -> int:
        """Tokens that its micro-batches gave."""
        return self.prefill.sampled + self.decode.sampled + self.mixed.sampled

    def since(self, earlier: StageStats) -> StageStats:
        """The work that was done after `earlier`, all of it where the stage began anew since."""
        if self.micro_batches < earlier.micro_batches:
            return self
        queue = None if self.queue is None else self.queue.since(earlier.queue)
        return replace(
            self,
            busy_s=max(0.0, self.busy_s - earlier.busy_s),
            prefill_tokens=self.prefill_tokens - earlier.prefill_tokens,
            decode_tokens=self.decode_tokens - earlier.decode_tokens,
            micro_batches=self.micro_batches - earlier.micro_batches,
            prefill=self.prefill.since(earlier.prefill),
            decode=self.decode.since(earlier.decode),
            mixed=self.mixed.since(earlier.mixed),
            queue=queue,
        )


def _differences(now: PhaseWork | Supervision, earlier: PhaseWork | Supervision) -> dict[str, Any]:
    """Each field of `now` less that of `earlier`."""
    return {f.name: getattr(now, f.name) - getattr(earlier, f.name) for f in fields(now)}
