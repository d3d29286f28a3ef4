"""Heads that prompts share, such as an instruction before the text of each row: found by comparing
token ids, computed once, kept in host memory, and restored for each prompt that begins with one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from actors.messages import EVERY_KEY, HeadId, MicroBatch, Park, Request, Sampling, SharedHead
from actors.stage_figures import NOTHING_SHARED, SharedPrompts
from planner.costs.stored_bytes import LEAST_HEAD_TOKENS
from planner.lengths import IntArray

BLOCK_TOKENS = 16
"""Heads end where a block of so many tokens does, as vLLM's do: hashing each block once finds heads
of any number of prompts, and leaves at most 15 shared tokens to be computed."""

MOST_SEEN = 2**17
"""Beginnings of prompts that are remembered, each in about 100 bytes: 2,000 prompts of 1,000 tokens
that have nothing in common, and any number of those that do."""


@dataclass(eq=False)
class _Head:
    """A head by its own `request`, which may begin with a shorter one. `users` begin with it and
    have not ended; those `held` wait until it is on its way through the stages.
    """

    key: int
    request: Request
    users: set[str] = field(default_factory=set)
    held: dict[str, Request] = field(default_factory=dict)
    is_kept: bool = False

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_ids)

    def begins(self, request: Request) -> bool:
        own = self.request
        return (
            own.adapter == request.adapter and own.prompt_ids == request.prompt_ids[: self.tokens]
        )

    def give(self, request: Request) -> tuple[Request, ...]:
        """Have a request begin with it; returns that as it is queued now, nothing if it waits."""
        shared = replace(request, head=SharedHead(self.key, self.tokens))
        self.users.add(request.custom_id)
        if self.is_kept:
            return (shared,)
        self.held[request.custom_id] = shared
        return ()


class PromptHeads:
    """Heads of at most `most_tokens` tokens together, the latest that were of use.

    Requests come by `place`, which says what goes to the scheduler now: those whose head is not
    kept yet wait, until the micro-batch that computes it is submitted. Stages compute in this
    order, so that those that follow find it. Every micro-batch passes `with_copies`, where heads
    are kept and restored.
    """

    def __init__(self, most_tokens: int, earlier: SharedPrompts = NOTHING_SHARED) -> None:
        self.most_tokens = most_tokens
        self._seen: OrderedDict[int, int] = OrderedDict()  # how often, by hash of a beginning
        self._heads: OrderedDict[int, _Head] = OrderedDict()  # by hash, the latest one last
        self._used: dict[str, _Head] = {}  # by custom_id of those that have not ended
        self._queued: dict[str, _Head] = {}  # by their own custom_id, until they are kept
        self._computing: dict[int, _Head] = {}  # by slot
        self._drops: list[int] = []  # of the next micro-batch
        self._next_key = EVERY_KEY - 1
        self.counts = earlier

    def begin(self, has_failed: bool) -> None:
        """Begin another run, of which no request is there yet: what is kept stays, unless the run
        before `has_failed`.
        """
        for value, head in list(self._heads.items()):
            head.users.clear()
            if has_failed or not head.is_kept:
                self._forget(value)
        self._used, self._queued, self._computing = {}, {}, {}

    @property
    def waiting(self) -> int:
        """The requests that wait for their head."""
        return sum(len(head.held) for head in self._queued.values())

    def place(self, requests: Sequence[Request]) -> list[Request]:
        """Return what is queued now of `requests`, and of the heads that some of them need."""
        if not self.most_tokens:
            return list(requests)
        beginnings = [_beginnings(request) for request in requests]
        for value in chain.from_iterable(beginnings):
            self._seen[value] = self._seen.pop(value, 0) + 1
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        placed: list[Request] = []
        for request, own in zip(requests, beginnings, strict=True):
            self._count(prompt_tokens=len(request.prompt_ids))
            head, queued = self._head_of(request, own)
            if head is None:
                placed.append(request)
                continue
            self._count(rows=1, shared_tokens=head.tokens)
            self._used[request.custom_id] = head
            placed += (*queued, *head.give(request))
        return placed

    def _head_of(
        self, request: Request, beginnings: Sequence[int]
    ) -> tuple[_Head | None, tuple[Request, ...]]:
        """The head that a request begins with, and what is queued for it where it is a new one."""
        known = self._longest_known(request, beginnings)
        there = 0 if known is None else known.tokens
        place, best = -1, float(LEAST_HEAD_TOKENS) if there else 0.0
        for at, value in enumerate(beginnings):
            more = LEAST_HEAD_TOKENS + at * BLOCK_TOKENS - there
            saved = more * (1 - 1 / self._seen.get(value, 1))  # for each that shares its cost
            if saved > best and more + there <= self.most_tokens:
                place, best = at, saved
        if best <= (LEAST_HEAD_TOKENS if there else 0):
            return known, ()
        tokens, value = LEAST_HEAD_TOKENS + place * BLOCK_TOKENS, beginnings[place]
        if value in self._heads or not self._make_room(tokens, known):
            return known, ()
        name = HeadId(f"head {-self._next_key}")
        own = Request(name, request.prompt_ids[:tokens], 1, Sampling(), adapter=request.adapter)
        self._heads[value] = self._queued[name] = made = _Head(self._next_key, own)
        self._next_key -= 1
        self._count(heads=1, head_tokens=tokens - there)
        if known is None:
            return made, (own,)
        self._used[name] = known
        return made, known.give(own)

    def _longest_known(self, request: Request, beginnings: Sequence[int]) -> _Head | None:
        for value in reversed(beginnings):
            known = self._heads.get(value)
            if known is not None and known.begins(request):
                self._heads.move_to_end(value)
                return known
        return None

    def _make_room(self, tokens: int, kept: _Head | None) -> bool:
        """Whether there is room for so many tokens, once heads that nobody uses are forgotten, the
        oldest first, but not the one that is `kept`.
        """
        room = self.most_tokens - sum(head.tokens for head in self._heads.values())
        idle = {
            value: head
            for value, head in self._heads.items()
            if head.is_kept and not head.users and head is not kept
        }
        if room + sum(head.tokens for head in idle.values()) < tokens:
            return False
        for value, head in idle.items():
            if room < tokens:
                self._forget(value)
                room += head.tokens
        return True

    def _forget(self, value: int) -> None:
        head = self._heads.pop(value)
        if head.is_kept:
            self._drops.append(head.key)

    def with_copies(
        self, batch: MicroBatch, requests: Mapping[int, Request]
    ) -> tuple[MicroBatch, list[Request]]:
        """Have the heads of `batch` kept and restored, of `requests` by slot; returns also those
        that waited for what it computes.
        """
        restores: list[Park] = []
        for each in batch.admitted:
            request, head = requests[each.slot], requests[each.slot].head
            self._computing.pop(each.slot, None)  # of one that was preempted
            if isinstance(request.custom_id, HeadId):
                self._computing[each.slot] = self._queued[request.custom_id]
            if head is not None and int(batch.starts[batch.slots == each.slot][0]) == head.tokens:
                restores.append(Park(head.key, each.room.begin, head.tokens))
        keeps, ready = self._kept(batch) if self._computing else ([], [])
        if restores or keeps or self._drops:
            batch = replace(
                batch,
                restores=(*batch.restores, *restores),
                keeps=(*batch.keeps, *keeps),
                drops=(*batch.drops, *self._drops),
            )
            self._drops = []
        return batch, ready

    def _kept(self, batch: MicroBatch) -> tuple[list[Park], list[Request]]:
        """The heads that are whole when `batch` is computed, and the requests that waited."""
        keeps: list[Park] = []
        ready: list[Request] = []
        rows = dict(zip(batch.slots.tolist(), range(len(batch.slots)), strict=True))
        for slot in self._computing.keys() & rows:
            head, row = self._computing[slot], rows[slot]
            if batch.lengths[row] == head.tokens:
                keeps.append(Park(head.key, int(batch.begins[row]), head.tokens))
                ready += head.held.values()
                head.held, head.is_kept = {}, True
                del self._computing[slot], self._queued[head.request.custom_id]
        return keeps, ready

    def end(self, custom_id: str) -> None:
        """Note that a request has ended, or was given up; one that waited is forgotten."""
        head = self._used.pop(custom_id, None)
        if head is not None:
            head.users.discard(custom_id)
            head.held.pop(custom_id, None)

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self.counts, name) + n for name, n in more.items()}
        self.counts = replace(self.counts, **counts)


def repeated_tokens(prompt_tokens: IntArray) -> IntArray:
    """Tokens that are restored of prompts of so many, where they come again [prompts]."""
    whole: IntArray = (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return np.where(whole < LEAST_HEAD_TOKENS, 0, whole)


def _beginnings(request: Request) -> list[int]:
    """Hashes of the beginnings of a prompt that may be heads, the shortest first, with its adapter;
    at least one token is left to compute. What other stages have prefilled has none, nor has a
    prompt whose tokens are scored: nothing is computed of those of a head that is restored.
    """
    if (request.host_key is not None and request.generated) or request.scores_prompt:
        return []
    ids, found, value = request.prompt_ids, list[int](), hash(request.adapter)
    for end in range(BLOCK_TOKENS, len(ids), BLOCK_TOKENS):
        value = hash((value, ids[end - BLOCK_TOKENS : end]))
        if end >= LEAST_HEAD_TOKENS:
            found.append(value)
    return found
