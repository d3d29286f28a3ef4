"""Spoiling valid input at random: JSON by its values, tables by their cells, anything by bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

Mutate = Callable[[bytes, random.Random], bytes]

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.0, 0.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63),
    10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
    "", "a", "0", "1", "nan", "1e999", "9" * 5000, "../../etc/passwd", "/etc/passwd", "~nobody/x",
    "\x1b]0;owned\x07", "\x1b[2J", "[bold red]", "<script>alert(1)</script>", "\ud800", "\x00",
    "x" * 5000, "é" * 300, [], {}, [[]], [1, 2, 3], [None], {"a": 1}, {"": {}}, [[1, 2], [3, 4]],
)  # fmt: skip
"""Values that replace a field; nested ones are made anew each time."""

DEPTHS = (50, 500, 980, 20_000)
"""Depths of nested lists; Python's limit is 1,000."""

TOKENS = (
    b"../../", b"/etc/passwd", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"NaN", b"-1",
    b"1e999", b"9" * 400, b"9" * 4400, b"\xc2\xb2", b"\xd9\xa1", b"[" * 1500, b'{"a":' * 600,
    b"{}", b"null", b"\n", b",", b":", b'"', b"\\ud800", b"&a [*a]", b"*a", b"!!python/object:os",
    b"!!timestamp 9999-99-99", b"<<: ", b"? ", b"0x", b"1_0", b".inf", b"0o8", b"!!binary a",
)  # fmt: skip


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, tokens, cuts and repeats."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 8, 64, 4096)))
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                out[at:at] = rng.choice(TOKENS)
            case 3:
                del out[at:end]
            case 4:
                out[at:at] = out[at:end] * rng.choice((1, 2, 20))
            case _:
                del out[at : len(out) if rng.random() < 0.2 else end]
    return bytes(out)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """As one to three changes of values; of bytes where it is no JSON, and at times anyway."""
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    text = dumps(mutate_values(content, rng))
    return mutate_bytes(data, rng) if text is None else text


def mutate_values(content: Any, rng: random.Random) -> Any:
    """One to three values replaced, removed, added or exchanged; `content` is changed too."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = places_in(content)
        if not places:
            return hostile(rng)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[str(rng.choice(HOSTILE))[:50]] = hostile(rng)
            case 2:
                other, name = rng.choice(places)
                if _has(other, name):
                    holder[key] = _copied(other[name])
            case 3 if isinstance(holder[key], int | float):
                holder[key] = _changed(holder[key], rng)
            case _:
                holder[key] = hostile(rng)
    return content


def mutate_cells(data: bytes, rng: random.Random) -> bytes:
    """A CSV with some of its cells replaced, or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    rows = [line.split(b",") for line in data.split(b"\n")]
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(rows)
        value = str(rng.choice(HOSTILE)).encode("utf-8", "surrogatepass")
        match rng.randrange(5):
            case 0:
                row.append(value)
            case 1 if len(row) > 1:
                row.pop(rng.randrange(len(row)))
            case _:
                row[rng.randrange(len(row))] = value
    return b"\n".join(b",".join(row) for row in rows)


def mutate_framed(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, whose length is right but for one time in eight."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2 or not 0 < length <= len(data) - 8:
        return mutate_bytes(data, rng)
    header = mutate_json(data[8 : 8 + length].rstrip(), rng)
    size = rng.choice((0, 2**63, length + 1, 10**8)) if rng.random() < 0.125 else len(header)
    rest = data[8 + length :]
    rest = rest[: rng.randrange(len(rest) + 1)] if rng.random() < 0.1 else rest
    return size.to_bytes(8, "little") + header + rest


def hostile(rng: random.Random) -> Any:
    """A value that nobody means."""
    if rng.random() < 0.04:
        return nested(rng.choice(DEPTHS[:3]))
    return deepcopy(rng.choice(HOSTILE))


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def places_in(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document, outer ones first."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys = (
            list(holder)
            if isinstance(holder, dict)
            else range(len(holder or ()))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


def dumps(content: Any) -> bytes | None:
    """As JSON; None where Python cannot write it."""
    try:
        return json.dumps(content).encode()
    except (RecursionError, ValueError):
        return None


def _copied(value: Any) -> Any:
    try:
        return deepcopy(value)
    except RecursionError:
        return None


def _changed(number: float, rng: random.Random) -> float:
    try:
        return number * rng.choice((-1, 0, 1, 2, 1e3, 1e30, 0.5)) + rng.choice((0, 1, -1))
    except OverflowError:
        return -number


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)
