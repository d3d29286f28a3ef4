"""Rows in random order, where the lengths of prompts and answers are correlated (ExeGPT section 6).

A file is often sorted, or in parts that are alike: then stages would have long prompts and long
answers all at once, which no schedule for their mean is made for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

MOST_WAITING = 4096
"""Rows among which the next one is drawn: some MiB of prompts."""

T = TypeVar("T")


def in_random_order(items: Iterator[T], most_waiting: int = MOST_WAITING) -> Iterator[T]:
    """Yield all of `items`, each drawn from up to `most_waiting` that wait, the same in every run.

    At most two are read for one that is yielded, so that rows which come slowly are not waited for
    longer than they need be.
    """
    generator = random.Random(0)
    waiting: list[T] = []
    while True:
        for _ in range(2):
            if len(waiting) < most_waiting:
                waiting.extend(islice(items, 1))
        if not waiting:
            return
        chosen = generator.randrange(len(waiting))
        waiting[chosen], waiting[-1] = waiting[-1], waiting[chosen]
        yield waiting.pop()
