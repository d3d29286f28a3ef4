"""Text of unknown origin as a terminal or a log may show it."""

from __future__ import annotations

import os
import re

_KEPT_CONTROLS = "\n\t"
_END_CHARACTERS = 300
"""Kept of the end of what is cut: there stands the remedy."""

SECRET_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "RAY_AUTH_TOKEN",
    "RAY_REDIS_PASSWORD",
    "AWS_SECRET_ACCESS_KEY",
)
"""Of the environment. Files of tokens are read by their libraries alone."""

_LEAST_SECRET = 6  # characters: shorter ones would blot out ordinary words
_SECRETS = re.compile(
    r"(?P<user>:/{1,2})(?:[^/@\s'\":]*:[^\s'\"]*|[^/@\s'\"]+)@|"
    r"(?<![^\s'\"=(,])(?P<bare>[^\s'\":/=(,]+:(?![\s/])[^\s'\"]*@)(?=[\w\[])|"
    r"\bhf_[A-Za-z0-9]{8,}|"
    r"(?P<key>\b(?:token|access_token|api_key|password)=)[^&\s'\"]+|"
    r"(?P<bearer>\bBearer )\S+",
    re.IGNORECASE,
)
"""User and password in an address (with one slash where it went through a path, or without scheme;
up to the last @, as passwords may hold one), tokens of the hub, tokens in a query or a header.
"""


def printable(text: str, most: int | None = None) -> str:
    """`text` without control characters, which could drive a terminal, hide or reorder words
    (escaped as in Python), and without secrets. Of more than `most` characters the middle is left
    out.
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
    """`text` with stars for what looks like a secret or is one of this process's."""
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _SECRETS.sub(_starred, text)


def _starred(found: re.Match[str]) -> str:
    kept = found["user"] or found["key"] or found["bearer"] or ""
    return f"{kept}***{'@' if found['user'] or found['bare'] else ''}"


def without_user(address: str) -> str:
    """`address` without user and password, whatever characters these have."""
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|", address)
    begin = "" if scheme is None else scheme[0]
    return f"{begin}{address[len(begin) :].rpartition('@')[2]}"
