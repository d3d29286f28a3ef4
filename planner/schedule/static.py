"""The order of passes of a job, or of one batch, under the runtime's static schedule.

The first stage's actor runs it (`actors.schedule.static`): the first requests fill all KV slots;
every group of decode slots steps when all of its requests have their first token, and again when
its last step came back (LLM-PQ section 4.3). Finished requests leave and newcomers take their
slots: their prefills and the decode steps take turns. As the actor waits for the oldest micro-batch
under way and never looks which of them is done, its decisions depend on lengths but not on time,
and the order can be written down before anything is timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.micro_batches import MicroBatches
from planner.phases import Phase
from planner.workload import Job, Workload

UNDER_WAY_PER_STAGE = 2
"""Micro-batches of the policy that may be under way, per stage: enough to hide the hops."""

REFILL_SHARE = 4
"""In a pipeline newcomers are prefilled once a quarter of the slots is free, until no slot is.

A prefill keeps the decode steps behind it waiting and leaves a bubble, which prefills that follow
at once share; waiting for more free slots would leave decode steps emptier. Of shares from 1/32 to
1, 1/4 lost least in simulations of random lengths with 2 to 4 stages and prefills as long as 6 to
20 steps."""


def refill_from(slots: int, prefill_size: int, stages: int) -> int:
    """The free slots from which on newcomers are prefilled."""
    share = max(1, slots // REFILL_SHARE)
    return share if stages > 1 else min(share, prefill_size)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch through all stages.

    `index` is the number of a prefill in order of submission, or of the decode group in slot order;
    `step` is 0 in prefill and counts a group's decode steps from 1. Each of `requests` requests
    adds `tokens` tokens to `context_length` before them: their means, rounded, where lengths
    differ; `prompts` has the lengths of a prefill's prompts then. `results_before` counts the
    results that came back before it was submitted.
    """

    phase: Phase
    index: int
    step: int
    requests: int
    tokens: int
    context_length: int
    results_before: int
    prompts: tuple[int, ...] = ()

    @property
    def all_tokens(self) -> int:
        """The tokens that all of its requests add."""
        return sum(self.prompts) if self.prompts else self.requests * self.tokens


@dataclass(frozen=True)
class JobRows:
    """Prompt and output tokens of a job's requests [R], in the order of their queue.

    `reserved`: the most tokens that each may have when it is done; None where all run to that.
    `expected`: the new tokens that a predictor expects of each; None: as many as it may get.
    """

    prompts: Sequence[int]
    outputs: Sequence[int]
    reserved: Sequence[int] | None = None
    expected: Sequence[int] | None = None

    @classmethod
    def alike(cls, workload: Workload) -> JobRows:
        """The requests of one batch."""
        rows = workload.global_batch
        return cls([workload.prompt_length] * rows, [workload.new_tokens] * rows)

    @classmethod
    def of(cls, job: Job, count: int) -> JobRows:
        """So many requests of the job's lengths, with what its predictor expects of them."""
        prompts, outputs = job.lengths.rows(count)
        reserved = job.lengths.reserved(prompts, outputs)
        expected = None if job.predictor is None else job.predictor.predicted(outputs)
        return cls(prompts.tolist(), outputs.tolist(), reserved.tolist(), expected)


def static_schedule(workload: Workload, sizes: MicroBatches, stages: int) -> tuple[Pass, ...]:
    """All passes of one batch in the first stage's order of computing; all run n tokens."""
    schedule = JobSchedule(JobRows.alike(workload), workload.global_batch, sizes, stages)
    return tuple(schedule.passes())


@dataclass(slots=True)
class _Group:
    """The slots that decode together: `free`, `prefilling` and `decoding` ones.

    A group that `fills` has not stepped since it was last empty, and waits for all of its
    newcomers. `context_tokens` are those before the next step of all that decode. `ends` has, by
    number of the step that gives them their last token, slots and their context after it.
    """

    index: int
    slots: int
    free: int
    prefilling: int = 0
    decoding: int = 0
    under_way: bool = False
    fills: bool = True
    is_ready: bool = False
    step: int = 0
    context_tokens: int = 0
    ends: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Prefill:
    """A prefill under way: the slots of its requests, which follow each other in the queue."""

    slots: list[int]
    first_request: int


