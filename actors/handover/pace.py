"""When stages that prefill take more prompts: so that those which decode are kept full, but no
fuller (ExeGPT, section 5.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.messages import Request
from actors.schedule.request_slots import most_tokens
from actors.schedule.scheduler import QueueSizes
from planner.schedule.turns import SHORT_PROMPTS, evened, newcomers
from planner.scheduling import RequestSchedule


@dataclass(frozen=True)
class Load:
    """The requests in flight: those whose prompts wait for being `prefilling` or are, and those
    that are handed over and `decoding`. So many are `leaving` before one that begins now is
    prefilled, as it was the last time.

    `host_tokens`: the tokens of prompts whose keys and values lie, or will lie, in host memory;
    `reserved`: the most tokens that all of them may have.
    """

    prefilling: int = 0
    decoding: int = 0
    leaving: int = 0
    host_tokens: int = 0
    reserved: int = 0

    @property
    def arriving(self) -> int:
        """By how much there will be more decoding when all are prefilled."""
        return max(0, self.prefilling - self.leaving)


class PrefillPace:
    """Says how many prompts make the next turn, by a `schedule` that divides the phases.

    A turn has `prefill_requests`. It begins when at most `decode_requests` are decoding, those
    counted that will by then, and is smaller where there would be more than the tolerance allows.
    Prompts are taken in their order, so many that they have the tokens of as many of the mean.
    There is a turn for each of the `stages` that prefill, and one that waits. Nothing begins for
    which there is no room in host memory, or in the slots of the stages that decode.

    `prefill_tokens`, `decode_tokens`: the most tokens of a request on either kind of stages.
    """

    def __init__(
        self, schedule: RequestSchedule, stages: int, prefill: QueueSizes, decode: QueueSizes
    ) -> None:
        self._schedule = schedule
        self._stages, self._slots = stages, decode.slots
        self._host_tokens = min(prefill.parked_tokens, decode.parked_tokens)
        self._kv_tokens = decode.n_slots or decode.kv_tokens
        self.prefill_tokens, self.decode_tokens = prefill.slot_tokens, decode.slot_tokens

    def follow(self, schedule: RequestSchedule) -> None:
        """Have turns begin by another schedule from now on; any thread may call this."""
        self._schedule = schedule

    @property
    def ahead(self) -> int:
        """Requests that should wait for the next turn: as many may be taken, if they are short."""
        return SHORT_PROMPTS * self._schedule.prefill_requests

    def turn(self, waiting: Sequence[Request], load: Load) -> int:
        """How many of those `waiting`, in their order, begin now."""
        present = load.decoding + load.arriving
        wanted, room = newcomers(self._schedule, self._stages, present, load.prefilling)
        room = min(room, self._slots - present)
        texts = [len(request.prompt_ids) for request in waiting]
        even = evened(self._schedule, min(wanted, room), room, texts)
        left, taken = self._room_of(load), 0
        for request in waiting[:even]:
            left = left.less(request)
            is_alone = not (taken or load.prefilling or load.decoding)
            if not (left.is_enough or is_alone):
                break
            taken += 1
        return taken

    def _room_of(self, load: Load) -> _Room:
        """The room that there is beside `load`, once those have left who are leaving."""
        requests = load.prefilling + load.decoding
        leaving = load.reserved * load.leaving / requests if requests else 0.0
        return _Room(
            self._host_tokens - load.host_tokens,
            self._kv_tokens - load.reserved + leaving,
        )


@dataclass(frozen=True)
class _Room:
    """The tokens for which there is room in host memory, and in the KV cache."""

    host_tokens: int
    kv_tokens: float

    def less(self, request: Request) -> _Room:
        return _Room(
            self.host_tokens - len(request.prompt_ids), self.kv_tokens - most_tokens(request)
        )

    @property
    def is_enough(self) -> bool:
        return self.host_tokens >= 0 and self.kv_tokens >= 0
