"""What a stage has computed of each request, kept for who follows single requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from actors.messages import Admission, HeadId, MicroBatch
from planner.scheduling import Phase

MOST_REQUESTS = 2**14
"""Requests that are kept for who asks; of those that nobody asks for, the oldest are forgotten."""


@dataclass(frozen=True)
class PhaseTimes:
    """The micro-batches of a stage with tokens of a request: from when to when by the clock of the
    process, and the seconds in which they, with all that was in them, were computed.
    """

    began_s: float
    ended_s: float
    busy_s: float
    micro_batches: int
    tokens: int

    def plus(self, other: PhaseTimes) -> PhaseTimes:
        """Both, of which `other` came later."""
        return PhaseTimes(
            self.began_s,
            other.ended_s,
            self.busy_s + other.busy_s,
            self.micro_batches + other.micro_batches,
            self.tokens + other.tokens,
        )

    def shifted(self, seconds: float) -> PhaseTimes:
        """The same by a clock that is behind by so many seconds."""
        return replace(self, began_s=self.began_s - seconds, ended_s=self.ended_s - seconds)


RequestTimes = Mapping[Phase, PhaseTimes]
"""The times of a request on one stage; a phase that it has not come to is missing."""


class RequestLog:
    """Notes the times of requests by slot; one thread adds, others take what has ended."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._slots: dict[int, str] = {}
        self._begun: set[int] = set()  # slots of which a token has been sampled
        self._times: dict[str, dict[Phase, PhaseTimes]] = {}
        self._lock = Lock()

    def add(self, batch: MicroBatch, began_s: float, ended_s: float) -> None:
        with self._lock:
            for each in batch.admitted:
                self._admit(each)
            sampled = np.ones(len(batch.slots), bool) if batch.samples is None else batch.samples
            columns = (batch.slots, batch.counts, batch.decode_rows, sampled)
            for slot, count, is_decode, samples in zip(
                *(each.tolist() for each in columns), strict=True
            ):
                # The last token of a prompt may come alone, as if it were decoded.
                phase: Phase = "decode" if is_decode and slot in self._begun else "prefill"
                if samples:
                    self._begun.add(slot)
                times = self._times.get(self._slots.get(slot, ""))
                if times is not None:
                    more = PhaseTimes(began_s, ended_s, ended_s - began_s, 1, count)
                    times[phase] = times[phase].plus(more) if phase in times else more
            while len(self._times) > self._most:
                del self._times[next(iter(self._times))]

    def _admit(self, each: Admission) -> None:
        self._slots.pop(each.slot, None)
        self._begun.discard(each.slot)
        if isinstance(each.custom_id, HeadId):
            return
        self._slots[each.slot] = each.custom_id
        if each.generated:  # it goes on, after a fault or from other stages
            self._begun.add(each.slot)
        else:
            self._times.pop(each.custom_id, None)
        self._times.setdefault(each.custom_id, {})

    def take(self, custom_ids: Sequence[str]) -> dict[str, RequestTimes]:
        """Give out the times of these requests, which have ended."""
        with self._lock:
            found = {name: self._times.pop(name, None) for name in custom_ids}
        return {name: times for name, times in found.items() if times}
