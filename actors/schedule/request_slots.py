"""The requests in slots and their tokens; those with reserved token slots, and micro-batches of
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from actors.messages import Admission, Finished, MicroBatch, Move, Request, Sampled, TokenIds
from actors.schedule.token_ranges import TokenRanges
from quant.common.errors import SpecError


class SlotRequests:
    """The requests in `slots` slots, with the new tokens `given` to each so far.

    Those that are `cancelled` leave their slots when their micro-batch is back.
    """

    def __init__(self, slots: int) -> None:
        self.requests: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.given = np.zeros(slots, dtype=np.int64)
        self._tokens = np.zeros((slots, 1), dtype=np.int64)

    def expect(self, requests: Sequence[Request]) -> None:
        """Make ready for the tokens of requests."""
        most = max((max(r.max_new_tokens, len(r.generated) + 1) for r in requests), default=0)
        missing = most - self._tokens.shape[1]
        if missing > 0:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, missing)))

    def put(self, slot: int, request: Request) -> TokenIds:
        """Give `slot` to a request; returns the tokens to prefill."""
        self.requests[slot] = request
        self.given[slot] = len(request.generated)
        self._tokens[slot, : len(request.generated)] = request.generated
        return np.array(request.prompt_ids + request.generated, dtype=np.int64)

    def tokens(self) -> dict[int, tuple[str, TokenIds]]:
        return {
            slot: (request.custom_id, self._tokens[slot, : self.given[slot]].copy())
            for slot, request in self.requests.items()
            if slot not in self.cancelled
        }

    def new_tokens(self, slot: int) -> tuple[int, ...]:
        return tuple(self._tokens[slot, : self.given[slot]].tolist())

    def last_tokens(self, slots: TokenIds) -> TokenIds:
        last: TokenIds = self._tokens[slots, self.given[slots] - 1]
        return last

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it, which leave, as
        those do that were cancelled.

        A row that was not sampled has no token yet.
        """
        slots = batch.slots[batch.sampled_rows]
        self._tokens[slots, self.given[slots]] = sampled.token_ids
        self.given[slots] += 1
        for slot in batch.slots.tolist():
            if slot in self.cancelled:
                self.leave(slot)
        finished: list[Finished] = []
        for slot, reason in zip(slots.tolist(), sampled.finish_reasons, strict=True):
            if reason is not None and slot in self.requests:
                token_ids = self.new_tokens(slot)
                finished.append(Finished(self.leave(slot).custom_id, token_ids, reason))
        return tuple(finished)

    def cancel(self, custom_id: str) -> None:
        self.cancelled |= {s for s, r in self.requests.items() if r.custom_id == custom_id}

    def leave(self, slot: int) -> Request:
        """Free `slot`; returns its request."""
        self.cancelled.discard(slot)
        return self.requests.pop(slot)


