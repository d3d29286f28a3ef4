"""Lengths of requests whose latency is bounded, from every source, with nothing left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import truncnorm

from llmpq import Job, Workload, job_of_input
from llmpq.report.latency import lengths
from llmpq.workload.request_lengths import (
    Requests,
    bound_request,
    normal_lengths,
    request_lengths,
    requests_of,
    same_lengths,
)
from planner.lengths import LengthDistribution, Lengths, RequestLengths
from planner.options import PlanOptions
from quant.common.errors import SpecError
from tests.llmpq.fake_jobs import prompts, run_job, write_prompts
from tests.paths import ROOT

MODEL = ROOT / "examples/demo_model"
HEADER = "prompt_tokens,output_tokens\n"


def test_all_rows_of_a_file_count_and_not_only_a_sample(tmp_path: Path) -> None:
    """5,000 rows, ten times as many as a plan of a job keeps."""
    drawn = np.random.default_rng(3).integers(1, 400, (5000, 2))
    path = tmp_path / "lengths.csv"
    path.write_text(HEADER + "".join(f"{prompt},{output}\n" for prompt, output in drawn))
    found = request_lengths(path)
    for each, column in zip((found.prompts, found.outputs), drawn.T, strict=True):
        assert each.mean == pytest.approx(column.mean())
        assert each.variance == pytest.approx(column.var())
        assert each.longest == column.max()
        assert each.quantile(0.99) == np.sort(column)[math.ceil(0.99 * len(column)) - 1]


def test_longer_answers_are_cut_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"{HEADER}5,10\n5,20\n5,30\n5,40\n")
    found = request_lengths(path, 25)
    assert found.outputs.lengths == (10, 20, 25)
    assert found.outputs.probabilities == (0.25, 0.25, 0.5)
    assert request_lengths(path, 99) == request_lengths(path)


def test_results_lack_the_lengths_of_their_prompts(tmp_path: Path) -> None:
    run_job(write_prompts(tmp_path / "in.jsonl", *prompts(20)), tmp_path / "r.jsonl")
    with pytest.raises(SpecError, match=r"r\.jsonl: results do not have .* give the input too"):
        request_lengths(tmp_path / "r.jsonl")


def test_results_tell_the_answers_of_an_input(tmp_path: Path) -> None:
    """`run_job` writes as many tokens as a prompt has characters."""
    rows = prompts(40)
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    run_job(source, tmp_path / "r.jsonl")
    job = job_of_input(source, MODEL, prompt_length=9, lengths=tmp_path / "r.jsonl")
    found = requests_of(job).lengths
    assert found.prompts == same_lengths(9)
    assert set(found.outputs.lengths) <= {len(each["prompt"]) for each in rows}
    assert len(found.outputs.lengths) > 1


def rows_of(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"prompt": [5] * prompt, "max_new_tokens": limit} for prompt, limit in sizes]


def test_every_row_of_an_input_counts_long_ones_too(tmp_path: Path) -> None:
    sizes = [(10 + i % 20, 16) for i in range(300)] + [(700, 16), (20, 300)]
    path = write_prompts(tmp_path / "in.jsonl", *rows_of(*sizes, (10**4, 16)))
    job = job_of_input(path, MODEL)
    assert job.long_rows is not None
    found = requests_of(job)
    expected = LengthDistribution.of_sample([prompt for prompt, _ in sizes])
    assert found.lengths.prompts == expected
    assert found.lengths.outputs == LengthDistribution.of_sample([limit for _, limit in sizes])
    assert found.prompts == 302
    (note,) = found.notes
    assert "longer than the model's context" in note
    without = requests_of(job_of_input(path, MODEL, long_rows="leave"))
    assert (without.prompts, without.lengths.prompts.longest) == (300, 29)


def test_a_normal_distribution_is_cut_as_scipy_cuts_it() -> None:
    found = normal_lengths("output_lengths", (128.0, 68.0, 320.0))
    ends = (0.5 - 128) / 68, (320.5 - 128) / 68
    reference = truncnorm(*ends, loc=128, scale=68)
    assert found.mean == pytest.approx(reference.mean(), rel=1e-3)
    assert found.variance == pytest.approx(reference.var(), rel=2e-3)
    assert found.quantile(0.99) == pytest.approx(reference.ppf(0.99), abs=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((128.0, 0.0, 320.0), "prompt_lengths: a truncated normal of mean 128, deviation 0"),
        ((128.0, 9.0, 320.5), "prompt_lengths: the longest is 320.5; give a whole number of 1"),
        ((128.0, 9.0, 0.0), "prompt_lengths: the longest is 0; give a whole"),
        ((1e6, 1.0, 10.0), "prompt_lengths: no length of 1 to 10 is likely at mean 1e"),
        ((math.nan, 1.0, 10.0), "prompt_lengths: a truncated normal of mean nan"),
        ((5.0, 1.0, math.inf), "prompt_lengths: the longest is inf; give a whole number"),
    ],
)
def test_distributions_that_are_none(given: tuple[float, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        normal_lengths("prompt_lengths", given)


def test_a_job_has_requests_and_a_batch_has_none() -> None:
    job = Job(7, Lengths((5, 5, 9), (2, 4, 4)), default_new_tokens=3)
    found = requests_of(job)
    assert found == Requests(
        RequestLengths(
            LengthDistribution.of_sample([5, 5, 9]),
            LengthDistribution.of_sample([2, 4, 4]),
            pytest.approx(0.5),
        ),
        prompts=7,
        default_new_tokens=3,
    )
    assert requests_of(found) is found
    assert requests_of(found.lengths) == Requests(found.lengths)
    with pytest.raises(SpecError, match="about requests that come and go, not about a batch"):
        requests_of(Workload(4, 5, 6))


def test_what_is_asked_of_a_schedule() -> None:
    requests = Requests(RequestLengths(same_lengths(5), same_lengths(4)), prompts=9)
    asked = bound_request(requests, PlanOptions(max_request_latency_s=20, quantile=0.9))
    assert (asked.bound_s, asked.quantile, asked.prompts) == (20.0, 0.9, 9)
    assert asked.kinds == ("rra", "waa-c", "waa-m")
    unbounded = PlanOptions(max_request_latency_s=math.inf, schedule="waa-m")
    asked = bound_request(requests, unbounded)
    assert (asked.bound_s, asked.kinds) == (None, ("waa-m",))


def test_lengths_that_rise_together_are_correlated(tmp_path: Path) -> None:
    """ExeGPT section 7.1: low in most tasks, high in translation."""
    drawn = np.random.default_rng(5).integers(1, 400, (500, 2))
    options = PlanOptions(max_request_latency_s=20.0)
    alike = np.column_stack([drawn[:, 0], drawn[:, 0] // 2 + drawn[:, 1] // 4 + 1])
    path = tmp_path / "lengths.csv"
    for rows, is_correlated in ((drawn, False), (alike, True)):
        path.write_text(HEADER + "".join(f"{prompt},{output}\n" for prompt, output in rows))
        found = request_lengths(path)
        assert found.correlation == pytest.approx(np.corrcoef(rows.T)[0, 1])
        assert found.are_correlated is is_correlated
        assert ("random order" in lengths(bound_request(Requests(found), options))) is is_correlated
    path.write_text(f"{HEADER}5,10\n5,20\n")
    assert request_lengths(path).correlation == 0
