"""The policy `s3`: ranges grow with answers, and whoever joins keeps the predicted peak of memory
within the token slots. Its decisions are those of `planner.schedule.peak`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.messages import Finished, MicroBatch, Request, Sampled
from actors.schedule.request_slots import most_tokens
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes
from planner.lengths import IntArray
from planner.schedule.orca import OrcaPolicy, Waiting
from planner.schedule.passes import OrcaSizes
from planner.schedule.peak import PeakPolicy, expected_answer, first_range, larger_range


class PeakScheduler(S3Scheduler):
    """A scheduler whose requests hold their prompt and what they have of their answer, in ranges
    that grow by some tokens at a time.

    Ready requests go first. Then, whenever something has changed, the first request of the pool is
    admitted with which the memory of all in flight stays within the token slots until they end, by
    what is expected of them and how far that was right before; and so on until the micro-batch is
    full. A range that cannot grow is given up as under the published policy, and its request is
    the next to be admitted.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        slots = len(self._slots.ready)
        self._foreseen = np.zeros((slots, 3), dtype=np.int64)  # prompt, expected answer, limit

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        self._by_peak = PeakPolicy(sizes, stages, self._running)
        return self._by_peak

    def _running(self) -> IntArray:
        """What is foreseen of the requests in slots, as in `Waiting`."""
        slots = np.fromiter(self._slots.requests, np.int64, len(self._slots.requests))
        prompt, expected, limit = self._foreseen[slots].T
        given = self._slots.given[slots]
        return np.stack([prompt + given, given, expected, limit], axis=1)

    def _first_reservation(self, request: Request) -> int:
        tokens = len(request.prompt_ids) + len(request.generated)
        return first_range(tokens, most_tokens(request))

    def _larger(self, size: int, most: int) -> int:
        return larger_range(size, most, self._slots.available, len(self._slots.requests))

    def _again_with(self, request: Request, larger: int) -> int:
        return self._first_reservation(request)

    def _wait(self, request: Request, waiting: Waiting) -> None:
        given, limit = len(request.generated), request.max_new_tokens
        expected = expected_answer(limit, request.expected_tokens)
        foreseen = (len(request.prompt_ids) + given, given, expected, limit)
        super()._wait(request, waiting._replace(foreseen=foreseen))

    def _admitted(self, slots: Sequence[int]) -> None:
        super()._admitted(slots)
        for slot in slots:
            request = self._slots.requests[slot]
            limit = request.max_new_tokens
            expected = expected_answer(limit, request.expected_tokens)
            self._foreseen[slot] = len(request.prompt_ids), expected, limit

    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`, and learn from the answers that ended."""
        slots = batch.slots[batch.sampled_rows].tolist()
        ended = [
            slot
            for slot, reason in zip(slots, sampled.finish_reasons, strict=True)
            if reason is not None and slot not in self._slots.cancelled
        ]
        in_slots = len(self._slots.requests)
        finished = super().complete(batch, sampled)
        if len(self._slots.requests) < in_slots:
            self._by_peak.pool.changed()
        for slot in ended:
            expected, answer = int(self._foreseen[slot, 1]), int(self._slots.given[slot])
            self._by_peak.experience.end(expected, answer)
        return finished

    def cancel(self, custom_id: str) -> None:
        super().cancel(custom_id)
        self._by_peak.pool.changed()
