"""Rows whose answers are as long as their prompts say, and a predictor that is made by hand."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from llmpq.lengths.boosting import ID_FEATURES, Boosting, Trees
from llmpq.lengths.finished_rows import LearntRow
from llmpq.lengths.folder import save_predictor
from llmpq.lengths.predictor import BucketModel, Prompt, expected_tokens

BUCKETS = (10, 20, 40)
TOPICS = ("birds", "python", "rome", "rice", "mars")
KINDS = (
    ("Is {} nice? Answer yes or no.", 4),
    ("Summarize {} in a sentence.", 16),
    ("Write a long story on {}.", 38),
)
"""Prompts by what they ask for, and the tokens of their answers."""


def learnable(count: int, seed: int = 0, turned: bool = False) -> list[LearntRow]:
    """Rows of each kind in turn; `turned`: what asked for long answers asks for short ones."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        kind = draw.randrange(len(KINDS))
        text = KINDS[kind][0].format(draw.choice(TOPICS))
        tokens = KINDS[len(KINDS) - 1 - kind if turned else kind][1]
        ids = tuple(ord(each) for each in text)
        rows.append(LearntRow(Prompt(f"r{seed}-{number}", 64, ids, text), tokens))
    return rows


def prompts_of(rows: list[LearntRow]) -> list[Prompt]:
    return [row.prompt for row in rows]


def tokens_of(rows: list[LearntRow]) -> list[int]:
    return [row.tokens for row in rows]


def expected(model: BucketModel, prompts: list[Prompt]) -> list[int]:
    return expected_tokens(model, model.encode(prompts), [each.limit for each in prompts])


def by_prompt_length(tokenizer: str = "any", value: float = 9.0) -> Boosting:
    """Predicts 10 tokens of prompts of at most 5 tokens, 20 of at most 9, else 40.

    Its tree asks for feature 1, the number of token ids.
    """
    nodes = np.array([[0, 1, 2, 3, 4]])
    feature = np.array([[1, 0, 1, 0, 0]])
    left, right = nodes.copy(), nodes.copy()
    left[0, 0], right[0, 0], left[0, 2], right[0, 2] = 1, 2, 3, 4
    threshold = np.array([[5.0, 0, 9.0, 0, 0]])
    values = np.zeros((3, 5))
    values[0, 1] = values[1, 3] = values[2, 4] = value
    trees = Trees(
        *(np.repeat(each, 3, axis=0) for each in (feature, threshold, left, right)),
        value=values,
        column=np.arange(3),
        base=np.zeros(3),
    )
    features = np.zeros((1, ID_FEATURES), dtype=np.float32)
    return Boosting(BUCKETS, trees, features, np.array([4]), tokenizer, False, 1)


def expected_by_hand(prompt: Prompt) -> int:
    """What `by_prompt_length` should expect."""
    tokens = len(prompt.token_ids)
    return min(prompt.limit, 10 if tokens <= 5 else 20 if tokens <= 9 else 40)


def saved(folder: Path, model: Boosting | None = None) -> Path:
    """The folder of a predictor, by default that by prompt length."""
    save_predictor(folder, model or by_prompt_length(), np.diag([3, 4, 5]))
    return folder
