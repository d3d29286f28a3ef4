"""Text for people: no control characters or secrets, near names, the text that tokens add."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Protocol

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
    r"(?P<key>\b(?:token|access_token|api_key|password|signature|sig)=)[^&\s'\"]+|"
    r"(?P<bearer>\bBearer )\S+",
    re.IGNORECASE,
)
"""Matches user and password in an address (with one slash where it went through a path, or without
a scheme; up to the last @, as passwords may hold one), tokens of the hub, and tokens in a query or
a header."""


def printable(text: str, most: int | None = None) -> str:
    """Escape control characters, which could control a terminal, hide secrets, and cut the middle
    out beyond `most` characters.
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


def in_ascii(text: str) -> str:
    """The text with escapes for what is no ASCII, which alone Ray's metrics take as tags."""
    return text.replace("…", "...").encode("ascii", "backslashreplace").decode()


def without_secrets(text: str) -> str:
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _SECRETS.sub(_starred, text)


def _starred(found: re.Match[str]) -> str:
    kept = found["user"] or found["key"] or found["bearer"] or ""
    return f"{kept}***{'@' if found['user'] or found['bare'] else ''}"


def without_user(address: str) -> str:
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|", address)
    begin = "" if scheme is None else scheme[0]
    return f"{begin}{address[len(begin) :].rpartition('@')[2]}"


_MOST = 3

# One name must be as near as `t4` is to `t5`; the next ones may share less.
_NEAR, _NOT_FAR = 0.5, 0.3
_SHARE_OF_PATTERN = 0.15


def near_names(wanted: str, names: Mapping[str, str]) -> tuple[str, ...]:
    best: dict[str, float] = {}
    for key, name in names.items():
        best[name] = max(best.get(name, 0.0), _likeness(wanted, key))
    if max(best.values(), default=0.0) < _NEAR:
        return ()
    near = (name for name, likeness in best.items() if likeness >= _NOT_FAR)
    return tuple(sorted(near, key=lambda name: -best[name])[:_MOST])


def _likeness(one: str, other: str) -> float:
    """The share of letters and digits in common, and for a part of their pattern: digits err more
    often.
    """
    patterns = [re.sub(r"\d", "0", text) for text in (one, other)]
    same, alike = (SequenceMatcher(None, *pair).ratio() for pair in ((one, other), patterns))
    return (1 - _SHARE_OF_PATTERN) * same + _SHARE_OF_PATTERN * alike


INCOMPLETE = "\ufffd"
"""Decoders put this in place of bytes that are no whole character, perhaps only for now."""

MOST_BEFORE = 32
"""Tokens before others that are looked at for the last one with a text: prompts of chats end with
some special tokens, and a character has at most four tokens."""


class Decoder(Protocol):
    """The part of a tokenizer that makes texts."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Text of `token_ids`."""


def text_after(
    tokenizer: Decoder,
    before: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """The text that `token_ids` add to that of `before`: a difference of two texts, as decoders
    treat the beginning differently (SentencePiece leaves out its first space).
    """

    def text(ids: list[int], skip: bool = True) -> str:
        decoded: str = tokenizer.decode(ids, skip_special_tokens=skip)
        return decoded

    behind: list[int] = []
    first = ""
    for token in reversed(before[-MOST_BEFORE:]):
        longer = text([token, *behind])
        if longer == first and text([token]) != text([token], skip=False):
            continue  # a special token
        behind, first = [token, *behind], longer
        is_cut = first.startswith(INCOMPLETE) and text([*behind, *token_ids]).startswith(INCOMPLETE)
        if first and not is_cut:
            break  # the tokens before change nothing in what follows these
    both = text([*behind, *token_ids], skip_special_tokens)
    while first.endswith(INCOMPLETE) and not both.startswith(first):
        first = text(behind := behind[:-1])
    if both.startswith(first):
        return both[len(first) :]
    return text([*token_ids], skip_special_tokens)  # bytes may make those before no character


_OURS: Mapping[str, str] = {
    "trust_remote_code": (
        "llmpq runs no code that comes with a model: give a checkpoint that needs none"
    ),
    "local_files_only": "allow the network (is HF_HUB_OFFLINE set?) or give a local folder",
    "token=<": "log in with `hf auth login`, or set HF_TOKEN",
    "use_auth_token": "log in with `hf auth login`, or set HF_TOKEN",
    "ignore_mismatched_sizes": "give the weights of this configuration",
    "force_download": "remove it from the hub's cache",
}
"""By an argument that other libraries propose: the advice that llmpq gives instead."""

_SENTENCE_END = re.compile(r"((?<=[.!?;])\s+|\n+)")


def without_library_advice(text: str) -> str:
    if not any(argument in text for argument in _OURS):
        return text
    advised: dict[str, None] = {}
    kept = []
    for part in _SENTENCE_END.split(text):
        advice = next((ours for argument, ours in _OURS.items() if argument in part), None)
        if advice is None:
            kept.append(part)
        else:
            advised[advice] = None
            kept.append(")" * (part.count(")") > part.count("(")))
    rest = "".join(kept).strip().rstrip(".;: \n")
    return f"{rest}; {'; '.join(advised)}" if rest else "; ".join(advised)


def library_reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = without_library_advice(" ".join(lines[:4]))
    return f"{type(error).__name__}: {said:.400}" if said else type(error).__name__


def path_reason(error: OSError | RuntimeError) -> str:
    """Why a path could not be looked at; pathlib raises RuntimeError at an unknown `~user`."""
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
