"""A live run that several pipelines share: a request goes to that with the least to do, and those
of one that is lost go to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from threading import Condition

from actors.live_group import Live
from actors.messages import Progress, Request
from actors.recovery.faults import RunInterruptedError
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError

FEW_SHARE = 8
"""The share of its slots that waits at a pipeline for the next ones: so that little is bound to one
when there is nothing left for the others."""


class SharedRun:
    """Hands requests to the live runs of replicas, which follow `plans`; `whole` where nobody wants
    to know of tokens before the end of their answer.

    A request goes to the replica that has the fewest tokens to do for its token slots, those that
    wait there counted; where there is none, it waits here. `changed` guards all; `check` is called
    by whoever waits for events, and may raise.
    """

    def __init__(
        self, plans: Sequence[PlanSpec], whole: bool, changed: Condition, check: Callable[[], None]
    ) -> None:
        self.is_whole = whole
        self._changed, self._check = changed, check
        self._slots = [each.workload.global_batch for each in plans]
        self._few = [few_requests(each) for each in plans]
        self._kv_tokens = [each.workload.kv_tokens for each in plans]
        self._lives: list[Live | None] = [None] * len(plans)
        self._held: list[dict[str, Request]] = [{} for _ in plans]
        self._reserved = [0] * len(plans)  # tokens of all that each holds
        self._waiting: dict[str, Request] = {}
        self._told: list[Progress] = []
        self._closed = self._is_stopped = self._wants = False

    def submit(self, *requests: Request) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("a live run takes no requests after close()")
            for each in requests:
                if each.custom_id in self._waiting or self._holder(each.custom_id) is not None:
                    raise SpecError(f"custom_id {each.custom_id!r:.80} is in the run twice")
                self._waiting[each.custom_id] = each
            self._hand_out()

    def cancel(self, custom_id: str) -> None:
        with self._changed:
            self._told = [each for each in self._told if each.custom_id != custom_id]
            replica = self._holder(custom_id)
            if replica is None:
                self._waiting.pop(custom_id, None)
            else:
                self._drop(replica, custom_id)
                live = self._lives[replica]
                if live is not None:
                    live.cancel(custom_id)
            self._end_if_done()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._end_if_done()

    def interrupt(self) -> None:
        """Have all replicas leave what they generate, and whoever waits for events too."""
        with self._changed:
            self._is_stopped = True
            for live in self._lives:
                if live is not None:
                    live.interrupt()
            self._changed.notify_all()

    def halt(self) -> tuple[Progress, ...]:
        self.interrupt()
        with self._changed:
            self._changed.wait_for(lambda: not any(self._lives))
            told, self._told = tuple(self._told), []
        return told

    @property
    def under_way(self) -> int:
        return len(self._waiting) + sum(map(len, self._held))

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The requests under way, with the tokens that are known of those nobody holds."""
        with self._changed:
            return (*self._waiting.values(), *(r for held in self._held for r in held.values()))

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        lives = [live for live in self._lives if live is not None]
        return {name: n for live in lives for name, n in live.tokens_in_flight.items()}

    @property
    def wanted(self) -> int:
        """How many requests to submit together now: for free slots where few wait."""
        with self._changed:
            found = -len(self._waiting)
            rooms = zip(self._lives, self._held, self._slots, self._few, strict=True)
            for live, held, slots, few in rooms:
                if live is not None and len(held) < slots + few:
                    found += slots + 2 * few - len(held)
        return max(0, found)

    def events(self) -> Generator[tuple[Progress, ...]]:
        """Yield tokens and ends, and nothing where another replica wants requests."""
        while True:
            with self._changed:
                self._check()
                while not (self._told or self._wants or self._has_ended or self._is_stopped):
                    self._changed.wait()
                    self._check()
                told, self._told = tuple(self._told), []
                if not told and self._has_ended:
                    return
                if not told and self._is_stopped:
                    raise RunInterruptedError
                self._wants = False
            yield told

    @property
    def has_ended(self) -> bool:
        """Whether a replica has nothing to do for it any more; `changed` is held."""
        return self._is_stopped or self._has_ended

    @property
    def _has_ended(self) -> bool:
        return self._closed and not self.under_way

    def join(self, replica: int, live: Live) -> None:
        """Have a replica take part by its run `live`."""
        with self._changed:
            self._lives[replica] = live
            if self._is_stopped:
                live.interrupt()
            self._wants = True
            self._hand_out()
            self._end_if_done()

    def take(self, replica: int, told: Sequence[Progress]) -> int:
        """Take in what a replica tells; returns how many of its requests have ended."""
        with self._changed:
            held = self._held[replica]
            new = [each for each in told if each.custom_id in held]
            ended = [each.custom_id for each in new if each.finish_reason is not None]
            for custom_id in ended:
                self._drop(replica, custom_id)
            self._told += new
            self._end_if_done()
        return len(ended)

    def leave(self, replica: int) -> int:
        """Have a lost replica's requests go on at the others; returns how many they are."""
        with self._changed:
            live, self._lives[replica] = self._lives[replica], None
            held, self._held[replica] = self._held[replica], {}
            self._reserved[replica] = 0
            known = {} if live is None else {each.custom_id: each for each in live.unfinished}
            self._waiting |= {name: known.get(name, request) for name, request in held.items()}
            self._hand_out()
        return len(held)

    def _hand_out(self) -> None:
        ready = {index: live for index, live in enumerate(self._lives) if live is not None}
        if ready and not self._is_stopped:
            given: dict[int, list[Request]] = {index: [] for index in ready}
            for name, request in self._waiting.items():
                index = min(ready, key=lambda i: (self._reserved[i] / self._kv_tokens[i], i))
                self._held[index][name] = request
                self._reserved[index] += _tokens(request)
                given[index].append(request)
            self._waiting.clear()
            for index, requests in given.items():
                if requests:
                    ready[index].submit(*requests)
        self._changed.notify_all()

    def _holder(self, custom_id: str) -> int | None:
        return next((i for i, held in enumerate(self._held) if custom_id in held), None)

    def _drop(self, replica: int, custom_id: str) -> None:
        self._reserved[replica] -= _tokens(self._held[replica].pop(custom_id))

    def _end_if_done(self) -> None:
        if self._has_ended:
            for live in self._lives:
                if live is not None:
                    live.close()
        self._changed.notify_all()


def few_requests(plan: PlanSpec) -> int:
    """Requests that wait at a pipeline when its slots are full: for a prefill at least."""
    slots = plan.workload.global_batch
    return max(min(plan.micro_batches.prefill, slots), -(-slots // FEW_SHARE))


def _tokens(request: Request) -> int:
    return len(request.prompt_ids) + request.max_new_tokens
