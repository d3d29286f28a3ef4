"""Room that is known: what needs no more than something that has room has room too."""

from __future__ import annotations

from collections.abc import Callable

Need = tuple[int, ...]


class KnownRoom:
    """Remembers what `has_room` said of needs, none of which takes less when a number rises."""

    def __init__(self, has_room: Callable[[Need], bool]) -> None:
        self._has_room = has_room
        self._known: dict[Need, bool] = {}
        self._most: list[Need] = []
        self._too_much: list[Need] = []

    def __call__(self, need: Need) -> bool:
        """Whether a need has room."""
        if need not in self._known:
            self._known[need] = self._asked(need)
        return self._known[need]

    def _asked(self, need: Need) -> bool:
        if any(_covers(each, need) for each in self._most):
            return True
        if any(_covers(need, each) for each in self._too_much):
            return False
        if self._has_room(need):
            self._most = [each for each in self._most if not _covers(need, each)] + [need]
            return True
        self._too_much = [each for each in self._too_much if not _covers(each, need)] + [need]
        return False


def _covers(more: Need, less: Need) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))
