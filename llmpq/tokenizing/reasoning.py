"""The reasoning of a model in the text of its answer, told from what it answers.

The parts are those of vLLM's parsers for DeepSeek and Qwen: all text between the markers and all
behind them, white space too.
"""

from __future__ import annotations

from typing import NamedTuple

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt in which a marker is looked for, with white space behind it: one
that is no token of the vocabulary has up to eleven letters."""


class Markers(NamedTuple):
    """The texts before and behind a model's reasoning."""

    opening: str
    closing: str

    def begun_by(self, prompt_end: str) -> bool | None:
        """Whether a prompt that ends so begins the reasoning; None for one that asks for none."""
        end = prompt_end.rstrip()
        return None if end.endswith(self.closing) else end.endswith(self.opening)


class ReasoningStream:
    """Divides an answer that comes in pieces into reasoning and content.

    An answer reasons until `closing` comes if it begins with `opening`, perhaps behind white space,
    or if the prompt, whose last text is `prompt_end`, ends so. A prompt that ends with `closing`
    asks for none. What may be a part of a marker is held back.
    """

    def __init__(self, markers: Markers, prompt_end: str) -> None:
        has_begun = markers.begun_by(prompt_end)
        self._markers = markers
        self._has_begun = has_begun is None
        self._held = ""
        self.has_reasoning = self._is_reasoning = bool(has_begun)

    def add(self, piece: str) -> tuple[str, str]:
        """Reasoning and content that are certain with `piece`."""
        text, self._held = self._held + piece, ""
        if not self._has_begun:
            text = self._begin(text)
        if not self._is_reasoning:
            return "", text
        reasoning, closing, content = text.partition(self._markers.closing)
        if closing:
            self._is_reasoning = False
            return reasoning, content
        kept = len(text) - overlap(text, self._markers.closing)
        self._held += text[kept:]
        return text[:kept], ""

    def _begin(self, text: str) -> str:
        """The `text` of an answer behind its opening marker; held back while this may yet come."""
        opening = self._markers.opening
        start = text.lstrip()
        if start != opening and opening.startswith(start):
            self._held = text
            return ""
        self._has_begun = True
        if not start.startswith(opening):
            return text
        self.has_reasoning = self._is_reasoning = True
        return start.removeprefix(opening)

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        return (held, "") if self._is_reasoning else ("", held)


def divided(
    text: str, markers: Markers, prompt_end: str, has_form: bool = False
) -> tuple[str | None, str]:
    """Reasoning (None: none) and content of an answer; a closing marker is enough for it, unless it
    may be a text in an answer that has a form.
    """
    is_open = markers.begun_by(prompt_end) is not None and not has_form
    stream = ReasoningStream(
        markers, markers.opening if is_open and markers.closing in text else prompt_end
    )
    parts = zip(stream.add(text), stream.finish(), strict=True)
    reasoning, content = map("".join, parts)
    return (reasoning if stream.has_reasoning else None), content


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)
