"""Which ids a job has to do and which it has done, on disk: memory does not grow with the rows."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quant.errors import InputError

CACHE_KIB = 32 * 1024
"""Of the database's pages in memory; the operating system caches the rest of its file."""

_TABLES = (
    "CREATE TABLE wanted (id BLOB PRIMARY KEY, fingerprint TEXT, place INT) WITHOUT ROWID",
    "CREATE TABLE done (id BLOB PRIMARY KEY, fingerprint TEXT, failed INT, source INT, line INT, "
    "forgotten INT) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Done:
    """A result: its fingerprint, whether it is an error, in which line of which file it stands, and
    whether that error is to be `forgotten`, because its row runs again.
    """

    fingerprint: str
    failed: bool
    source: int
    line: int
    forgotten: bool = False


class Ledger:
    """A temporary database in a file without a name, which no kill leaves behind.

    `replaced` counts the results that have a newer one, or are forgotten: lines of which the output
    must get rid in the end. Raises `InputError` when its folder (SQLITE_TMPDIR, TMPDIR, /var/tmp)
    is full.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("BEGIN")
        for table in _TABLES:
            self._database.execute(table)
        self.replaced = 0

    def want(self, custom_id: str, fingerprint: str, place: int) -> int | None:
        """Note a row of the input; the place where the same id stands already, if it does."""
        key = _key(custom_id)
        with _room():
            added = self._database.execute(
                "INSERT OR IGNORE INTO wanted VALUES (?, ?, ?)", (key, fingerprint, place)
            )
            if added.rowcount:
                return None
            return int(self._one("SELECT place FROM wanted WHERE id = ?", key)[0])

    def wanted(self, custom_id: str) -> str | None:
        """Fingerprint of a row of the input."""
        found = self._one("SELECT fingerprint FROM wanted WHERE id = ?", _key(custom_id))
        return None if found is None else str(found[0])

    def record(self, custom_id: str, done: Done) -> bool:
        """Note a result; of two the later counts, unless it is an error or the earlier is none.

        Returns whether it counts.
        """
        earlier = self.done(custom_id)
        if earlier is not None and not (earlier.failed or earlier.forgotten):
            self.replaced += 1
            return False
        self.replaced += (earlier is not None and not earlier.forgotten) + done.forgotten
        values = (done.fingerprint, done.failed, done.source, done.line, done.forgotten)
        with _room():
            self._database.execute(
                "INSERT OR REPLACE INTO done VALUES (?, ?, ?, ?, ?, ?)", (_key(custom_id), *values)
            )
        return True

    def done(self, custom_id: str) -> Done | None:
        """The result of an id that counts."""
        found = self._one(
            "SELECT fingerprint, failed, source, line, forgotten FROM done WHERE id = ?",
            _key(custom_id),
        )
        if found is None:
            return None
        fingerprint, failed, source, line, forgotten = found
        return Done(fingerprint, bool(failed), source, line, bool(forgotten))

    def counts(self, custom_id: str, source: int, line: int) -> bool:
        """Whether this line is the one that the output keeps of its id."""
        done = self.done(custom_id)
        return (
            done is not None and not done.forgotten and (done.source, done.line) == (source, line)
        )

    def done_counts(self) -> tuple[int, int]:
        """Results that the output keeps, and how many of them are errors."""
        query = "SELECT COUNT(*), COALESCE(SUM(failed), 0) FROM done WHERE NOT forgotten"
        rows, failed = self._database.execute(query).fetchone()
        return int(rows), int(failed)

    def close(self) -> None:
        """Give its disk space back."""
        self._database.close()

    def _one(self, query: str, key: bytes) -> Any:
        return self._database.execute(query, (key,)).fetchone()


def _key(custom_id: str) -> bytes:
    """128 bits: two ids of 10^9 share them by chance once in 10^20 jobs."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise InputError(
            f"the list of ids does not fit the temporary folder: {error}; set SQLITE_TMPDIR to a "
            "folder with about 150 bytes a row free"
        ) from error
