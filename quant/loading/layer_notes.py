"""Telling who asked for it of every layer that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_note: ContextVar[Callable[[], None] | None] = ContextVar("note of a loaded layer", default=None)


@contextmanager
def noting_layers(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` for every layer that this thread loads meanwhile."""
    before = _note.set(note)
    try:
        yield
    finally:
        _note.reset(before)


def note_layer() -> None:
    """Tell of one loaded layer."""
    note = _note.get()
    if note is not None:
        note()
