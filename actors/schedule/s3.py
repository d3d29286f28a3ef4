"""The policy `s3-published`: requests reserve what they are expected to need, the longest first
(S3, section 3).

The paper's request pool is `planner.schedule.s3.LongestFirst`, its bin the token slots that are
available, its supervisor `_supervise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.messages import EVERY_KEY, MicroBatch, Move, Park, Request, TokenIds
from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.request_slots import most_tokens, text_tokens
from actors.schedule.scheduler import QueueSizes
from planner.plan.kv_copies import parking
from planner.plan.spec import PlanSpec
from planner.schedule.orca import OrcaPolicy, Waiting
from planner.schedule.passes import OrcaSizes
from planner.schedule.s3 import (
    Outgrown,
    S3Policy,
    doubled,
    first_reservation_of,
    supervised,
)
from planner.scheduling import PolicyOptions


class S3Scheduler(OrcaScheduler):
    """A scheduler whose requests reserve token slots for their prompt and the new tokens that are
    expected of them; where nothing is, for as many as they may have.

    Ready requests go first, as under `orca`; then, at every iteration, the longest of the pool that
    fits into the token slots which are free is admitted, and so on until the micro-batch is full.

    A ready request whose next token has no room in its reservation has it doubled, up to its most
    tokens. Where enough token slots are free it grows there. Where not, the request is preempted:
    it gives up slot and range, returns to the pool with the doubled reservation and goes on from
    its tokens when it is admitted again. Its keys and values are parked in host memory meanwhile,
    or computed again: see `QueueSizes.park_tokens_from`.

    Beyond the paper, preempted requests go before all others, so that nobody waits for the rest of
    an answer while others begin theirs. By their length alone they wait for a room of twice their
    size, which shorter ones take piece by piece, and more of them are preempted meanwhile.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        self._sizes = sizes
        self._parked: dict[int, int] = {}  # tokens in host memory of those that wait, by arrival
        self._parks: list[Park] = []  # of the next micro-batch, as the following two are
        self._restores: dict[int, int] = {}  # tokens by slot
        self._drops = [EVERY_KEY] if sizes.park_tokens_from else []  # what an earlier run left

    def _make_policy(self, sizes: OrcaSizes, stages: int) -> OrcaPolicy:
        return S3Policy(sizes, stages)

    def _first_reservation(self, request: Request) -> int:
        prompt, generated = len(request.prompt_ids), len(request.generated)
        return first_reservation_of(
            prompt, most_tokens(request), request.expected_tokens, generated
        )

    def _larger(self, size: int, most: int) -> int:
        """The range that a request asks for which outgrows one of `size`."""
        return doubled(size, most)

    def _again_with(self, request: Request, larger: int) -> int:
        """The range with which a request comes back that was preempted as it asked for a `larger`
        one.
        """
        return larger

    def _give_up(self, arrival: int) -> None:
        super()._give_up(arrival)
        parked = self._parked.pop(arrival, 0)
        if parked:
            self._count(parked_now=-parked)
            left = [park for park in self._parks if park.key != arrival]
            if len(left) == len(self._parks):
                self._drops.append(arrival)
            self._parks = left

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Supervise the ready requests, then select as the base does."""
        found = self._selected(self._supervise())
        if found is None:
            return None  # what is to be parked stays where it is: nothing moves or comes in
        batch, token_ids = found
        if self._parks or self._restores or self._drops:
            held = self._slots
            restores = tuple(
                Park(int(held.arrivals[slot]), int(held.ranges.begins[slot]), tokens)
                for slot, tokens in self._restores.items()
            )
            parks, drops = tuple(self._parks), tuple(self._drops)
            batch = replace(batch, parks=parks, restores=restores, drops=drops)
            self._parks, self._restores, self._drops = [], {}, []
        return batch, token_ids

    def _supervise(self) -> tuple[Move, ...]:
        """Enlarge ranges that are too small for the next token; returns the moves it takes."""
        held, ranges = self._slots, self._slots.ranges
        ready = held.ready_slots()
        is_short = held.written[ready] + held.counts(ready) > ranges.sizes[ready]
        short = [
            Outgrown(slot, size, self._larger(size, most_tokens(held.requests[slot])))
            for slot, size in zip(
                ready[is_short].tolist(), ranges.sizes[ready[is_short]].tolist(), strict=True
            )
        ]
        begins = ranges.begins.copy() if short else ranges.begins  # before all moves
        moves: tuple[Move, ...] = ()
        for each, grows in supervised(short, held.available):
            if grows:
                moves += ranges.grow(each.number, each.larger, held.written)
                self._count(grown=1)
            else:
                self._preempt(each.number, each.larger, int(begins[each.number]))
        return moves

    def _preempt(self, slot: int, larger: int, begin: int) -> None:
        """Put the request in `slot` back into the pool, as it asked for a `larger` range; its own
        begins at `begin` on the stages until the next micro-batch.
        """
        held = self._slots
        tokens, arrival = int(held.written[slot]), int(held.arrivals[slot])
        generated = held.new_tokens(slot)
        request = replace(held.leave(slot), generated=generated)
        text = text_tokens(request)
        least, in_all = self._sizes.park_tokens_from, self.supervision.parked_now + tokens
        if 0 < least <= tokens and in_all <= self._sizes.parked_tokens:
            self._parks.append(Park(arrival, begin, tokens))
            self._parked[arrival] = tokens
            text += request.shared_tokens - tokens
            self._count(parked=1, parked_tokens=tokens, parked_now=tokens)
        else:
            self._count(recomputed=1, recomputed_tokens=tokens)
        size = self._again_with(request, larger)
        self._wait(request, Waiting(arrival, text, size, is_urgent=True))

    def _admitted(self, slots: Sequence[int]) -> None:
        """Have what is parked restored; after all reservations, so that it does not move later."""
        for slot in slots:
            parked = self._parked.pop(int(self._slots.arrivals[slot]), 0)
            if parked:
                self._slots.written[slot] = parked
                self._restores[slot] = parked
                self._count(parked_now=-parked)

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self.supervision, name) + n for name, n in more.items()}
        self.supervision = replace(self.supervision, **counts)


def s3_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan`; preempted requests come back the cheaper way."""
    cheaper = parking(plan)
    return replace(
        orca_sizes(plan, options, options.name),
        park_tokens_from=cheaper.tokens_from,
        parked_tokens=cheaper.most_tokens,
    )
