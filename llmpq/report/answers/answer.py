"""A question that people ask of a plan, and its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A question in a few words, and a sentence that answers it by itself."""

    question: str
    text: str
