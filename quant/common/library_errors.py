"""Messages of other libraries' errors, without advice that users of llmpq cannot follow."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    """Replace sentences that propose another library's argument by llmpq's advice at the end."""
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
    """The type of an error of another library and the first lines of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = without_library_advice(" ".join(lines[:4]))
    return f"{type(error).__name__}: {said:.400}" if said else type(error).__name__


def path_reason(error: OSError | RuntimeError) -> str:
    """Why a path could not be looked at; pathlib raises RuntimeError at an unknown `~user`."""
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
