"""Reasoning told from the answer: whole texts as vLLM's parsers divide them, and in any pieces."""

from __future__ import annotations

import random

import pytest

from llmpq.tokenizing.reasoning import Markers, ReasoningStream, divided

THINK = Markers("<think>", "</think>")
ASKED, OPENED, CLOSED = "<|im_start|>assistant\n", "assistant\n<think>\n", "<think>\n\n</think>\n\n"

CASES = [
    ("<think>\nso\n</think>\n\n4", ASKED, "\nso\n", "\n\n4"),
    ("\n<think>so</think>4", ASKED, "so", "4"),
    ("so</think>4", OPENED, "so", "4"),
    (" so </think> 4 ", OPENED, " so ", " 4 "),
    ("<think>so</think>4", OPENED, "so", "4"),  # DeepSeek-R1 may open once more
    ("so and", OPENED, "so and", ""),
    ("<think>so and", ASKED, "so and", ""),
    ("<think>so</thi", ASKED, "so</thi", ""),
    ("<think></think>4", ASKED, "", "4"),
    ("", OPENED, "", ""),
    ("4", ASKED, None, "4"),
    ("", ASKED, None, ""),
    (" <thin", ASKED, None, " <thin"),
    ("a <think> b", ASKED, None, "a <think> b"),
    ("4 </think> and <think>", CLOSED, None, "4 </think> and <think>"),
    ("<think>a</think>b</think>c", ASKED, "a", "b</think>c"),
]
"""Text of the answer, end of the prompt, reasoning, content."""


@pytest.mark.parametrize(("text", "prompt_end", "reasoning", "content"), CASES)
def test_whole_answers(text: str, prompt_end: str, reasoning: str | None, content: str) -> None:
    assert divided(text, THINK, prompt_end) == (reasoning, content)


def test_reasoning_that_nothing_opened() -> None:
    """All before the closing marker; a stream cannot know it until then."""
    assert divided("so</think>4", THINK, ASKED) == ("so", "4")
    stream = ReasoningStream(THINK, ASKED)
    assert stream.add("so</think>4") == ("", "so</think>4")


@pytest.mark.parametrize(("text", "prompt_end", "reasoning", "content"), CASES)
def test_pieces_of_any_size(
    text: str, prompt_end: str, reasoning: str | None, content: str
) -> None:
    draw = random.Random(text)
    for _ in range(20):
        stream, left = ReasoningStream(THINK, prompt_end), text
        parts: list[tuple[str, str]] = []
        while left:
            size = draw.choice((1, 2, 5, 9))
            parts.append(stream.add(left[:size]))
            left = left[size:]
        parts.append(stream.finish())
        assert "".join(part for part, _ in parts) == (reasoning or "")
        assert "".join(part for _, part in parts) == content
        assert stream.has_reasoning == (reasoning is not None)


def test_what_is_certain_is_not_held_back() -> None:
    stream = ReasoningStream(THINK, OPENED)
    assert stream.add("a</") == ("a", "")
    assert stream.add("b</think") == ("</b", "")
    assert stream.add(">c<") == ("", "c<")
