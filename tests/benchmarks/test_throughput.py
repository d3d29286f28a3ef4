"""The comparison with transformers and vLLM: what is compared, and how results are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import Pace, spread
from benchmarks.speed.throughput import Results, Round, Turn, ratios, table
from benchmarks.speed.throughput_contestants import Case

PACE = Pace(600.0, 20.0)
EQUAL, MIXED, SHARED = (Case("llama", name) for name in ("equal", "mixed", "shared"))


def of(**rates: float) -> Round:
    return {name: Turn(rate, "", PACE) for name, rate in rates.items()}


@pytest.mark.parametrize("case", [EQUAL, MIXED])
def test_every_pass_has_new_prompts_of_the_same_lengths(case: Case) -> None:
    """A cache of prefixes finds nothing, not even a first block of 16 tokens."""
    passes = [case.prompts(turn) for turn in range(4)]
    assert all([len(prompt) for prompt in each] == case.lengths() for each in passes)
    starts = [tuple(prompt[:16]) for each in passes for prompt in each]
    assert len(set(starts)) == len(starts)
    assert case.prompts(3) == passes[3]  # the same for every contestant


def test_a_head_is_shared_within_a_pass_alone() -> None:
    first, second = SHARED.prompts(1), SHARED.prompts(2)
    heads = [{tuple(prompt[: SHARED.head_tokens]) for prompt in each} for each in (first, second)]
    assert [len(each) for each in heads] == [1, 1]
    assert first[0][:16] != second[0][:16]
    assert [len(prompt) for prompt in first] == SHARED.lengths()
    assert len({tuple(prompt[SHARED.head_tokens :][:16]) for prompt in first}) == len(first)


def test_ratios_are_taken_pass_by_pass() -> None:
    """A machine that is twice as fast in one pass is so for both."""
    rounds = [of(ours=100, vLLM=200), of(ours=210, vLLM=300), of(ours=300, vLLM=600)]
    assert ratios(rounds, "ours", "vLLM") == [0.5, 0.7, 0.5]
    assert spread(ratios(rounds, "ours", "vLLM"), 2) == "0.50 (0.50 to 0.70)"
    rows = "\n".join(table(rounds)).splitlines()
    assert rows[0].startswith("| contestant | tokens/s | / vLLM | bf16 GFLOP/s | copy GB/s |")
    assert rows[2].startswith("| ours | 210 (100 to 300) | 0.50 (0.50 to 0.70) | 600 (600 to 600)")
    assert rows[3].startswith("| vLLM | 300 (200 to 600) | 1 | ")


def test_finished_rounds_are_found_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", ["ours", "vLLM"])
    assert results.of(EQUAL) == []
    first, second = of(ours=1.5, vLLM=2), of(ours=3, vLLM=4)
    results.add(EQUAL, first)
    results.add(MIXED, second)
    results.add(EQUAL, second)
    again = Results(tmp_path / "results.jsonl", ["ours", "vLLM"])
    assert again.of(EQUAL) == [first, second]
    assert again.of(Case("llama", "equal", tiny=True)) == []


def test_rounds_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path, ["ours", "vLLM"]).add(EQUAL, of(ours=1, vLLM=2))
    with pytest.raises(SystemExit, match=r"line 1, .* with ours, vLLM; give another --results"):
        Results(path, ["ours"]).of(EQUAL)