class JobSchedule:
    """The decisions of `actors.schedule.static` and `actors.schedule.driver` for a queue of `rows`.

    Every request runs all of its output tokens. It costs something when it comes and when it
    leaves, but nothing while it decodes, so that a pass takes a few microseconds.
    """

    def __init__(self, rows: JobRows, slots: int, sizes: MicroBatches, stages: int) -> None:
        self._prompts, self._outputs = list(rows.prompts), list(rows.outputs)
        self._mixed = len(set(self._prompts)) > 1
        self._prefill_size = sizes.prefill
        self._limit = UNDER_WAY_PER_STAGE * stages
        self._refill_from = refill_from(slots, sizes.prefill, stages)
        self._refills = True
        self._next_request = 0
        self._free = deque(range(slots))
        self._unused = slots  # free slots that no request has had yet
        self._groups = [
            _Group(index, size, size)
            for index, first in enumerate(range(0, slots, sizes.decode))
            for size in [min(sizes.decode, slots - first)]
        ]
        self._group_of = [group for group in self._groups for _ in range(group.slots)]
        self._ready: deque[_Group] = deque()
        self._decode_is_next = False
        self._results = 0
        self._ended_after: list[int] = []

    @property
    def refills(self) -> bool:
        """Whether newcomers are prefilled until no slot is free."""
        return self._refills

    @property
    def prefilled(self) -> int:
        """The requests whose prefill has been submitted."""
        return self._next_request

    @property
    def ended_after(self) -> Sequence[int]:
        """After how many results each request had ended, in the order in which they did."""
        return self._ended_after

    def phases(self) -> Iterator[Phase]:
        """The phase of every pass, for those who count passes only."""
        for each in self._submitted():
            yield "prefill" if isinstance(each, _Prefill) else "decode"

    def passes(self) -> Iterator[Pass]:
        """Every pass, in the first stage's order of computing."""
        prefills = 0
        for each in self._submitted():
            if isinstance(each, _Prefill):
                yield self._prefill_pass(each, prefills)
                prefills += 1
            else:
                requests = each.decoding
                context = rounded_mean(each.context_tokens - requests, requests)
                yield Pass("decode", each.index, each.step, requests, 1, context, self._results)

    def _prefill_pass(self, prefill: _Prefill, index: int) -> Pass:
        first, size = prefill.first_request, len(prefill.slots)
        prompts = tuple(self._prompts[first : first + size]) if self._mixed else ()
        tokens = rounded_mean(sum(prompts), size) if prompts else self._prompts[first]
        return Pass("prefill", index, 0, size, tokens, 0, self._results, prompts)

    def _submitted(self) -> Iterator[_Prefill | _Group]:
        under_way: deque[_Prefill | _Group] = deque()
        while True:
            following = self._following() if len(under_way) < self._limit else None
            if following is not None:
                under_way.append(following)
                yield following
            elif under_way:
                self._complete(under_way.popleft())
            else:
                return

    def _following(self) -> _Prefill | _Group | None:
        """Prefill the first batch, then let prefills and decode steps take turns."""
        size = self._largest_prefill() if self._refills else 0
        group = None
        for each in self._ready:
            if not (each.fills and (each.prefilling or (each.free and size))):
                group = each
                break
        if group is None and not size and any(each.free == each.slots for each in self._groups):
            size = self._largest_prefill()
        if size and (self._unused or group is None or not self._decode_is_next):
            self._decode_is_next = True
            return self._prefill(size)
        if group is None:
            return None
        self._decode_is_next = False
        return self._step(group)

    def _step(self, group: _Group) -> _Group:
        self._ready.remove(group)
        group.is_ready, group.under_way, group.fills = False, True, False
        group.step += 1
        group.context_tokens += group.decoding
        return group

    def _largest_prefill(self) -> int:
        free = self._unused or len(self._free)
        return min(self._prefill_size, free, len(self._outputs) - self._next_request)

    def _prefill(self, size: int) -> _Prefill:
        slots = sorted(self._free.popleft() for _ in range(size))
        self._unused = max(0, self._unused - size)
        self._refills &= bool(self._free)
        for slot in slots:
            group = self._group_of[slot]
            group.free -= 1
            group.prefilling += 1
        self._next_request += size
        return _Prefill(slots, self._next_request - size)

    def _complete(self, done: _Prefill | _Group) -> None:
        """Take in the tokens of a pass: the requests that have their last one leave."""
        self._results += 1
        if isinstance(done, _Prefill):
            touched = self._complete_prefill(done)
        else:
            touched = [done]
            done.under_way = False
            if done.step in done.ends:
                for slot, context in sorted(done.ends.pop(done.step)):
                    done.context_tokens -= context
                    self._leave(done, slot)
        for group in touched:
            if not group.decoding:
                group.fills = True
            elif not group.under_way and not group.is_ready:
                group.is_ready = True
                self._ready.append(group)

    def _complete_prefill(self, done: _Prefill) -> list[_Group]:
        """Let requests decode with their group's next step; returns their groups in slot order."""
        touched: list[_Group] = []
        for request, slot in enumerate(done.slots, start=done.first_request):
            group = self._group_of[slot]
            if not touched or touched[-1] is not group:
                touched.append(group)
            group.prefilling -= 1
            group.decoding += 1
            steps = self._outputs[request] - 1
            if steps:
                prompt = self._prompts[request]
                group.context_tokens += prompt
                group.ends.setdefault(group.step + steps, []).append((slot, prompt + steps))
            else:
                self._leave(group, slot)
        return touched

    def _leave(self, group: _Group, slot: int) -> None:
        group.decoding -= 1
        group.free += 1
        self._free.append(slot)
        self._ended_after.append(self._results)
        self._refills |= len(self._free) >= self._refill_from


def rounded_mean(total: int, count: int) -> int:
    """The mean to the nearest whole number; halves go up."""
    return (2 * total + count) // (2 * count)
