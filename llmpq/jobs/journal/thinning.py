"""Keeping a journal small: fewer points the longer a session lasts, and fewer of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmpq.jobs.journal.entries import Point, UnreadableEntryError, Work, entry_of
from quant.common.files import write_whole

THIN_BYTES = 2**19
"""Bytes of a journal from which on a new session leaves out half the points of those before."""


@dataclass
class Cadence:
    """Tells when the next point is due: every `share` of the age, within `least_s` and `most_s`."""

    least_s: float
    most_s: float
    share: float
    began_s: float
    due_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether a point is due; the next one is then due later."""
        if now_s < self.due_s:
            return False
        age_s = now_s - self.began_s
        self.due_s = now_s + min(self.most_s, max(self.least_s, self.share * age_s))
        return True


def point_cadence(began_s: float) -> Cadence:
    """One a second in the first minutes, one a minute from seven hours on: 0.6 MB in a week."""
    return Cadence(0.9, 60.0, 1 / 400, began_s)


def work_cadence(began_s: float) -> Cadence:
    """What the stages have done: only the latest is of use."""
    return Cadence(5.0, 7200.0, 1 / 10, began_s)


def thin_out(path: Path) -> None:
    """Leave out every second point of a large journal, what was overtaken and what is no entry.

    Raises OSError as the disk does; the journal is replaced whole or not at all.
    """
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size < THIN_BYTES:
            return
    except FileNotFoundError:
        return
    kept: list[bytes] = []
    points = 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = entry_of(line)
            except UnreadableEntryError:
                continue
            points += isinstance(entry, Point)
            if isinstance(entry, Work) or (isinstance(entry, Point) and points % 2):
                continue
            kept.append(line)
    write_whole(path, b"".join(kept).decode())
