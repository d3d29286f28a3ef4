"""JSON text read within a depth.

Python's reader refuses what nests too deeply at the end of its stack only, where anything else that
runs by chance fails too, as finalizers of the garbage collector do.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_LEVELS = 200
"""Lists and objects within each other; Python's stack has room for a thousand calls."""

_MARK = re.compile(r'([\[{])|([\]}])|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_OPENS, _CLOSES = 1, 2  # its groups; a string is neither


def loads(text: str | bytes, levels: int = MAX_LEVELS, **options: Any) -> Any:
    """Read as `json.loads` does; ValueError for what nests deeper than `levels`."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if text.count("[") + text.count("{") > levels:
        check_depth(text, 0, levels)
    return json.loads(text, **options)


def check_depth(text: str, start: int = 0, levels: int = MAX_LEVELS) -> None:
    """Raise ValueError where the value that begins at `start` nests deeper than `levels`."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        if mark.lastindex == _OPENS:
            depth += 1
            if depth > levels:
                raise ValueError(f"it nests too deeply: {levels} levels at most are read")
        elif mark.lastindex == _CLOSES:
            depth -= 1
            if depth <= 0:
                return
