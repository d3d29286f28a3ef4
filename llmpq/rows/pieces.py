"""Parts of answers, before they are given OpenAI's form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenText:
    """A token with its log-probability and those of alternatives, best first, as texts.

    `offset`: characters of the answer before it.
    """

    text: str
    offset: int
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """Next part of choice `index`: a text, perhaps empty in the last one, which says why it ends.

    `reasoning`: what stands before it and is no part of the answer, where that is told apart;
    `new_tokens`: tokens generated since the piece before, end tokens included. `tokens`: those that
    the text is of, where log-probabilities are wanted.
    """

    index: int
    text: str
    new_tokens: int
    tokens: tuple[TokenText, ...] = ()
    finish_reason: str | None = None
    reasoning: str | None = None
