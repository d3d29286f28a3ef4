"""The order of passes of one global batch under the runtime's static schedule.

The first stage's actor runs it (`actors.schedule.static`) for the requests that fill the slots
first: prefill micro-batches in slot order, then decode micro-batches, each of which
starts when all of its requests have their first token and takes its next step when the last one
came back (LLM-PQ section 4.3). As it waits for the oldest micro-batch under way and never looks
which of them is done, its decisions do not depend on time, and the order can be written down before
anything is timed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from planner.micro_batches import MicroBatches
from planner.phases import Phase
from planner.workload import Workload

UNDER_WAY_PER_STAGE = 2  # micro-batches that actors.schedule.driver lets be under way, per stage


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through all stages.

    `index` counts micro-batches of the phase in slot order; `step` is 0 in prefill and counts
    decode steps from 1. Each of `requests` requests adds `tokens` tokens to `context_length` before
    them. `results_before` counts the results that came back before it was submitted.
    """

    phase: Phase
    index: int
    step: int
    requests: int
    tokens: int
    context_length: int
    results_before: int


def static_schedule(workload: Workload, sizes: MicroBatches, stages: int) -> tuple[Pass, ...]:
    """All passes in the first stage's order of computing; every request runs n tokens."""
    schedule = _Schedule(workload, sizes)
    limit = UNDER_WAY_PER_STAGE * stages
    passes: list[Pass] = []
    under_way: deque[Pass] = deque()
    while True:
        following = schedule.following() if len(under_way) < limit else None
        if following is not None:
            passes.append(following)
            under_way.append(following)
        elif under_way:
            schedule.complete(under_way.popleft())
        else:
            return tuple(passes)


class _Schedule:
    """Decides which pass comes next, given the results so far."""

    def __init__(self, workload: Workload, sizes: MicroBatches) -> None:
        self._workload = workload
        self._sizes = sizes
        self._prefills = deque(enumerate(_shares(workload.global_batch, sizes.prefill)))
        self._groups = _shares(workload.global_batch, sizes.decode)
        self._without_token = list(self._groups)
        self._steps: Counter[int] = Counter()
        self._ready: deque[int] = deque()
        self._results = 0

    def following(self) -> Pass | None:
        """The next prefill in slot order, else the decode micro-batch that became ready first."""
        if self._prefills:
            index, requests = self._prefills.popleft()
            length = self._workload.prompt_length
            return Pass("prefill", index, 0, requests, length, 0, self._results)
        if not self._ready:
            return None
        index = self._ready.popleft()
        self._steps[index] += 1
        step = self._steps[index]
        context = self._workload.prompt_length + step - 1
        return Pass("decode", index, step, self._groups[index], 1, context, self._results)

    def complete(self, done: Pass) -> None:
        """Record the result of a pass."""
        self._results += 1
        touched = self._first_tokens(done) if done.phase == "prefill" else [done.index]
        left = self._workload.new_tokens - 1
        self._ready.extend(index for index in touched if self._steps[index] < left)

    def _first_tokens(self, done: Pass) -> list[int]:
        """The decode micro-batches whose last request got its first token from `done`."""
        first = done.index * self._sizes.prefill
        slots = range(first, first + done.requests)
        for index, count in Counter(slot // self._sizes.decode for slot in slots).items():
            self._without_token[index] -= count
        touched = range(slots[0] // self._sizes.decode, slots[-1] // self._sizes.decode + 1)
        return [index for index in touched if self._without_token[index] == 0]


def _shares(requests: int, size: int) -> list[int]:
    """The number of requests of each micro-batch; the last one may be smaller."""
    return [min(size, requests - first) for first in range(0, requests, size)]