class RequestSlots(SlotRequests):
    """Requests in `slots` slots, each with a range of the `kv_tokens` token slots, of which
    `n_slots` may be reserved.

    Prompts longer than `chunk` tokens are given in parts of that many (0: whole). A slot is `ready`
    [slots] where its request is in no micro-batch under way. `written` [slots] are the tokens that
    were submitted so far.
    """

    def __init__(self, slots: int, kv_tokens: int, n_slots: int, chunk: int = 0) -> None:
        super().__init__(slots)
        self.n_slots = n_slots
        self.chunk = chunk
        self.ranges = TokenRanges(kv_tokens, slots)
        self.ready = np.zeros(slots, dtype=np.bool_)
        self.written = np.zeros(slots, dtype=np.int64)
        self._free = deque(range(slots))
        self._texts: dict[int, TokenIds] = {}  # what is prefilled, until all of it is under way
        self.arrivals = np.zeros(slots, dtype=np.int64)
        self._prefill = np.zeros(slots, dtype=np.int64)  # length of the slot's text

    def expect(self, requests: Sequence[Request]) -> None:
        """Make ready for requests. Raises SpecError for one that can never have its token slots."""
        for request in requests:
            if most_tokens(request) > self.n_slots:
                raise SpecError(
                    f"request {request.custom_id!r:.80} needs {len(request.prompt_ids)} prompt and "
                    f"{request.max_new_tokens} new tokens, but there are {self.n_slots} token "
                    "slots in all; shorten it, or make a plan for longer requests or more of them"
                )
        super().expect(requests)

    @property
    def available(self) -> int:
        """Token slots that may still be reserved."""
        return self.n_slots - self.ranges.reserved

    @property
    def free(self) -> int:
        return len(self._free)

    def ready_slots(self) -> TokenIds:
        """The slots that are ready, those of requests that came first before others."""
        ready: TokenIds = np.flatnonzero(self.ready)
        return ready[self.arrivals[ready].argsort()]

    def take(self, request: Request, arrival: int, size: int) -> tuple[int, tuple[Move, ...]]:
        """Give a request a slot with `size` token slots; returns slot and moves for room."""
        slot = self._free.popleft()
        self._texts[slot] = text = self.put(slot, request)
        self.ready[slot] = True
        self.arrivals[slot] = arrival
        self._prefill[slot], self.written[slot] = len(text), 0
        return slot, self.ranges.reserve(slot, size, self.written)

    def counts(self, slots: TokenIds) -> TokenIds:
        """The tokens of each slot's next iteration: one, or a part of what is prefilled."""
        counts: TokenIds = np.maximum(self._prefill[slots] - self.written[slots], 1)
        return np.minimum(counts, self.chunk) if self.chunk else counts

    def batch(
        self, slots: TokenIds, new: Sequence[int], moves: tuple[Move, ...]
    ) -> tuple[MicroBatch, TokenIds]:
        """The next iteration of `slots`, of which those in `new` begin with it; and its token ids.

        Heads that are restored count as written from now on: before, reservations would move them.
        Their ranges are asked for only now: the reservations after them may have moved them.
        """
        for slot in new:
            shared = self.requests[slot].shared_tokens
            self.written[slot] = max(shared, int(self.written[slot]))
        starts, counts = self.written[slots], self.counts(slots)
        token_ids = self._token_ids(slots, starts, counts)
        admitted = tuple(
            Admission.of(slot, self.requests[slot], self.ranges.range_of(slot)) for slot in new
        )
        self.ready[slots] = False
        self.written[slots] += counts
        samples = self.written[slots] >= self._prefill[slots]
        batch = MicroBatch(
            slots,
            starts,
            counts,
            self.ranges.begins[slots],
            admitted,
            moves=moves,
            samples=None if samples.all() else samples,
            sizes=self.ranges.sizes[slots],
        )
        return batch, token_ids

    def _token_ids(self, slots: TokenIds, starts: TokenIds, counts: TokenIds) -> TokenIds:
        """The new tokens `[sum(counts)]`: of the text that is prefilled, or the last sampled."""
        ends = counts.cumsum()
        token_ids = np.empty(int(ends[-1]), dtype=np.int64)
        decodes = starts >= self._prefill[slots]
        token_ids[ends[decodes] - 1] = self.last_tokens(slots[decodes])
        for row in np.flatnonzero(~decodes).tolist():
            slot, start, count = int(slots[row]), int(starts[row]), int(counts[row])
            text = self._texts[slot]
            token_ids[ends[row] - count : ends[row]] = text[start : start + count]
            if start + count == len(text):
                del self._texts[slot]
        return token_ids

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        self.ready[batch.slots] = True
        return super().complete(batch, sampled)

    def cancel(self, custom_id: str) -> None:
        """Have a request leave its slot now, or when its micro-batch is back."""
        super().cancel(custom_id)
        for slot in [slot for slot in self.cancelled if self.ready[slot]]:
            self.leave(slot)

    def leave(self, slot: int) -> Request:
        """Free `slot` and its range; returns its request."""
        self._texts.pop(slot, None)
        self.ready[slot] = False
        self.ranges.release(slot)
        self._free.append(slot)
        return super().leave(slot)


def computed_parts(
    requests: Sequence[Request], texts: Sequence[TokenIds]
) -> tuple[TokenIds, TokenIds, TokenIds]:
    """The starts and counts `[requests]` of what is computed of `texts`, and its token ids."""
    starts = np.array([request.shared_tokens for request in requests], dtype=np.int64)
    parts = [text[start:] for text, start in zip(texts, starts.tolist(), strict=True)]
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    return starts, counts, np.concatenate(parts)


def text_tokens(request: Request) -> int:
    """The tokens that are computed before its next one."""
    return len(request.prompt_ids) + len(request.generated) - request.shared_tokens


def most_tokens(request: Request) -> int:
    """The most tokens that it has when it is done (ORCA's max_tokens)."""
    return len(request.prompt_ids) + request.max_new_tokens
