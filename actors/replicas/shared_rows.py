"""The rows that replicas share: handed out one by one as slots become free, and given back by those
that are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Condition

from actors.messages import Finished, Request
from actors.recovery.faults import RunInterruptedError
from quant.common.errors import SpecError


class SharedRows:
    """Hands the requests of `source` to replicas, which have so many `slots` each.

    The thread that asks for `results` is the only one that reads the source, whenever a replica
    wants a request: so nothing is read that nobody waits for, and in order. Of replicas that want
    one it goes to the one that has fewest for its slots. All other methods are for the replicas'
    threads, which wait for `changed`.
    """

    def __init__(
        self, source: Iterator[Request | None], slots: Sequence[int], changed: Condition
    ) -> None:
        self._source, self._slots, self._changed = source, slots, changed
        self._held: list[dict[str, Request]] = [{} for _ in slots]
        self._offered: list[Request | None] = [None] * len(slots)
        self._wanting: set[int] = set()
        self._returned: deque[Request] = deque()
        self._finished: list[Finished] = []
        self._is_read = self._is_stopped = False

    def results(self, check: Callable[[], None]) -> Iterator[tuple[Finished, ...]]:
        """Yield what finished, each request once, and nothing where the source pauses.

        `check` is called while it waits, and may raise.
        """
        while True:
            with self._changed:
                check()
                while not (self._finished or self._has_ended or self._is_wanted):
                    self._changed.wait()
                    check()
                finished, self._finished = tuple(self._finished), []
                if not finished and self._has_ended:
                    return
            if finished:
                yield finished
            elif not self._hand_out_next():
                yield ()

    @property
    def _has_ended(self) -> bool:
        return self._is_read and not self._returned and not any(self._held)

    @property
    def _is_wanted(self) -> bool:
        return bool(self._wanting) and not self._is_read

    def _hand_out_next(self) -> bool:
        """Read the next request and hand it out; False where the source pauses."""
        for request in self._source:
            if request is None:
                return False
            self._hand_out(request)
            return True
        with self._changed:
            self._is_read = True
            self._changed.notify_all()
        return True

    def _hand_out(self, request: Request) -> None:
        """Offer `request` to the replica that has least to do."""
        with self._changed:
            name = request.custom_id
            if any(name in held for held in self._held) or self._is_waiting(name):
                raise SpecError(f"custom_id {name!r:.80} is in the run twice")
            if not self._wanting:  # whoever wanted it was lost meanwhile
                self._returned.append(request)
                return
            replica = min(self._wanting, key=lambda i: (len(self._held[i]) / self._slots[i], i))
            self._wanting.discard(replica)
            self._held[replica][name] = request
            self._offered[replica] = request
            self._changed.notify_all()

    def _is_waiting(self, custom_id: str) -> bool:
        return any(each.custom_id == custom_id for each in self._returned)

    def requests(self, replica: int) -> Iterator[Request]:
        """The requests of one replica, each as it is asked for; they end when no more are there.

        Raises `RunInterruptedError` once all are stopped.
        """
        while (request := self._next(replica)) is not None:
            yield request

    def _next(self, replica: int) -> Request | None:
        with self._changed:
            while True:
                if self._is_stopped:
                    raise RunInterruptedError
                if self._returned:
                    request = self._returned.popleft()
                    self._wanting.discard(replica)
                    self._held[replica][request.custom_id] = request
                    self._changed.notify_all()
                    return request
                if self._is_read:
                    self._wanting.discard(replica)
                    return None
                self._wanting.add(replica)
                self._changed.notify_all()
                while replica in self._wanting and not self._is_new_for_all:
                    self._changed.wait()
                offered, self._offered[replica] = self._offered[replica], None
                if offered is not None:
                    return offered

    @property
    def _is_new_for_all(self) -> bool:
        return self._is_stopped or self._is_read or bool(self._returned)

    def has_work(self) -> bool:
        """Whether a replica that has nothing should ask for requests; `changed` is held."""
        return not self._is_stopped and (not self._is_read or bool(self._returned))

    def finish(self, replica: int, finished: Collection[Finished]) -> int:
        """Take in what a replica has finished; returns how many requests of its own these are."""
        with self._changed:
            held = self._held[replica]
            new = [each for each in finished if held.pop(each.custom_id, None) is not None]
            self._finished += new
            self._changed.notify_all()
        return len(new)

    def give_back(self, replica: int, unfinished: Collection[Request]) -> int:
        """Take back all requests of a replica that is lost, with the tokens that those in
        `unfinished` have; returns how many they are.
        """
        tokens = {each.custom_id: each for each in unfinished}
        with self._changed:
            left = [tokens.get(name, request) for name, request in self._held[replica].items()]
            self._held[replica].clear()
            self._offered[replica] = None
            self._wanting.discard(replica)
            self._returned.extend(left)
            self._changed.notify_all()
        return len(left)

    def stop(self) -> None:
        """Hand out nothing any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Requests that were read and have not finished."""
        with self._changed:
            held = [request for each in self._held for request in each.values()]
            return (*self._returned, *held)

    def left_over(self) -> tuple[Finished, ...]:
        """What finished and `results` has not given out, once nobody asks it any more."""
        with self._changed:
            finished, self._finished = tuple(self._finished), []
        return finished
