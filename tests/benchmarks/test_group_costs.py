"""The costs of groups from the datasheet stay near measured ones: rows that splitwise-sim publishes
(MIT), prompts of 128 and 512 tokens with 128 new ones.
"""

from __future__ import annotations

import numpy as np

from benchmarks.planning.scale.measured_groups import Row, Setup, predicted_s, relative_errors

ROWS = (
    Row(Setup("llama2-70b", "a100-80gb", 2), 512, 1, 128, 0.19686, 0.054856),
    Row(Setup("llama2-70b", "a100-80gb", 2), 512, 8, 128, 1.59683, 0.061692),
    Row(Setup("llama2-70b", "a100-80gb", 8), 512, 1, 128, 0.09431, 0.044852),
    Row(Setup("llama2-70b", "a100-80gb", 8), 128, 1, 128, 0.06535, 0.043031),
    Row(Setup("bloom-176b", "a100-80gb", 8), 512, 1, 128, 0.17381, 0.048764),
    Row(Setup("llama2-70b", "h100-80gb", 2), 512, 1, 128, 0.08383, 0.037),
    Row(Setup("llama2-70b", "h100-80gb", 2), 512, 8, 128, 0.60602, 0.040405),
)


def test_the_datasheet_alone_is_within_15_percent_in_the_mean() -> None:
    errors = np.abs(relative_errors(ROWS))
    assert errors.mean() <= 0.15
    assert errors.max() <= 0.35


def test_eight_ranks_bring_a_token_as_much_as_was_measured() -> None:
    """LLaMA-2-70B: 55 ms on two GPUs, 45 on eight, as sums and launches do not get fewer."""
    two, eight = predicted_s([ROWS[0], ROWS[2]])[:, 1]
    assert abs((two / eight) / (54.856 / 44.852) - 1) <= 0.15
