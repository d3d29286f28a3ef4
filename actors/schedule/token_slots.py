"""What the policies have in common whose requests reserve token slots and are selected for every
iteration anew: the requests in slots, their micro-batches and their tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Move, Request, Sampled, TokenIds
from actors.schedule.scheduler import QueueSizes
from actors.schedule.token_ranges import TokenRanges
from actors.stage_figures import NO_SUPERVISION, Supervision
from planner.plan.spec import PlanSpec
from planner.schedule.orca import OrcaSizes, policy_sizes
from planner.scheduling import PolicyName, PolicyOptions
from quant.common.errors import SpecError


class TokenSlotScheduler(ABC):
    """A scheduler whose micro-batches have up to `max_batch_size` requests in the order of their
    arrival, some with their prompt, whole or in parts, and some with one token.

    A policy says which requests of its queue `_admit` gives a reservation, and of what size. A
    request under way is not selected again before its micro-batch is back.

    Slots number the requests that have a reservation: `stages * max_batch_size` are enough. A
    request reserves only when every ready one was put into the same micro-batch before it and there
    was still room in that. So afterwards all that have a reservation are in this micro-batch or in
    one of the `stages - 1` at most that are under way then, each of at most `max_batch_size`
    requests; the number grows at no other time.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        _check(sizes, stages)
        self._sizes = sizes
        self._stages = stages
        self._chunk = sizes.prefill_chunk_tokens
        slots = stages * sizes.max_batch_size
        self._closed = False
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

    @abstractmethod
    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Put `requests` at the end of the queue."""

    @abstractmethod
    def _give_up_waiting(self, custom_id: str) -> None:
        """Take a request out of the queue, where it is in there."""

    @abstractmethod
    def _admit(self, selected: int, tokens: int) -> tuple[list[int], tuple[Move, ...]]:
        """Reserve token slots for requests of the queue that join a micro-batch of so many requests
        and tokens; returns their slots and the moves for them.

        Where the ready ones alone go beyond the bound of tokens, every newcomer does.
        """

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests without a reservation."""

    def add(self, requests: Sequence[Request], last: bool) -> None:
        """Put `requests` at the end of the queue; after the `last` ones no more come.

        Raises SpecError for a request with more tokens than all may reserve together.
        """
        for request in requests:
            if most_tokens(request) > self._n_slots:
                raise SpecError(
                    f"request {request.custom_id!r:.80} needs {len(request.prompt_ids)} prompt and "
                    f"{request.max_new_tokens} new tokens, but there are {self._n_slots} token "
                    "slots in all; shorten it, or make a plan for longer requests or more of them"
                )
        self._enqueue(requests)
        self._closed = last
        longest = max((r.max_new_tokens for r in requests), default=0)
        missing = longest - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))

    @property
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way: one a stage, so that each has one."""
        return self._stages

    @property
    def in_slots(self) -> int:
        """Number of requests that have a reservation."""
        return len(self._requests)

    @property
    def supervision(self) -> Supervision:
        """What was done about reservations that were too small."""
        return NO_SUPERVISION

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
        """Select requests: the ready ones that came first, and newcomers; None where none can be
        selected now.
        """
        return self._selected(())

    def _selected(self, moves: tuple[Move, ...]) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch, with `moves` before those for its newcomers."""
        ready = self._ready_slots()[: self._sizes.max_batch_size]
        tokens = self._counts(ready).cumsum()
        most = self._sizes.max_batch_tokens
        selected = max(1, int(np.searchsorted(tokens, most, "right"))) if most else len(ready)
        new, more = self._admit(len(ready), int(tokens[-1]) if len(ready) else 0)
        slots = np.append(ready[:selected], np.array(new, dtype=np.int64))
        return self._batch(slots, new, moves + more) if len(slots) else None

    def _ready_slots(self) -> TokenIds:
        """The slots that may be selected, those of requests that came first before others."""
        ready: TokenIds = np.flatnonzero(self._ready)
        return ready[self._arrival[ready].argsort()]

    def _take_slot(self, request: Request, arrival: int) -> int:
        slot = self._free.popleft()
        text = np.array(request.prompt_ids + request.generated, dtype=np.int64)
        self._requests[slot] = request
        self._texts[slot] = text
        self._arrival[slot] = arrival
        self._prefill[slot], self._written[slot] = len(text), 0
        self._given[slot] = len(request.generated)
        self._tokens[slot, : len(request.generated)] = request.generated
        return slot

    def _first_part(self, tokens: int) -> int:
        return min(tokens, self._chunk or tokens)

    def _counts(self, slots: TokenIds) -> TokenIds:
        """The tokens of each slot's next iteration: one, or a part of what is prefilled."""
        counts: TokenIds = np.maximum(self._prefill[slots] - self._written[slots], 1)
        return np.minimum(counts, self._chunk) if self._chunk else counts

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
            sizes=self._ranges.sizes[slots],
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
        """Take in the tokens of `batch`; returns the requests that ended with it.

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
                token_ids = self._new_tokens(slot)
                finished.append(Finished(self._leave(slot).custom_id, token_ids, reason))
        return tuple(finished)

    def _new_tokens(self, slot: int) -> tuple[int, ...]:
        return tuple(self._tokens[slot, : self._given[slot]].tolist())

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue or its slot now, or when its micro-batch is back.

        Nothing is told of it any more.
        """
        self._give_up_waiting(custom_id)
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


def most_tokens(request: Request) -> int:
    """The most tokens that it has when it is done (ORCA's max_tokens)."""
    return len(request.prompt_ids) + request.max_new_tokens


def token_slot_sizes(plan: PlanSpec, options: PolicyOptions, policy: PolicyName) -> QueueSizes:
    """The sizes of `policy` for the KV cache of `plan`. The tokens of a micro-batch are at most
    those for whose activations the plan has memory: with `static` it has none for steps beside
    prompts.
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
        policy=policy,
        kv_tokens=workload.kv_tokens,
        n_slots=workload.reservable_tokens,
        max_batch_size=most,
        max_batch_tokens=max(tokens, most),
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )


def _check(sizes: QueueSizes, stages: int) -> None:
    """Raise SpecError where `sizes` cannot be those of `stages` stages."""
    for name, least in (
        ("kv_tokens", 1),
        ("max_batch_size", 1),
        ("max_batch_tokens", 0),
        ("prefill_chunk_tokens", 0),
        ("park_tokens_from", 0),
        ("parked_tokens", 0),
    ):
        value = getattr(sizes, name)
        if value < least:
            raise SpecError(f"{name} is {value}; the policy {sizes.policy} needs at least {least}")
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
