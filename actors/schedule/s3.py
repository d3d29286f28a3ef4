"""The policy `s3`: requests reserve what they are expected to need, the longest first (S3, section
3).

Names of the paper and here: the request pool is `RequestPool`, the bin is `RequestSlots.n_slots`
token slots, those that are available are `RequestSlots.available`; the supervisor is `_supervise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.messages import EVERY_KEY, MicroBatch, Move, Park, Request, TokenIds
from actors.schedule.request_pool import RequestPool, Waiting
from actors.schedule.request_slots import most_tokens
from actors.schedule.scheduler import QueueSizes
from actors.schedule.token_slots import TokenSlotScheduler, token_slot_sizes
from actors.stage_figures import Supervision
from planner.plan.parking import parking
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions

POOL_PER_SLOT = 4
"""Requests in the pool for each slot before a run begins to draw from a queue: so many that one of
them fits nearly always, and small beside the keys and values of as many."""

OVERTAKES_PER_SLOT = 4
"""How often a request is overtaken at most, for each slot: all slots are taken anew that often
while it waits. The fewer, the more often memory is held empty for those who wait."""


class S3Scheduler(TokenSlotScheduler):
    """A scheduler whose requests reserve token slots for their prompt and the new tokens that are
    expected of them; where nothing is, for as many as they may have.

    Ready requests go first, as under `orca`; then, at every iteration, the longest of the pool that
    fits into the token slots which are free is admitted, and so on until the micro-batch is full.
    No request is overtaken by later ones more than `OVERTAKES_PER_SLOT` times the slots: then the
    bin is held until it fits.

    A ready request whose next token has no room in its reservation has it doubled, up to its most
    tokens. Where enough token slots are free it grows there. Where not, the request is preempted:
    it gives up slot and range, returns to the pool with the doubled reservation and goes on from
    its tokens when it is admitted again. Its keys and values are parked in host memory meanwhile,
    or computed again: see `QueueSizes.park_tokens_from`. Of several that cannot grow the one that
    came last is preempted first, which may make room for the others.

    Beyond the paper, preempted requests go before all others, so that nobody waits for the rest of
    an answer while others begin theirs. By their length alone they wait for a room of twice their
    size, which shorter ones take piece by piece, and more of them are preempted meanwhile.

    Prompts are given in parts as under `orca`, and never more than `max_batch_tokens` at once: what
    is computed again may be longer than prompts are.
    """

    def __init__(self, sizes: QueueSizes, stages: int) -> None:
        super().__init__(sizes, stages)
        self._slots.chunk = sizes.prefill_chunk_tokens or sizes.max_batch_tokens
        self._most_waiting = POOL_PER_SLOT * self._slots.free
        self._pool = RequestPool(OVERTAKES_PER_SLOT * self._slots.free)
        self._arrivals = 0
        self._admitted: dict[int, Waiting] = {}  # the last one, by slot
        self._supervision = Supervision()
        self._parks: list[Park] = []  # of the next micro-batch, as the following two are
        self._restored: list[int] = []  # slots
        self._drops = [EVERY_KEY] if sizes.park_tokens_from else []  # what an earlier run left

    def _enqueue(self, requests: Sequence[Request]) -> None:
        first = self._arrivals
        self._arrivals += len(requests)
        self._pool.add([Waiting(r, first + i, reservation(r)) for i, r in enumerate(requests)])

    def _give_up_waiting(self, custom_id: str) -> None:
        for waiting in self._pool.give_up(custom_id):
            if waiting.parked:
                self._count(parked_now=-waiting.parked)
                left = [park for park in self._parks if park.key != waiting.arrival]
                if len(left) == len(self._parks):
                    self._drops.append(waiting.arrival)
                self._parks = left

    @property
    def wants_requests(self) -> bool:
        """Whether the pool could be larger."""
        return not self._closed and len(self._pool) < self._most_waiting

    @property
    def waiting(self) -> int:
        """Number of requests without a reservation, those that were preempted too."""
        return len(self._pool)

    @property
    def supervision(self) -> Supervision:
        """What was done about reservations that were too small."""
        return self._supervision

    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """Supervise the ready requests, then select as the base does."""
        found = self._selected(self._supervise())
        if found is None:
            return None  # what is to be parked stays where it is: nothing moves or comes in
        batch, token_ids = found
        if self._parks or self._restored or self._drops:
            batch = replace(
                batch,
                parks=tuple(self._parks),
                restores=tuple(self._restore(slot) for slot in self._restored),
                drops=tuple(self._drops),
            )
            self._parks, self._restored, self._drops = [], [], []
        return batch, token_ids

    def _supervise(self) -> tuple[Move, ...]:
        """Double the reservations of ready requests without room for their next tokens; returns the
        moves that growing takes.
        """
        held, ranges = self._slots, self._slots.ranges
        ready = held.ready_slots()
        is_short = held.written[ready] + held.counts(ready) > ranges.sizes[ready]
        short: list[int] = ready[is_short].tolist()
        begins = ranges.begins.copy() if short else ranges.begins  # before all moves
        moves: tuple[Move, ...] = ()
        while short:
            left: list[int] = []
            for slot in short:
                size = self._doubled(slot)
                if size - int(ranges.sizes[slot]) > held.available:
                    left.append(slot)
                    continue
                moves += ranges.grow(slot, size, held.written)
                self._count(grown=1)
            if left:
                last = left.pop()
                self._preempt(last, int(begins[last]))
            short = left
        return moves

    def _doubled(self, slot: int) -> int:
        held = self._slots
        return min(2 * int(held.ranges.sizes[slot]), most_tokens(held.requests[slot]))

    def _preempt(self, slot: int, begin: int) -> None:
        """Put the request in `slot` back into the pool; its range begins at `begin` on the stages
        until the next micro-batch.
        """
        tokens, size = int(self._slots.written[slot]), self._doubled(slot)
        arrival = self._admitted[slot].arrival
        generated = self._slots.new_tokens(slot)
        request = replace(self._slots.requests[slot], generated=generated)
        parks = self._is_parked(tokens)
        if parks:
            self._parks.append(Park(arrival, begin, tokens))
            self._count(parked=1, parked_tokens=tokens, parked_now=tokens)
        else:
            self._count(recomputed=1, recomputed_tokens=tokens)
        self._slots.leave(slot)
        parked = tokens if parks else 0
        self._pool.add([Waiting(request, arrival, size, parked, is_urgent=True)])

    def _is_parked(self, tokens: int) -> bool:
        """Whether a request with so many tokens has them parked when it is preempted."""
        least = self._sizes.park_tokens_from
        in_all = self._supervision.parked_now + tokens
        return 0 < least <= tokens and in_all <= self._sizes.parked_tokens

    def _admit(self, selected: int, tokens: int) -> tuple[list[int], tuple[Move, ...]]:
        slots: list[int] = []
        moves: tuple[Move, ...] = ()
        most = self._sizes.max_batch_tokens
        while selected + len(slots) < self._sizes.max_batch_size:
            waiting = self._pool.next(self._slots.available)
            if waiting is None:
                break
            text = len(waiting.request.prompt_ids) + len(waiting.request.generated)
            count = self._slots.first_part(text - waiting.parked)
            if most and tokens and tokens + count > most:
                break
            self._pool.take(waiting)
            slot = self._slots.take(waiting.request, waiting.arrival)
            self._admitted[slot] = waiting
            moves += self._slots.reserve(slot, waiting.size)
            slots.append(slot)
            tokens += count
        for slot in slots:  # after all reservations: what is restored later does not move
            parked = self._admitted[slot].parked
            if parked:
                self._slots.written[slot] = parked
                self._restored.append(slot)
                self._count(parked_now=-parked)
        return slots, moves

    def _restore(self, slot: int) -> Park:
        waiting = self._admitted[slot]
        return Park(waiting.arrival, int(self._slots.ranges.begins[slot]), waiting.parked)

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._supervision, name) + n for name, n in more.items()}
        self._supervision = replace(self._supervision, **counts)


def reservation(request: Request) -> int:
    """The token slots that it reserves first: for its prompt and the new tokens that are expected
    of it, at least one more than it has.
    """
    expected = request.expected_tokens
    new = request.max_new_tokens if expected is None else expected
    least = len(request.generated) + 1
    return min(len(request.prompt_ids) + max(new, least), most_tokens(request))


def s3_sizes(plan: PlanSpec, options: PolicyOptions) -> QueueSizes:
    """The sizes for the KV cache of `plan`; what is preempted comes back by the way that is cheaper
    by its times.
    """
    cheaper = parking(plan)
    return replace(
        token_slot_sizes(plan, options, "s3"),
        park_tokens_from=cheaper.tokens_from,
        parked_tokens=cheaper.most_tokens,
    )
