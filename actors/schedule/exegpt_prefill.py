"""The policy `exegpt` on stages that only prefill, as others decode (WAA, ExeGPT section 4.1).

B_E of the paper is `prefill_requests` of the schedule; the driver gives turns of as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.messages import (
    Admission,
    Finished,
    MicroBatch,
    Park,
    Request,
    Sampled,
    TokenIds,
    TokenRange,
)
from actors.schedule.scheduler import QueueSizes
from actors.stage_figures import NO_SUPERVISION, Supervision
from planner.plan.parking import host_tokens
from planner.plan.spec import PlanSpec
from planner.schedule.turns import SHORT_PROMPTS, WAITING, PrefillSizes
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError


class PrefillScheduler:
    """A scheduler of requests for one token each, first come, first served.

    Prompts follow each other in micro-batches of about as many tokens as the schedule's
    `prefill_micro_batch` of the mean length have; where the queue has less than two of these,
    halves of it. A request is done with one pass, and what other stages need of it is kept in host
    memory. So the next micro-batch has the whole KV cache again, as every stage takes them in their
    order.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        if min(sizes.slots, sizes.prefill_micro_batch) < 1 or sizes.kv_tokens < sizes.slot_tokens:
            raise SpecError(
                f"{sizes.slots} slots, prefills of {sizes.prefill_micro_batch} and "
                f"{sizes.kv_tokens} token slots for prompts of up to {sizes.slot_tokens}; give at "
                "least 1 of each, and room for the longest prompt"
            )
        self._sizes = sizes
        self._stages = stages
        self._waiting: deque[Request] = deque()
        self._free = deque(range(sizes.slots))
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._closed = False
        self.follow(sizes.followed_schedule)

    def follow(self, schedule: RequestSchedule) -> None:
        """Make micro-batches by this schedule from now on, of the most requests that there are."""
        self._size = min(self._sizes.prefill_micro_batch, schedule.prefill_micro_batch)
        parts = PrefillSizes.of(schedule, self._sizes.slot_tokens, self._size)
        self._parts = replace(parts, most_tokens=min(self._sizes.kv_tokens, parts.most_tokens))

    def add(self, requests: Sequence[Request], last: bool) -> None:
        self._waiting.extend(requests)
        self._closed = last

    def cancel(self, custom_id: str) -> None:
        """Give up a request: it leaves the queue now, or its slot with its token."""
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._cancelled |= {s for s, r in self._requests.items() if r.custom_id == custom_id}

    @property
    def most_under_way(self) -> int:
        return self._stages + WAITING

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_slots(self) -> int:
        return len(self._requests)

    @property
    def supervision(self) -> Supervision:
        """Nothing: there is nothing to outgrow."""
        return NO_SUPERVISION

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return, by slot, the `custom_id` of its request, which has no token yet; none of
        cancelled requests.
        """
        return {
            slot: (request.custom_id, np.array(request.generated, dtype=np.int64))
            for slot, request in self._requests.items()
            if slot not in self._cancelled
        }

    @property
    def wants_requests(self) -> bool:
        """Whether the queue has less than a micro-batch."""
        return not self._closed and len(self._waiting) < self._size

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Prefill the requests that came first, from the beginning of the KV cache on."""
        requests = [self._waiting.popleft() for _ in range(self._newcomers())]
        if not requests:
            return None
        slots = [self._free.popleft() for _ in requests]
        self._requests |= dict(zip(slots, requests, strict=True))
        texts = [np.array(r.prompt_ids + r.generated, dtype=np.int64) for r in requests]
        counts = np.array([len(text) for text in texts], dtype=np.int64)
        begins = counts.cumsum() - counts
        rows = list(zip(slots, requests, begins.tolist(), counts.tolist(), strict=True))
        batch = MicroBatch(
            np.array(slots, dtype=np.int64),
            np.zeros_like(counts),
            counts,
            begins,
            tuple(Admission.of(slot, r, TokenRange(at, size)) for slot, r, at, size in rows),
            sizes=counts,
            keeps=tuple(
                Park(r.host_key.number, at, size)
                for _, r, at, size in rows
                if r.host_key is not None and size <= self._sizes.parked_tokens
            ),
        )
        return batch, np.concatenate(texts)

    def _newcomers(self) -> int:
        """How many requests make the next micro-batch."""
        texts = [len(r.prompt_ids) + len(r.generated) for r in self._waiting]
        return self._parts.next_part(texts[: len(self._free)], sum(texts))

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        finished: list[Finished] = []
        rows = zip(
            batch.slots.tolist(), sampled.token_ids.tolist(), sampled.finish_reasons, strict=True
        )
        for slot, token, reason in rows:
            request = self._requests.pop(slot)
            self._free.append(slot)
            if slot in self._cancelled:
                self._cancelled.discard(slot)
                continue
            assert reason is not None, "each is for one token"
            tokens = (*request.generated, token)
            finished.append(Finished(request.custom_id, tokens, reason))
        return tuple(finished)


def prefill_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for stages of `plan` that prefill by the schedule of those that decode."""
    size, workload = plan.micro_batches.prefill, plan.workload
    return QueueSizes(
        slots=SHORT_PROMPTS * size * (len(plan.stages) + WAITING),
        prefill_micro_batch=size,
        decode_micro_batch=(SHORT_PROMPTS - 1) * size,
        slot_tokens=workload.total_length,
        policy="exegpt",
        kv_tokens=workload.kv_tokens,
        parked_tokens=host_tokens(plan),
        schedule=options.followed_schedule,
        role="prefill",
    )
