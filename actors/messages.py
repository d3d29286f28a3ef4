"""What the scheduler, the stages and the driver tell each other: requests, micro-batches, sampled
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from actors.sampling import Sampling as Sampling

Transport = Literal["auto", "ray", "gloo"]
"""How tensors go between stages; auto: gloo where it connects, else Ray."""

TRANSPORTS: tuple[Transport, ...] = ("auto", "ray", "gloo")

FinishReason = Literal["stop", "length", "error"]
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One tokenized prompt; `max_new_tokens` is already settled.

    `generated`: its first new tokens, computed before and counted by `max_new_tokens`, where it
    goes on after a fault.
    """

    custom_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A part of the requests of a run, which is numbered; after the `last` one no more come."""

    run: int
    requests: tuple[Request, ...]
    last: bool


@dataclass(frozen=True)
class Admission:
    """What the last stage must know of a request that takes a slot; `generated` as in `Request`.

    `prompt_tokens`: the distinct tokens of its prompt where a penalty counts them, else empty. They
    are told once; the stage that samples keeps them and what it has given.
    """

    slot: int
    custom_id: str
    max_new_tokens: int
    sampling: Sampling
    generated: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, slot: int, request: Request) -> Admission:
        """That of `request`."""
        sampling = request.sampling
        counted = sampling.repetition_penalty != 1
        return cls(
            slot,
            request.custom_id,
            request.max_new_tokens,
            sampling,
            request.generated,
            tuple(sorted(set(request.prompt_ids))) if counted else (),
        )


@dataclass(frozen=True)
class MicroBatch:
    """One pass through the pipeline: for each request its KV slot, its tokens' start and count.

    `slots`, `starts`, `counts`: `[requests]`; the hidden states that travel with it are the
    requests' new tokens one after the other, `[sum(counts), hidden_size]`. `admitted` lists the
    requests that begin with this micro-batch (prefill).
    """

    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    admitted: tuple[Admission, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every request adds exactly one token to what its slot holds."""
        return bool((self.counts == 1).all() and (self.starts > 0).all())

    @property
    def positions(self) -> TokenIds:
        """Position of every new token within its request, `[sum(counts)]`."""
        first = np.repeat(
            self.starts - np.concatenate([[0], np.cumsum(self.counts)[:-1]]), self.counts
        )
        positions: TokenIds = np.arange(int(self.counts.sum()), dtype=np.int64) + first
        return positions

    def passes(self, tokens_at_once: int) -> list[MicroBatch]:
        """Its requests in order, without admissions, in parts of at most so many new tokens; a part
        has at least one request.
        """
        parts: list[MicroBatch] = []
        first = tokens = 0
        for row, count in enumerate(self.counts.tolist()):
            if tokens and tokens + count > tokens_at_once:
                parts.append(self._rows(slice(first, row)))
                first, tokens = row, 0
            tokens += count
        return [*parts, self._rows(slice(first, None))]

    def _rows(self, rows: slice) -> MicroBatch:
        return MicroBatch(self.slots[rows], self.starts[rows], self.counts[rows])

    @property
    def last_token_rows(self) -> TokenIds:
        """Row of each request's last new token in the flattened batch, `[requests]`."""
        return np.cumsum(self.counts) - 1


@dataclass(frozen=True)
class Sampled:
    """The last stage's answer: `token_ids` `[requests]`, and why a request ended, if it did.

    The reason "error" means that its logits were not finite; the token has no meaning then.
    """

    token_ids: TokenIds
    finish_reasons: tuple[FinishReason | None, ...]


@dataclass(frozen=True)
class Finished:
    """A request that has all its tokens (EOS included, prompt not); `error` says what went wrong
    where that is not the logits.
    """

    custom_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True)
class PhaseWork:
    """What a stage has computed of one phase; the last three count full micro-batches only.

    Those have at least nine tenths of the planned size; `full_sizes` is the sum of their shares of
    it, so that `full_s / full_sizes` is seconds of a planned micro-batch.
    """

    micro_batches: int = 0
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    full_micro_batches: int = 0
    full_s: float = 0.0
    full_sizes: float = 0.0


@dataclass(frozen=True)
class QueueDepth:
    """What the first stage's scheduler holds: requests that wait and those in KV slots, and
    micro-batches on their way through the pipeline.
    """

    waiting: int
    in_slots: int
    slots: int
    micro_batches: int


@dataclass(frozen=True)
class StageStats:
    """What a stage has done so far.

    `busy_s` counts the micro-batch that is being computed, up to now; `prefill` and `decode` count
    those that are done. `queue` is the first stage's.
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
