"""The policy `orca`: iteration-level first-come-first-served scheduling (ORCA, Algorithm 1).

Symbols of the paper and their names here: n_workers is `most_under_way`, max_bs is
`max_batch_size`, n_slots is `_n_slots`, n_rsrv is `TokenRanges.reserved`, max_tokens of a request
is `_most_tokens`. Of the request pool, requests in state INITIATION are `_waiting`, those in state
INCREMENT are `_ready`, and those in state RUNNING have a slot and are not ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from actors.messages import (
    Admission,
    Finished,
    MicroBatch,
    Move,
    Request,
    Sampled,
    TokenIds,
)
from actors.schedule.scheduler import QueueSizes
from actors.schedule.token_ranges import TokenRanges
from planner.plan.spec import PlanSpec
from planner.schedule.orca import OrcaSizes, policy_sizes
from planner.scheduling import PolicyOptions
from quant.common.errors import SpecError


class OrcaScheduler:
    """A scheduler that selects, for every iteration anew, the requests that came first.

    A micro-batch has up to `max_batch_size` requests in the order of their arrival, some with their
    whole prompt (initiation phase) and some with one token (increment phase). When a request is
    selected first, it reserves token slots for its prompt and all of its new tokens; where there
    are too few, selection stops there, so that no later request overtakes it. A request under way
    is not selected again before its micro-batch is back. The order depends neither on time, where
    all requests are there, nor on the chunks in which they are added.

    Beyond the paper, prompts may be given in parts, one an iteration, and selection stops at the
    first request that would bring a micro-batch of several beyond `max_batch_tokens`.

    Slots number the requests that have a reservation: `stages * max_batch_size` are enough. A
    request reserves only when every ready one, all of which came earlier, was put into the same
    micro-batch before it and there was still room in that. So afterwards all that have a
    reservation are in this micro-batch or in one of the `stages - 1` at most that are under way
    then, each of at most `max_batch_size` requests; the number grows at no other time.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        _check(sizes, stages)
        self._sizes = sizes
        self._stages = stages
        slots = stages * sizes.max_batch_size
        self._waiting: deque[Request] = deque()
        self._closed = False
        self._arrivals = 0  # of requests that were admitted
        self._free = deque(range(slots))
        self._ranges = TokenRanges(sizes.kv_tokens, slots)
        self._n_slots = sizes.n_slots or sizes.kv_tokens
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()  # slots of requests under way that leave when back
        self._texts: dict[int, TokenIds] = {}  # what is prefilled, until all of it is under way
        self._ready = np.zeros(slots, dtype=np.bool_)
        self._arrival = np.zeros(slots, dtype=np.int64)
        self._prefill = np.zeros(slots, dtype=np.int64)  # length of the slot's text
        self._written = np.zeros(slots, dtype=np.int64)  # tokens submitted so far
        self._given = np.zeros(slots, dtype=np.int64)  # new tokens so far
        self._tokens = np.zeros((slots, 1), dtype=np.int64)

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come.

        Raises SpecError for a request with more tokens than all may reserve together.
        """
        for request in requests:
            if _most_tokens(request) > self._n_slots:
                raise SpecError(
                    f"request {request.custom_id!r:.80} needs {len(request.prompt_ids)} prompt and "
                    f"{request.max_new_tokens} new tokens, but there are {self._n_slots} token "
                    "slots in all; shorten it, or make a plan for longer requests or more of them"
                )
        self._waiting.extend(requests)
        self._closed = last
        longest = max((r.max_new_tokens for r in requests), default=0)
        missing = longest - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))

    @property
    def wants_requests(self) -> bool:
        """Whether a selection could come to the end of the queue, and more may follow there."""
        candidates = len(self._waiting) + int(np.count_nonzero(self._ready))
        return not self._closed and candidates < self._sizes.max_batch_size

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: one a stage, so that each has one."""
        return self._stages

    @property
    def waiting(self) -> int:
        """Number of requests without a reservation."""
        return len(self._waiting)

    @property
    def in_slots(self) -> int:
        """Number of requests that have one."""
        return len(self._requests)

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request and the new tokens; none of cancelled
        requests.
        """
        return {
            slot: (request.custom_id, self._tokens[slot, : self._given[slot]].copy())
            for slot, request in self._requests.items()
            if slot not in self._cancelled
        }

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Select requests (lines 17 to 28); None where none can be selected now."""
        ready = np.flatnonzero(self._ready)
        ready = ready[self._arrival[ready].argsort()][: self._sizes.max_batch_size]
        tokens = self._counts(ready).cumsum()
        most = self._sizes.max_batch_tokens
        selected = max(1, int(np.searchsorted(tokens, most, "right"))) if most else len(ready)
        new, moves = self._admit(len(ready), int(tokens[-1]) if len(ready) else 0)
        slots = np.append(ready[:selected], np.array(new, dtype=np.int64))
        return self._batch(slots, new, moves) if len(slots) else None

    def _admit(self, selected: int, tokens: int) -> tuple[list[int], tuple[Move, ...]]:
        """Reserve token slots for the first requests of the queue that join a micro-batch of so
        many requests and tokens (lines 23 to 26); returns their slots and the moves for them.

        Where the ready ones alone go beyond the bound of tokens, every newcomer does.
        """
        slots: list[int] = []
        moves: tuple[Move, ...] = ()
        most = self._sizes.max_batch_tokens
        while self._waiting and selected + len(slots) < self._sizes.max_batch_size:
            request = self._waiting[0]
            count = self._first_part(len(request.prompt_ids) + len(request.generated))
            if self._ranges.reserved + _most_tokens(request) > self._n_slots:
                break
            if most and tokens and tokens + count > most:
                break
            self._waiting.popleft()
            slot = self._take_slot(request)
            moves += self._ranges.reserve(slot, _most_tokens(request), self._written)
            slots.append(slot)
            tokens += count
        return slots, moves

    def _take_slot(self, request: Request) -> int:
        slot = self._free.popleft()
        text = np.array(request.prompt_ids + request.generated, dtype=np.int64)
        self._requests[slot] = request
        self._texts[slot] = text
        self._arrival[slot] = self._arrivals
        self._arrivals += 1
        self._prefill[slot], self._written[slot] = len(text), 0
        self._given[slot] = len(request.generated)
        self._tokens[slot, : len(request.generated)] = request.generated
        return slot

    def _first_part(self, tokens: int) -> int:
        return min(tokens, self._sizes.prefill_chunk_tokens or tokens)

    def _counts(self, slots: TokenIds) -> TokenIds:
        """The tokens of each slot's next iteration: one, or a part of what is prefilled."""
        counts: TokenIds = np.maximum(self._prefill[slots] - self._written[slots], 1)
        most = self._sizes.prefill_chunk_tokens
        return np.minimum(counts, most) if most else counts

    def _batch(
        self, slots: TokenIds, new: Sequence[int], moves: tuple[Move, ...]
    ) -> tuple[MicroBatch, TokenIds]:
        """The micro-batch of `slots`, of which those in `new` begin with it.

        Their ranges are asked for only now: the reservations after them may have moved them.
        """
        starts, counts = self._written[slots], self._counts(slots)
        token_ids = self._token_ids(slots, starts, counts)
        admitted = tuple(
            Admission.of(slot, self._requests[slot], self._ranges.range_of(slot)) for slot in new
        )
        self._ready[slots] = False
        self._written[slots] += counts
        samples = self._written[slots] >= self._prefill[slots]
        batch = MicroBatch(
            slots,
            starts,
            counts,
            self._ranges.begins[slots],
            admitted,
            moves=moves,
            samples=None if samples.all() else samples,
        )
        return batch, token_ids

    def _token_ids(self, slots: TokenIds, starts: TokenIds, counts: TokenIds) -> TokenIds:
        """The new tokens `[sum(counts)]`: of the text that is prefilled, or the last sampled."""
        ends = counts.cumsum()
        token_ids = np.empty(int(ends[-1]), dtype=np.int64)
        decodes = starts >= self._prefill[slots]
        last = self._given[slots[decodes]] - 1
        token_ids[ends[decodes] - 1] = self._tokens[slots[decodes], last]
        for row in np.flatnonzero(~decodes).tolist():
            slot, start, count = int(slots[row]), int(starts[row]), int(counts[row])
            text = self._texts[slot]
            token_ids[ends[row] - count : ends[row]] = text[start : start + count]
            if start + count == len(text):
                del self._texts[slot]
        return token_ids

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch` (lines 11 to 14); returns the requests that ended with it.

        A row that was not sampled has no token yet.
        """
        slots = batch.slots[batch.sampled_rows]
        self._tokens[slots, self._given[slots]] = sampled.token_ids
        self._given[slots] += 1
        self._ready[batch.slots] = True
        for slot in batch.slots.tolist():
            if slot in self._cancelled:
                self._leave(slot)
        finished: list[Finished] = []
        for slot, reason in zip(slots.tolist(), sampled.finish_reasons, strict=True):
            if reason is not None and slot in self._requests:
                token_ids = tuple(self._tokens[slot, : self._given[slot]].tolist())
                finished.append(Finished(self._leave(slot).custom_id, token_ids, reason))
        return tuple(finished)

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue or its slot now, or when its micro-batch is back.

        Nothing is told of it any more.
        """
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        for slot in [s for s, r in self._requests.items() if r.custom_id == custom_id]:
            if self._ready[slot]:
                self._leave(slot)
            else:
                self._cancelled.add(slot)

    def _leave(self, slot: int) -> Request:
        """Free `slot` and its range; returns its request."""
        self._cancelled.discard(slot)
        self._texts.pop(slot, None)
        self._ready[slot] = False
        self._ranges.release(slot)
        self._free.append(slot)
        return self._requests.pop(slot)


def orca_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan`. The tokens of a micro-batch are at most those for whose
    activations the plan has memory: with another policy it has none for steps beside prompts.
    """
    sizes, workload = plan.micro_batches, plan.workload
    most = options.max_batch_size or sizes.decode
    planned = policy_sizes(plan.policy, workload, sizes)
    tokens = sizes.prefill * workload.prompt_length
    if isinstance(planned, OrcaSizes):
        tokens = planned.max_batch_tokens
    return QueueSizes(
        slots=len(plan.stages) * most,
        prefill_micro_batch=sizes.prefill,
        decode_micro_batch=sizes.decode,
        slot_tokens=workload.total_length,
        policy="orca",
        kv_tokens=workload.kv_tokens,
        n_slots=workload.reservable_tokens,
        max_batch_size=most,
        max_batch_tokens=max(tokens, most),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )


def _most_tokens(request: Request) -> int:
    """The most tokens that it has when it is done (the paper's max_tokens)."""
    return len(request.prompt_ids) + request.max_new_tokens


def _check(sizes: QueueSizes, stages: int) -> None:
    """Raise SpecError where `sizes` cannot be those of `stages` stages."""
    for name, least in (
        ("kv_tokens", 1),
        ("max_batch_size", 1),
        ("max_batch_tokens", 0),
        ("prefill_chunk_tokens", 0),
    ):
        value = getattr(sizes, name)
        if value < least:
            raise SpecError(f"{name} is {value}; the policy orca needs at least {least}")
    if not 0 <= sizes.n_slots <= sizes.kv_tokens:
        raise SpecError(
            f"n_slots is {sizes.n_slots}; requests may reserve up to {sizes.kv_tokens} token slots "
            "of the KV cache (kv_tokens), and 0 stands for all of them"
        )
    needed = stages * sizes.max_batch_size
    if sizes.slots < needed:
        raise SpecError(
            f"{stages} micro-batches of {sizes.max_batch_size} requests need {needed} slots, not "
            f"{sizes.slots}; lower max_batch_size"
        )
