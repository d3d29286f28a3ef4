"""Making text of unknown origin safe to show: no control characters and no secrets."""

from __future__ import annotations

import os
import re

_KEPT_CONTROLS = "\n\t"
_END_CHARACTERS = 300
"""Characters kept of the end of a text that is cut, where the remedy stands."""

SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "RAY_AUTH_TOKEN",
    "RAY_REDIS_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
    "LLMPQ_API_KEY",
)
"""Environment variables that hold secrets. Files with tokens are read by their libraries only."""

_LEAST_SECRET = 6  # characters: shorter ones could be ordinary words
_SECRETS = re.compile(
    r"(?P<user>:/{1,2})(?:[^/@\s'\":]*:[^\s'\"]*|[^/@\s'\"]+)@|"
    r"(?<![^\s'\"=(,])(?P<bare>[^\s'\":/=(,]+:(?![\s/])[^\s'\"]*@)(?=[\w\[])|"
    r"\bhf_[A-Za-z0-9]{8,}|"
    r"(?P<key>\b(?:token|access_token|api_key|password)=)[^&\s'\"]+|"
    r"(?P<bearer>\bBearer )\S+",
    re.IGNORECASE,
)
"""Matches user and password in an address (with one slash where it went through a path, or without
a scheme; up to the last @, as passwords may hold one), tokens of the hub, and tokens in a query or
a header."""


def printable(text: str, most: int | None = None) -> str:
    """`text` without secrets, its control characters escaped as in Python, as they could control a
    terminal or hide and reorder words. The middle is left out of more than `most` characters.
    """
    text = without_secrets(text)
    if most is not None and len(text) > most:
        left = most - _END_CHARACTERS
        cut = len(text) - most
        text = f"{text[:left]} [{cut} characters left out] {text[-_END_CHARACTERS:]}"
    if text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() or each in _KEPT_CONTROLS
        else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def without_secrets(text: str) -> str:
    """`text` with stars in place of what looks like a secret or is a secret of this process."""
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _SECRETS.sub(_starred, text)


def _starred(found: re.Match[str]) -> str:
    kept = found["user"] or found["key"] or found["bearer"] or ""
    return f"{kept}***{'@' if found['user'] or found['bare'] else ''}"


def without_user(address: str) -> str:
    """`address` without user and password, whatever characters they contain."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|", address)
    begin = "" if scheme is None else scheme[0]
    return f"{begin}{address[len(begin) :].rpartition('@')[2]}"
