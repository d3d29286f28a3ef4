"""Rows that a job has to do and has done, on disk: memory does not grow with their number."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from llmpq.jobs.job_files import new_digest
from llmpq.rows.row import FINGERPRINT_HEX
from quant.common.errors import InputError

CACHE_KIB = 32 * 1024
"""Pages of the database in memory; the operating system caches the rest of its file."""

BATCH_ROWS = 1000
"""Rows noted in one call of the database, as a call costs more than a row."""

RECORD_BYTES = 26
"""Bytes of the record of a row: 16 that stand for its id, 10 for prompt and sampling."""

NAMED = 3
"""Number of ids that a message shows of each kind of change."""

_ID_CHARACTERS = 80

_TABLES = (
    "CREATE TABLE wanted (id BLOB PRIMARY KEY, fingerprint TEXT, place INT, tokens INT, kind INT) "
    "WITHOUT ROWID",
    "CREATE TABLE done (id BLOB PRIMARY KEY, fingerprint TEXT, failed INT, source INT, line INT, "
    "forgotten INT) WITHOUT ROWID",
)


_WANT = "INSERT OR IGNORE INTO wanted VALUES (?, ?, ?, ?, ?)"
_RECORD = "INSERT OR IGNORE INTO done VALUES (?, ?, ?, ?, ?, ?)"
_SUMS = "COUNT(*), COALESCE(SUM(w.tokens), 0)"
_BOTH = "wanted w JOIN done d ON d.id = w.id WHERE NOT d.forgotten"


class RowKind(IntEnum):
    """Kind of a row of the input: one that can run, or not (`BAD`).

    A bad row without an id of its own is `NAMELESS`: it is named by its place, so that the same row
    elsewhere is another one.
    """

    GOOD = 0
    BAD = 1
    NAMELESS = 2


_KEY_BYTES, _HEX = 16, FINGERPRINT_HEX
_NOTHING = f"'{'0' * _HEX}'"  # the digits of a row that cannot run
_DIGITS = f"CASE kind WHEN {RowKind.GOOD} THEN substr(fingerprint, -{_HEX}) ELSE {_NOTHING} END"
_RECORDS = f"SELECT hex(id) || {_DIGITS} FROM wanted WHERE kind < {RowKind.NAMELESS} ORDER BY id"
_EARLIER = "INSERT OR IGNORE INTO earlier "
_FAILED = "EXISTS (SELECT 1 FROM done d WHERE d.id = e.id AND d.failed)"
_NEW = (
    f"FROM wanted w WHERE kind < {RowKind.NAMELESS} "
    "AND NOT EXISTS (SELECT 1 FROM earlier e WHERE e.id = w.id)"
)
_ANOTHER = (
    f"FROM wanted w JOIN earlier e ON e.id = w.id WHERE kind < {RowKind.NAMELESS} "
    f"AND e.digits <> {_DIGITS} AND e.digits <> {_NOTHING} AND NOT {_FAILED}"
)
_GONE = (
    f"FROM earlier e WHERE e.digits <> {_NOTHING} AND NOT {_FAILED} "
    "AND NOT EXISTS (SELECT 1 FROM wanted w WHERE w.id = e.id)"
)


class WantedRow(NamedTuple):
    """A row of the input; `tokens` that it may generate at most."""

    custom_id: str
    fingerprint: str
    place: int
    tokens: int
    kind: RowKind = RowKind.GOOD


@dataclass(frozen=True)
class Tally:
    """Numbers of rows and tokens of a job.

    `rows` of the input, of which `resumed` were done already, `resumed_errors` of these in error;
    `max_tokens` that the others may generate at most.
    """

    rows: int
    resumed: int
    resumed_errors: int
    max_tokens: int

    @property
    def left(self) -> int:
        return self.rows - self.resumed


class Done(NamedTuple):
    """A result in `line` of `source`; an error is `forgotten` if its row is to run again."""

    fingerprint: str
    failed: bool
    source: int
    line: int
    forgotten: bool = False


@dataclass(frozen=True)
class InputChanges:
    """Differences between the rows of the input and those that the job was begun with.

    Numbers of rows that are `new`, `gone`, or whose id has `another` prompt or sampling, and the
    places of the first new and other ones. Rows that ended in an error, or could not be read, may
    be changed or taken out.
    """

    new: int = 0
    gone: int = 0
    another: int = 0
    new_places: tuple[int, ...] = ()
    another_places: tuple[int, ...] = ()

    def error(
        self, output: Path, blocked: bool, names: Mapping[int, str], gone: Iterable[str]
    ) -> InputError:
        """The error that tells the differences.

        `blocked`: a row of another prompt has a result already, beside which no other has room.
        `names` has the ids at the places, `gone` those of results without row, which are looked for
        only if there are any.
        """
        new = [names[place] for place in self.new_places]
        another = [names[place] for place in self.another_places]
        lost = list(islice(gone, NAMED)) if self.gone else []
        sampling = "another prompt or sampling"
        parts = (
            _part(self.new, "is new", "are new", new),
            _part(self.gone, "of before is gone", "of before are gone", lost),
            _part(self.another, f"has {sampling}", f"have {sampling}", another),
        )
        remedy = "pass --extend to keep what is done and do the other rows too"
        if blocked:
            remedy = "give a row of another prompt another custom_id"
        told = ", ".join(part for part in parts if part)
        return InputError(
            f"output {output} was made from other rows than those of this input: {told}; {remedy}, "
            "name another output or pass --overwrite"
        )


def shown_id(custom_id: str) -> str:
    """An id as a message shows it: a long one is cut."""
    cut = "…" if len(custom_id) > _ID_CHARACTERS else ""
    return f"{custom_id[:_ID_CHARACTERS]!r}{cut}"


def _part(count: int, one: str, many: str, ids: Sequence[str]) -> str:
    if not count:
        return ""
    more = ", …" if ids and count > len(ids) else ""
    named = f" ({', '.join(map(shown_id, ids))}{more})" if ids else ""
    return f"{count} {one if count == 1 else many}{named}"


class RowDatabase:
    """Rows to do and rows done, in a temporary file without a name, which no kill leaves behind.

    `replaced` counts the results that have a newer one, or are forgotten: lines that the output
    must lose in the end. Raises `InputError` when its folder (SQLITE_TMPDIR, TMPDIR, /var/tmp) is
    full.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("BEGIN")
        for table in _TABLES:
            self._database.execute(table)
        self.replaced = 0

    def want_all(self, rows: Iterable[WantedRow]) -> tuple[int, int] | None:
        """Note rows of the input; returns the second and the first place of an id given twice."""
        keyed = ((id_key(row.custom_id), *row[1:]) for row in rows)
        while batch := list(islice(keyed, BATCH_ROWS)):
            if self._insert_all(_WANT, batch) < len(batch):
                for key, _, place, *_ in batch:
                    earlier = self._one("SELECT place FROM wanted WHERE id = ?", key)[0]
                    if earlier != place:
                        return place, int(earlier)
        return None

    def wanted(self, custom_id: str) -> str | None:
        found = self._one("SELECT fingerprint FROM wanted WHERE id = ?", id_key(custom_id))
        return None if found is None else str(found[0])

    def repeated(self) -> Iterator[str]:
        """Fingerprints that several rows of the input have."""
        found = self._database.execute(
            f"SELECT fingerprint FROM wanted WHERE kind = {RowKind.GOOD} GROUP BY fingerprint "
            "HAVING COUNT(*) > 1"
        )
        return (str(fingerprint) for (fingerprint,) in found)

    def tally(self) -> Tally:
        rows, tokens = self._database.execute(f"SELECT {_SUMS} FROM wanted w").fetchone()
        done, done_tokens, failed = self._database.execute(
            f"SELECT {_SUMS}, COALESCE(SUM(d.failed), 0) FROM {_BOTH} "
            "AND d.fingerprint = w.fingerprint"
        ).fetchone()
        return Tally(rows, done, failed, tokens - done_tokens)

    def has_other_result(self) -> bool:
        """Whether a row has a result, and no error, of another fingerprint."""
        query = f"SELECT 1 FROM {_BOTH} AND d.fingerprint <> w.fingerprint AND NOT d.failed LIMIT 1"
        return self._database.execute(query).fetchone() is not None

    def row_blocks(self) -> Iterator[bytes]:
        """Records of named rows of the input, many at once; their order is their content's."""
        found = self._database.execute(_RECORDS)
        while batch := found.fetchmany(BATCH_ROWS):
            yield bytes.fromhex("".join(digits for (digits,) in batch))

    def rows_digest(self) -> str:
        seen = new_digest()
        for block in self.row_blocks():
            seen.update(block)
        return str(seen.hexdigest())

    def compare(self, earlier: Iterable[bytes]) -> InputChanges:
        """Differences to the rows of the records `earlier`, and to those with results."""
        self._database.execute("DROP TABLE IF EXISTS earlier")
        self._database.execute(
            "CREATE TABLE earlier (id BLOB PRIMARY KEY, digits TEXT) WITHOUT ROWID"
        )
        for block in earlier:
            ends = range(RECORD_BYTES, len(block) + 1, RECORD_BYTES)
            records = (block[end - RECORD_BYTES : end] for end in ends)
            rows = [(each[:_KEY_BYTES], each[_KEY_BYTES:].hex()) for each in records]
            self._insert_all(_EARLIER + "VALUES (?, ?)", rows)
        self._insert_all(_EARLIER + "SELECT id, substr(fingerprint, ?) FROM done", [(-_HEX,)])
        (gone,) = self._database.execute(f"SELECT COUNT(*) {_GONE}").fetchone()
        (new, new_places), (another, places) = map(self._places, (_NEW, _ANOTHER))
        return InputChanges(new, gone, another, new_places, places)

    def _places(self, rows: str) -> tuple[int, tuple[int, ...]]:
        (count,) = self._database.execute(f"SELECT COUNT(*) {rows}").fetchone()
        first = self._database.execute(f"SELECT place {rows} ORDER BY place LIMIT {NAMED}")
        return count, tuple(place for (place,) in first)

    def record(self, custom_id: str, done: Done) -> bool:
        """Note a result, return whether it counts: the later does, but no error after a success."""
        key = id_key(custom_id)
        if not self._insert_all(_RECORD, [(key, *done)]):
            return self._replace(key, done)
        self.replaced += done.forgotten
        return True

    def record_all(self, results: Iterable[tuple[str, Done]]) -> None:
        keyed: Iterator[tuple[Any, ...]]
        keyed = ((id_key(custom_id), *done) for custom_id, done in results)
        while batch := list(islice(keyed, BATCH_ROWS)):
            if self._insert_all(_RECORD, batch) == len(batch):
                self.replaced += sum(row[-1] for row in batch)
                continue
            for key, *values in batch:
                done = Done(*values)
                if self._done(key) == done:
                    self.replaced += done.forgotten
                else:
                    self._replace(key, done)

    def _replace(self, key: bytes, done: Done) -> bool:
        """Note a second result of a row; returns whether it counts."""
        earlier = self._done(key)
        if earlier is not None and not (earlier.failed or earlier.forgotten):
            self.replaced += 1
            return False
        self.replaced += (earlier is not None and not earlier.forgotten) + done.forgotten
        self._insert_all(_RECORD.replace("IGNORE", "REPLACE"), [(key, *done)])
        return True

    def done(self, custom_id: str) -> Done | None:
        return self._done(id_key(custom_id))

    def _done(self, key: bytes) -> Done | None:
        found = self._one(
            "SELECT fingerprint, failed, source, line, forgotten FROM done WHERE id = ?", key
        )
        return None if found is None else Done(*found)

    def counts(self, custom_id: str, source: int, line: int) -> bool:
        """Whether this line is the one that the output keeps of its id."""
        done = self.done(custom_id)
        return (
            done is not None and not done.forgotten and (done.source, done.line) == (source, line)
        )

    def done_counts(self) -> tuple[int, int]:
        """Number of results that the output keeps, and of errors among them."""
        query = "SELECT COUNT(*), COALESCE(SUM(failed), 0) FROM done WHERE NOT forgotten"
        rows, failed = self._database.execute(query).fetchone()
        return int(rows), int(failed)

    def close(self) -> None:
        self._database.close()

    def _insert_all(self, query: str, rows: Sequence[tuple[Any, ...]]) -> int:
        try:
            return self._database.executemany(query, rows).rowcount
        except sqlite3.OperationalError as error:
            raise InputError(
                f"the list of ids does not fit the temporary folder: {error}; set SQLITE_TMPDIR to "
                "a folder with about 150 bytes a row free"
            ) from error

    def _one(self, query: str, key: bytes) -> Any:
        return self._database.execute(query, (key,)).fetchone()


def id_key(custom_id: str) -> bytes:
    """A digest of 128 bits: two ids of 10^9 share one by chance once in 10^20 jobs."""
    content = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()
