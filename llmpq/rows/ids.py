"""Ids made from content, and digests that fingerprint prompt and sampling."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

ID_HEX = 16
"""Digits of an id, 64 bits. Prompts that share them by chance count as repeats of one prompt."""

FINGERPRINT_HEX = 20

CACHE_KIB = 16 * 1024
"""Memory for a list of ids: half a million rows."""

_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


def digest(content: Mapping[str, Any], length: int) -> str:
    """`length` hexadecimal digits of `content`, in whichever order its keys are."""
    return hashlib.blake2b(_ENCODE(content).encode(), digest_size=length // 2).hexdigest()


class Occurrences:
    """Numbers of repeats of a content, in a temporary database.

    SQLite keeps that in its page cache and beyond it in a file that has no name.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("BEGIN")
        self._database.execute("CREATE TABLE seen (id INTEGER PRIMARY KEY, times INT)")

    def custom_id(self, content: Mapping[str, Any]) -> str:
        """Id of the next prompt of this content: its digest, and its number from the second on."""
        made = digest(content, ID_HEX)
        key = (int.from_bytes(bytes.fromhex(made), signed=True),)
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, 1)", key).rowcount:
            return f"p-{made}"
        again = "UPDATE seen SET times = times + 1 WHERE id = ? RETURNING times"
        (times,) = self._database.execute(again, key).fetchone()
        return f"p-{made}-{times}"
