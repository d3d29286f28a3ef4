"""What identifies a prompt: ids made from content, and fingerprints of prompt and sampling."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

ID_HEX = 16
"""64 bits. Two prompts that share them by chance count as repeats of one and stay apart."""

FINGERPRINT_HEX = 20


def digest(content: Mapping[str, Any], length: int) -> str:
    """`length` hexadecimal digits that stand for `content`, in whichever order its keys are."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=length // 2).hexdigest()


class Occurrences:
    """Numbers the repeats of a content; the counts lie in a temporary database.

    SQLite keeps that in its page cache (2 MB) and beyond it in a file that has no name.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("BEGIN")
        self._database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, times INT) WITHOUT ROWID")

    def custom_id(self, content: Mapping[str, Any]) -> str:
        """Id of the next prompt of this content: its digest, and its number from the second on."""
        made = digest(content, ID_HEX)
        cursor = self._database.execute(
            "INSERT INTO seen VALUES (?, 1) ON CONFLICT DO UPDATE SET times = times + 1 "
            "RETURNING times",
            (bytes.fromhex(made),),
        )
        (times,) = cursor.fetchone()
        return f"p-{made}" if times == 1 else f"p-{made}-{times}"
