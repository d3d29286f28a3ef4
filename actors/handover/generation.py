"""Whole answers of any number of requests, by a live run that takes them in as it has room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from actors.handover.live import DividedLive
from actors.messages import Finished, Progress, Request


class DividedGeneration:
    """Runs the requests of a source through `live`, which nobody else reads."""

    def __init__(self, live: DividedLive, source: Iterable[Request | None]) -> None:
        self.live = live
        self._source = iter(source)
        self._is_read = False
        self._tokens: dict[str, list[int]] = defaultdict(list)

    def results(self) -> Iterator[tuple[Finished, ...]]:
        """Yield what finished, each request once, and nothing where the source pauses.

        Raises what `DividedLive.next_events` raises, and what the source does.
        """
        live = self.live
        live.start()
        try:
            while True:
                paused = self._take_in()
                told = live.next_events(wait=not paused)
                if told is None:
                    break
                finished = self.finished(told)
                if finished or paused:
                    yield finished
            live.join()
        finally:
            live.stop()

    def _take_in(self) -> bool:
        """Submit as many requests as are wanted; returns whether the source has paused."""
        while not self._is_read and self.live.wanted:
            try:
                request = next(self._source)
            except StopIteration:
                self._is_read = True
                self.live.close()
                return False
            if request is None:
                return True
            self._tokens[request.custom_id] += request.generated
            self.live.submit(request)
        return False

    def finished(self, told: Sequence[Progress]) -> tuple[Finished, ...]:
        """Take in new tokens; returns the requests that ended with them."""
        ended: list[Finished] = []
        for each in told:
            self._tokens[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                tokens = tuple(self._tokens.pop(each.custom_id))
                ended.append(Finished(each.custom_id, tokens, each.finish_reason, each.error))
        return tuple(ended)
