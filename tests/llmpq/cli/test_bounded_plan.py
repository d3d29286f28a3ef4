"""`llmpq plan` under a bound on the latency of requests: from lengths to a file that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmpq import Plan
from llmpq.cli import plan as plan_cli
from planner.lengths import LengthDistribution
from tests.llmpq.commands import exit_code
from tests.llmpq.fake_jobs import write_prompts
from tests.llmpq.report.pages import Page, measures
from tests.paths import DEMO_MODEL, ROOT, SPECS

ASKED = [
    "--model",
    str(DEMO_MODEL),
    "--cluster",
    str(SPECS / "demo_mixed_cpu.yaml"),
    "--schedule",
    "rra",
    "--search_time_limit",
    "1",
    "--bits",
    "8",
    "--theta",
    "0",
]
ON_ONE = [*ASKED, "--cluster", str(ROOT / "tests/llmpq/one_device.yaml")]
NORMAL = ["--prompt_lengths", "30", "10", "64", "--output_lengths", "12", "5", "24"]
HEADER = "prompt_tokens,output_tokens\n"


def test_a_file_of_lengths_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan, page = tmp_path / "l.csv", tmp_path / "plan.json", tmp_path / "plan.html"
    lengths.write_text(f"{HEADER}20,5\n40,9\n40,13\n")
    files = ["-o", str(plan), "--report", str(page), "--trace", str(tmp_path / "cycles.svg")]
    words = [*ON_ONE, "--max_request_latency_s", "2", "--lengths", str(lengths), *files]
    assert plan_cli.main(words) == 0
    told = capsys.readouterr().out
    assert "99 % of requests within 2 s" in told
    assert f"run it: llmpq run --plan {plan}" in told
    spec = Plan.load(plan).spec
    assert spec.latency is not None
    assert spec.latency.lengths.outputs == LengthDistribution.of_sample([5, 9, 13])
    assert (spec.latency.bound_s, spec.latency.quantile, spec.latency.prompts) == (2.0, 0.99, None)
    assert spec.latency.latency_s <= 2
    assert spec.policy.name == "exegpt"
    assert spec.origin is not None
    assert spec.origin.options.max_request_latency_s == 2
    table = told[: told.index("wrote ")]
    assert measures(table) - measures(Page(page.read_text(encoding="utf-8")).text) == set()
    assert (tmp_path / "cycles.svg").is_file()


def test_any_latency_and_another_quantile(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ON_ONE, *NORMAL, "--prompts", "200", "--max_request_latency_s", "inf"]
    assert plan_cli.main([*words, "--quantile", "0.9", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["latency"]["bound_s"] is None
    assert (plan["latency"]["quantile"], plan["latency"]["prompts"]) == (0.9, 200)
    assert plan["origin"]["options"]["max_request_latency_s"] == "inf"
    assert plan["latency"]["lengths"]["outputs"]["lengths"][-1] == 24


def test_an_input_gives_lengths_and_the_limit_of_rows_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": [5] * n, "max_new_tokens": 9} for n in (20, 30)] + [{"prompt": [5] * 40}]
    source, plan = write_prompts(tmp_path / "in.jsonl", *rows), tmp_path / "plan.json"
    words = [*ON_ONE, "--max_request_latency_s", "2", "--input", str(source), "--n", "6"]
    assert plan_cli.main([*words, "-o", str(plan)]) == 0
    assert f"--input {source}" in capsys.readouterr().out
    spec = Plan.load(plan).spec
    assert spec.latency is not None
    assert spec.latency.lengths.prompts.lengths == (20, 30, 40)
    assert spec.latency.lengths.outputs.lengths == (6, 9)
    assert spec.latency.prompts == 3
    assert spec.default_new_tokens == 6


def test_a_bound_that_is_too_tight_says_the_least_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "no.html"
    words = [*ON_ONE, *NORMAL, "--max_request_latency_s"]
    assert plan_cli.main([*words, "1e-6", "--report", str(page)]) == 2
    _, _, error = capsys.readouterr().err.partition("error: ")
    least = error.split()[-1]
    assert f"--max_request_latency_s {least}" in error
    shown = Page(page.read_text(encoding="utf-8")).text
    assert "No plan keeps the bound." in shown
    assert "99 % of requests within 1e-06 s; prompts of" in shown
    assert f"--max_request_latency_s {least}" in shown
    assert plan_cli.main([*words, least]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "needs the lengths of requests: give --lengths FILE"),
        (["--prompt_lengths", "9", "2", "20"], "needs the lengths of requests"),
        ([*NORMAL, "--quantile", "1"], "quantile is 1.0; it must be a share between 0 and 1"),
        (["--lengths", "BAD"], "bad.csv:3: output_tokens is 'many'; it must be a whole number of"),
        (["--lengths", "none.csv"], "cannot read lengths none.csv: no such file; give a CSV"),
        (
            ["--prompt_lengths", "9", "2", "20", "--output_lengths", "9", "0", "20"],
            "output_lengths: a truncated normal of mean 9, deviation 0",
        ),
        (
            ["--prompt_lengths", "900", "99", "2000", "--output_lengths", "9", "2", "20"],
            "but demo_model has 1024 positions",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(f"{HEADER}5,5\n5,many\n")
    words = [str(bad) if word == "BAD" else word for word in more]
    assert exit_code(plan_cli.main, [*ASKED, "--max_request_latency_s", "2", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("bound", ["0", "-1"])
def test_bounds_that_are_none(capsys: pytest.CaptureFixture[str], bound: str) -> None:
    assert exit_code(plan_cli.main, [*ASKED, *NORMAL, "--max_request_latency_s", bound]) == 2
    assert "it must be more than 0 seconds, or inf" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["t5-11b", "google-t5/t5-small", "google/flan-t5-xxl", "google/umt5-base", "CONFIG"]
)
def test_encoder_decoder_models_are_refused_by_name_without_asking_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name == "CONFIG":
        name = str(tmp_path / "config.json")
        Path(name).write_text('{"model_type": "t5", "is_encoder_decoder": true, "d_model": 512}')
    words = ["--model", name, *ASKED[2:], *NORMAL, "--max_request_latency_s", "2"]
    assert plan_cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is an encoder-decoder model, which llmpq does not run; choose a decoder-only" in line
    assert name in line
