"""What planning assumes of predicted lengths, against counting token by token."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from planner.assumed_predictor import (
    BUCKETS,
    LONGEST,
    ORACLE,
    PREDICTOR_FILE,
    AssumedPredictor,
    PredictorFile,
    predictor_file,
)
from planner.lengths import Lengths
from planner.schedule.passes import JobRows
from planner.scheduling import GROWTH
from planner.workload import HOLES, Job, Workload
from quant.common.errors import SpecError


def random_lengths(rng: np.random.Generator) -> Lengths:
    count = int(rng.integers(1, 9))
    prompts, outputs = rng.integers(1, 50, count), rng.integers(1, 120, count)
    limit = int(outputs.max() + rng.integers(0, 40)) if rng.integers(2) else None
    total = None
    if rng.integers(2):
        most = outputs.max() if limit is None else limit
        total = int(rng.integers((prompts + outputs).max(), prompts.max() + most + 1))
    return Lengths(tuple(prompts.tolist()), tuple(outputs.tolist()), "seen", limit, total)


def random_predictor(rng: np.random.Generator) -> AssumedPredictor:
    count = int(rng.integers(1, 6))
    buckets = sorted(rng.choice(np.arange(1, 140), count, replace=False).tolist())
    confusion = rng.integers(0, 5, (count, count)) * rng.integers(0, 2, (count, 1))
    confusion[0, 0] += 1
    return AssumedPredictor("tried", tuple(buckets), tuple(map(tuple, confusion.tolist())))


def shares_of(predictor: AssumedPredictor, output: int) -> dict[int, float]:
    """How probably each number of new tokens is expected of an answer of `output` tokens."""
    buckets, confusion = predictor.buckets, predictor.confusion
    true = next((i for i, most in enumerate(buckets) if output <= most), len(buckets) - 1)
    counts = list(confusion[true])
    if not any(counts):
        counts = [sum(row[i] for row in confusion) for i in range(len(buckets))]
    return {most: n / sum(counts) for most, n in zip(buckets, counts, strict=True)}


@pytest.mark.parametrize("seed", range(30))
def test_reservations_are_those_of_a_walk_over_all_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, predictor = random_lengths(rng), random_predictor(rng)
    held = 0.0
    for prompt, output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True):
        longest = lengths.output_limit or output
        most = min(prompt + longest, lengths.longest_total or prompt + longest)
        for expected, share in shares_of(predictor, output).items():
            size = min(prompt + expected, most)
            for token in range(1, output + 1):
                if prompt + token - 1 > size:
                    size = min(2 * size, most)
                held += share * size
    mean = held / sum(lengths.output_tokens)
    assert predictor.mean_reserved(lengths) == pytest.approx(mean)
    assert mean <= lengths.mean_reserved


@pytest.mark.parametrize("seed", range(30))
def test_ranges_that_grow_are_those_of_a_walk_over_all_tokens(seed: int) -> None:
    lengths = random_lengths(np.random.default_rng(seed))
    held = 0
    for prompt, output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True):
        most = prompt + (lengths.output_limit or output)
        most = min(most, lengths.longest_total or most)
        size = min(prompt + GROWTH, most)
        for token in range(1, output + 1):
            if prompt + token - 1 > size:
                size = min(size + GROWTH, most)
            held += size
    mean = held / sum(lengths.output_tokens)
    assert lengths.mean_grown(GROWTH) == pytest.approx(mean)
    job = Job(99, lengths)
    assert job.in_flight(50, "s3").kv_tokens <= job.in_flight(50, "orca").kv_tokens
    assert job.mean_held("s3") == pytest.approx(mean)


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_predicted_as_often_as_the_confusion_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    predictor = random_predictor(rng)
    outputs = rng.integers(1, 140, 4000)
    expected = predictor.predicted(outputs.tolist())
    kinds = np.minimum(np.searchsorted(predictor.buckets, outputs), len(predictor.buckets) - 1)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        found = Counter(expected[row] for row in rows)
        for most, share in shares_of(predictor, int(outputs[rows[0]])).items():
            assert found[most] == pytest.approx(share * len(rows), abs=4)


def test_the_longest_is_what_orca_reserves() -> None:
    for seed in range(10):
        lengths = random_lengths(np.random.default_rng(seed))
        longest = AssumedPredictor.named(LONGEST, lengths)
        assert longest.mean_reserved(lengths) == pytest.approx(lengths.mean_reserved)
        job = Job(300, lengths, predictor=longest)
        assert (
            job.in_flight(7, "s3-published")
            == job.in_flight(7, "orca")
            == Job(300, lengths).in_flight(7, "s3-published")
        )


def test_the_oracle_knows_the_tenth_of_the_rows() -> None:
    lengths = Lengths((10,) * 20, (*range(1, 20), 95), "seen", 100)
    oracle = AssumedPredictor.named(ORACLE, lengths)
    assert oracle.buckets == (2, 4, 6, 8, 10, 12, 14, 16, 18, 100)
    assert len(oracle.buckets) == BUCKETS
    assert oracle.predicted(lengths.output_tokens[-3:]) == [18, 100, 100]
    assert oracle.accuracy == 1.0
    held = sum((n + n % 2 + 10) * n for n in range(1, 19)) + (19 + 95) * 110
    assert oracle.mean_reserved(lengths) == pytest.approx(held / (190 + 95))
    assert AssumedPredictor.named(ORACLE, Lengths((1,), (3,))).buckets == (3,)


def test_more_requests_are_in_the_slots_that_predictions_leave() -> None:
    lengths = Lengths((10,) * 4, (10, 10, 10, 100), "seen", 100)
    job = Job(99, lengths, predictor=AssumedPredictor.named(ORACLE, lengths))
    slots = job.in_flight(10, "s3-published")
    weighted = (3 * 10 * 20 + 100 * 110) / 130
    assert slots.n_slots == int(np.ceil(10 * weighted / (1 - HOLES)))
    assert job.in_flight(10, "orca") == Workload(10, 10, 100)
    assert job.in_flight(1, "s3-published").kv_tokens == 110
    rows = JobRows.of(job, 8)
    assert rows.expected == [10, 10, 10, 100] * 2
    assert rows.reserved == [110] * 8


def test_an_edited_predictor_is_refused() -> None:
    for buckets, confusion, message in (
        ((), (), "buckets are []"),
        ((0, 5), ((1, 0), (0, 1)), r"buckets are \[0, 5\]"),
        ((5, 5), ((1, 0), (0, 1)), "ascending"),
        ((5, 9), ((1, 0),), r"confusion has 1 rows of \[2\] counts; give 2 of 2"),
        ((5, 9), ((1,), (0, 1)), r"rows of \[1, 2\] counts"),
        ((5, 9), ((1, -1), (0, 1)), "counts below 0"),
        ((5, 9), ((0, 0), (0, 0)), "no row that was held out; train it again"),
    ):
        with pytest.raises(SpecError, match=message.replace("[]", r"\[\]")):
            AssumedPredictor("here", buckets, confusion)


GOOD = {
    "version": 1,
    "kind": "boosting",
    "buckets": [10, 20],
    "trained_rows": 7,
    "confusion": [[3, 1], [0, 2]],
}


def write(folder, **changes):
    kept = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    (folder / PREDICTOR_FILE).write_text(json.dumps(kept))


def test_a_predictor_file_is_read_as_it_was_written(tmp_path):
    written = PredictorFile.model_validate(GOOD | {"tokenizer": "ab12"})
    (tmp_path / PREDICTOR_FILE).write_text(written.model_dump_json())
    assert predictor_file(tmp_path) == written


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"buckets": [20, 10]}, "buckets: 10 follows 20"),
        ({"buckets": []}, "field buckets"),
        ({"buckets": [0, 10]}, "field buckets.0"),
        ({"confusion": [[1, 2]]}, "confusion: it must have 2 rows"),
        ({"confusion": [[1, 2], [3]]}, "confusion: it must have 2 rows"),
        ({"confusion": [[0, 0], [0, 0]]}, "confusion: it counts no row"),
        ({"confusion": [[1, -2], [0, 0]]}, "field confusion.0.1"),
        ({"kind": "pickle"}, "field kind"),
        ({"version": 2}, "of a newer llmpq"),
        ({"trained_rows": ...}, "field trained_rows"),
        ({"weights": "x"}, "field weights"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path, changes, named):
    write(tmp_path, **changes)
    with pytest.raises(SpecError, match="llmpq lengths train") as refused:
        predictor_file(tmp_path)
    assert named in str(refused.value)
    assert str(tmp_path / PREDICTOR_FILE) in str(refused.value)


def test_a_folder_without_the_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="cannot be read as JSON"):
        predictor_file(tmp_path)
