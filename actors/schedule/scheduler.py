"""What a scheduling policy is given, and what it must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from actors.messages import Finished, MicroBatch, Request, Sampled, TokenIds
from actors.schedule.request_slots import SlotRequests
from actors.stage_figures import NO_SUPERVISION, Supervision
from actors.transport.message_limits import Limits
from planner.plan.spec import PlanSpec, Role
from planner.scheduling import PolicyName, RequestSchedule
from quant.common.errors import SpecError


@dataclass(frozen=True)
class QueueSizes:
    """Slots of requests, the planned requests of a micro-batch of each phase, the tokens of the
    longest request (`slot_tokens`), and the scheduling policy by its name in
    `actors.schedule.table`.

    `kv_tokens`: the token slots of the KV cache, of which requests may reserve `n_slots` (0: all;
    holes that are left spare moves); 0 where all requests have as many. `schedule` is that of the
    policy `exegpt`, whose groups have `decode_micro_batch` requests at most; `role` is the phase
    that these stages have, where others have the other one.

    The other fields are for policies whose micro-batches mix the phases; those that do not leave
    them 0. `max_batch_size`: most requests in a micro-batch;
    `max_batch_tokens`: most tokens of more than one (0: any number). Prompts longer than
    `prefill_chunk_tokens` are given in parts of that many tokens (0: none are). A request that is
    preempted with at least `park_tokens_from` tokens has its keys and values copied to host memory
    (0: none has), where at most `parked_tokens` of all requests lie on each stage; those of others
    are computed again. On stages of one phase, what is handed over lies there too. Beside these lie
    at most `head_tokens` tokens of heads that prompts share (0: none do).
    """

    slots: int
    prefill_micro_batch: int
    decode_micro_batch: int
    slot_tokens: int
    policy: PolicyName = "static"
    kv_tokens: int = 0
    n_slots: int = 0
    max_batch_size: int = 0
    max_batch_tokens: int = 0
    prefill_chunk_tokens: int = 0
    park_tokens_from: int = 0
    parked_tokens: int = 0
    head_tokens: int = 0
    schedule: RequestSchedule | None = None
    role: Role = "both"

    @classmethod
    def of(cls, plan: PlanSpec) -> QueueSizes:
        """Sizes that `plan` asks for (policy `static`), or the slots of its cache (`orca`)."""
        sizes, workload = plan.micro_batches, plan.workload
        slots = workload.equal_slots
        prefill, decode = min(sizes.prefill, slots), min(sizes.decode, slots)
        return cls(slots, prefill, decode, workload.total_length)

    @property
    def followed_schedule(self) -> RequestSchedule:
        if self.schedule is None:
            raise SpecError(f"there is no schedule, and the policy {self.policy} follows one")
        return self.schedule

    def limits(self, max_tokens: int, kv_tokens: int, columns: int) -> Limits:
        """The most that messages may hold, both phases in one micro-batch."""
        rows = self.prefill_micro_batch * max_tokens + self.decode_micro_batch
        requests = self.prefill_micro_batch + self.decode_micro_batch
        if self.max_batch_size:
            requests, rows = self.max_batch_size, self._most_rows(max_tokens)
        return Limits(requests, rows, columns, self.slots, max_tokens, kv_tokens, self.host_tokens)

    @property
    def host_tokens(self) -> int:
        """Most tokens that lie in the host memory of a stage."""
        return self.parked_tokens + self.head_tokens

    def _most_rows(self, max_tokens: int) -> int:
        """The most tokens in a mixed micro-batch; all of them have a token slot."""
        longest = min(self.prefill_chunk_tokens or max_tokens, max_tokens)
        rows = min(self.max_batch_size * longest, self.kv_tokens)
        return min(rows, max(self.max_batch_tokens, longest)) if self.max_batch_tokens else rows


def most_in_slots(plan: PlanSpec, slots: int) -> int:
    """`slots`; with constant states no more than the plan has memory for."""
    has_states = any(stage.state_bytes for stage in plan.stages)
    return min(slots, plan.workload.global_batch) if has_states else slots


def check_reservable(sizes: QueueSizes, least: Mapping[str, int]) -> None:
    """Raise SpecError for sizes below `least`, or `n_slots` token slots that are too few."""
    for name, wanted in least.items():
        value = getattr(sizes, name)
        if value < wanted:
            raise SpecError(f"{name} is {value}; the policy {sizes.policy} needs at least {wanted}")
    if not 0 <= sizes.n_slots <= sizes.kv_tokens:
        raise SpecError(
            f"n_slots is {sizes.n_slots}; requests may reserve up to {sizes.kv_tokens} token slots "
            "of the KV cache (kv_tokens), and 0 stands for all of them"
        )


class Scheduler(ABC):
    """A scheduling policy: plain Python without a device or a clock. It decides which micro-batch
    comes next and takes in the tokens that were sampled.

    Each policy is one file beside this one, and one entry of `actors.schedule.table`.
    """

    _slots: SlotRequests
    """The requests that have a KV slot."""

    _waiting: Sized
    """Those that have none."""

    supervision: Supervision = NO_SUPERVISION
    """What was done so far about requests that outgrew their reservation: nothing where every
    reservation has room for the longest answer."""

    def expect(self, requests: Sequence[Request]) -> None:
        """Make ready for `requests`. SpecError as `add` raises it."""
        self._slots.expect(requests)

    @abstractmethod
    def add(self, requests: Sequence[Request]) -> None:
        """Queue `requests`. SpecError for one with more tokens than all may reserve together."""

    @property
    @abstractmethod
    def wants_requests(self) -> bool:
        """Whether more requests could change what comes next."""

    @abstractmethod
    def next_batch(self) -> tuple[MicroBatch, TokenIds] | None:
        """The next micro-batch and its token ids, or None when it waits for those under way."""

    @abstractmethod
    def complete(self, batch: MicroBatch, sampled: Sampled) -> tuple[Finished, ...]:
        """Take in the tokens of `batch`; returns the requests that ended with it."""

    @abstractmethod
    def cancel(self, custom_id: str) -> None:
        """Give up a request, of which nothing is told any more; one that has ended is ignored.

        It leaves the queue at once, and its KV slot with its next token at the latest.
        """

    @property
    @abstractmethod
    def most_under_way(self) -> int:
        """Most micro-batches that may be under way at a time."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> dict[int, Request]:
        """Those that have a KV slot, by slot."""
        return self._slots.requests

    @property
    def in_slots(self) -> int:
        return len(self.requests)

    def slot_tokens(self) -> dict[int, tuple[str, TokenIds]]:
        """Return custom_id and new tokens by slot, without requests that were cancelled."""
        return self._slots.tokens()

    def follow(self, schedule: RequestSchedule) -> None:  # noqa: B027  (most have none)
        """Go by this schedule from now on, within the present memory, if the policy has one."""


class QueueScheduler(Scheduler):
    """A scheduler whose requests wait for their slots in the order of their arrival."""

    def __init__(self, slots: SlotRequests) -> None:
        self._slots = slots
        self._waiting: deque[Request] = deque()

    def add(self, requests: Sequence[Request]) -> None:
        self._slots.expect(requests)
        self._waiting.extend(requests)

    def cancel(self, custom_id: str) -> None:
        self._waiting = deque(r for r in self._waiting if r.custom_id != custom_id)
        self._slots.cancel(custom_id)
