"""Seconds of prefills whose prompts are of unlike lengths.

The runtime computes all tokens of a micro-batch in one row, and takes prompts apart for attention.
So the rest of a layer is that of as many prompts of their mean length, and each prompt's attention
what it is among as many prompts of its own length. (Attention of the prompt alone would be less: on
a CPU by 10 to 15 %, as keys and values of the others are not between it and the caches.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, floor

import numpy as np

from planner.optimiser.problem import FloatArray

LENGTH_STEP = 0.02  # relative

PartsOf = Callable[[int, int], tuple[FloatArray, FloatArray]]
"""Seconds of attention and of the rest [N] for so many prompts that are all so long."""


def unlike_prompts_s(prompts: Sequence[int], parts: PartsOf) -> FloatArray:
    """Seconds of a micro-batch of `prompts` [N], from those of micro-batches of prompts alike."""
    requests, mean = len(prompts), sum(prompts) / len(prompts)
    low, high = lengths_around(mean)
    rest_s = parts(requests, low)[1]
    if high > low:
        rest_s = rest_s + (mean - low) / (high - low) * (parts(requests, high)[1] - rest_s)
    lengths = Counter(near_length(prompt) for prompt in prompts)
    attention_s = [count * parts(requests, length)[0] for length, count in lengths.items()]
    return np.asarray(np.sum(attention_s, axis=0) / requests + rest_s)


def near_length(tokens: int) -> int:
    """A length that stands for this one: within a half `LENGTH_STEP` of it, exact if it is short.

    Latency models are asked for few lengths then, however many a job has.
    """
    step = max(1, round(tokens * LENGTH_STEP))
    return step * ((2 * tokens + step) // (2 * step))


def lengths_around(length: float) -> tuple[int, int]:
    """The lengths between which time is taken as linear: whole, and some `LENGTH_STEP` apart."""
    step = 1 << max(0, floor(length * LENGTH_STEP).bit_length() - 1)
    return floor(length / step) * step, ceil(length / step) * step
