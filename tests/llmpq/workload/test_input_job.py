"""Jobs of inputs: long rows, rows beyond the model, lengths that were measured; their plans."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from actors.stage.spec import stage_spec
from llmpq import Cluster, InputJob, Job, Workload, job_of_input
from llmpq.cli import plan as plan_cli
from llmpq.workload import measured_lengths
from llmpq.workload.input_job import batch_of_input, job_of_prompts
from llmpq.workload.long_rows import LongRowRule
from llmpq.workload.request_lengths import requests_of
from planner.plan.spec import PlanSpec
from quant.common.errors import InfeasibleError, InputError, SpecError
from tests.llmpq.fake_jobs import write_prompts
from tests.paths import ROOT, SPECS

MODEL = ROOT / "examples/demo_model"
POSITIONS = 1024


def row(prompt: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [5] * prompt, **fields}


def mixed_rows() -> list[dict[str, Any]]:
    """300 short rows, two long ones, and one that the model has no positions for."""
    rows = [row(10 + i % 20, custom_id=f"q{i}", max_new_tokens=16) for i in range(300)]
    rows[40] = row(700, custom_id="long", max_new_tokens=16)
    rows[50] = row(20, custom_id="wordy", max_new_tokens=300)
    rows[60] = row(10**4, custom_id="book")
    return rows


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", *mixed_rows())


def test_long_rows_are_a_job_by_themselves(source: Path) -> None:
    found = job_of_input(source, MODEL)
    assert found.ordinary.prompts == 297
    assert found.ordinary.in_flight(1).total_length == 29 + 16
    assert found.long_rows is not None
    assert found.long_rows.job.prompts == 2
    assert found.long_rows.job.in_flight(1) == Workload(1, 700, 300, slot_tokens=700 + 16)
    long, beyond = found.notes
    assert "2 rows are much longer than the others (in.jsonl:41: 'long' with 700 + 16" in long
    assert "in.jsonl:51: 'wordy' with 20 + 300 tokens" in long
    assert "1 row is longer than the model's context (in.jsonl:61: 'book' with 10000 +" in beyond


def test_long_rows_can_be_an_error(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        InputError, match=r"in\.jsonl:41: 'long' with 700 \+ 16 .* at most 45 tokens"
    ):
        job_of_input(source, MODEL, long_rows="error")
    with pytest.raises(SpecError, match="long_rows is 'drop'; it must be one of separate, error"):
        job_of_input(source, MODEL, long_rows="drop")
    command = ["--model", str(MODEL), "--device-names", "T4", "--device-numbers", "1"]
    assert plan_cli.main([*command, "--input", str(source), "--long_rows", "error"]) == 2
    assert "shorten them, give them an input of their own" in capsys.readouterr().err


def test_long_rows_can_be_left_out_and_begin_at_a_percentile(source: Path) -> None:
    left = job_of_input(source, MODEL, long_rows="leave")
    assert (left.long_rows, left.ordinary.prompts) == (None, 297)
    assert left.ordinary.in_flight(1).total_length == 29 + 16
    note, beyond = left.notes
    assert "2 rows are longer than what is planned for (in.jsonl:41: 'long' with 700 + 16" in note
    assert "gives error rows for such" in note
    assert "longer than the model's context" in beyond
    half = job_of_input(source, MODEL, long_rows=LongRowRule("separate", 50))
    usual = [len(each["prompt"]) + each.get("max_new_tokens", 100) for each in mixed_rows()]
    median = sorted(usual)[150 - 1]  # of 299 rows: the book is the longest
    assert half.ordinary.in_flight(1).total_length == median
    assert half.long_rows is not None
    assert half.ordinary.prompts + half.long_rows.job.prompts == 299
    whole = job_of_input(source, MODEL, long_rows=LongRowRule(percentile=100))
    assert (whole.long_rows, whole.ordinary.prompts) == (None, 299)
    for percentile in (0, -1, 101, float("nan")):
        with pytest.raises(SpecError, match="above 0 and at most 100"):
            LongRowRule(percentile=percentile)


@pytest.mark.rare  # plans whole jobs
def test_a_row_that_keeps_a_plan_from_fitting_is_named_with_a_percentile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's devices have no room for slots of 900 tokens, nor one batch for 5,000."""
    rows = [row(40, custom_id=f"q{i}") for i in range(72)]
    source = write_prompts(tmp_path / "in.jsonl", *rows, row(900, custom_id="long"))
    command = ["--model", str(MODEL), "--cluster", str(SPECS / "demo_mixed_cpu.yaml")]
    batch = ["--n", "48", "--global_bz", "16"]
    assert plan_cli.main([*command, "--input", str(source), *batch]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the longest row, in.jsonl:73: 'long' with 900 + 48 tokens; 98 % of the rows" in said
    assert "at most 88 tokens with their answers: --percentile 98 plans for these" in said
    plan = tmp_path / "plan.json"
    output = ["--percentile", "98", "-o", str(plan)]
    assert plan_cli.main([*command, "--input", str(source), *batch, *output]) == 0
    assert PlanSpec.load(plan).workload == Workload(16, 40, 48)
    assert "1 row is longer than what is planned for" in capsys.readouterr().err
    write_prompts(source, *rows, row(5000, custom_id="book"))
    assert plan_cli.main([*command, "--input", str(source), *batch, "-o", str(plan)]) == 0
    assert PlanSpec.load(plan).workload == Workload(16, 40, 48)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 row is longer than the model's context (in.jsonl:73: 'book' with 5000 + 48" in said
    write_prompts(source, row(5000, custom_id="book"))
    assert plan_cli.main([*command, "--input", str(source), *batch]) == 2
    assert "the only row has more tokens than the 1024 positions" in capsys.readouterr().err


def test_an_input_may_be_named_more_than_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        write_prompts(tmp_path / f"{name}.jsonl", row(40, custom_id=name))
    command = ["--model", str(MODEL), "--cluster", str(SPECS / "demo_mixed_cpu.yaml"), "--json"]
    inputs = ["--input", f"{tmp_path}/a*", f"{tmp_path}/b.jsonl", "--input", f"{tmp_path}/c.jsonl"]
    assert plan_cli.main([*command, *inputs, "--n", "8"]) == 0
    planned = PlanSpec.from_json(capsys.readouterr().out)
    assert planned.job is not None
    assert planned.job.job.prompts == 3


def test_several_paths_without_long_rows(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / f"{name}.jsonl", *(row(10 + i) for i in range(30)))
    (job,) = {job_of_input([tmp_path / "a.jsonl", tmp_path / "b*"], MODEL, new_tokens=24)}
    assert job == job_of_input(tmp_path, MODEL, new_tokens=24)
    assert (job.long_rows, job.beyond, job.notes) == (None, None, ())
    assert job.ordinary.prompts == 60
    assert job.ordinary.lengths.prompt_tokens == (*range(10, 40), *range(10, 40))
    assert job.ordinary.lengths.output_tokens == (24,) * 60
    fixed = job_of_input(tmp_path, MODEL, prompt_length=64)
    assert set(fixed.ordinary.lengths.prompt_tokens) == {64}


def test_no_row_fits_the_model(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", row(POSITIONS), row(POSITIONS - 99))
    with pytest.raises(SpecError, match=r"all 2 rows have more tokens than the 1024 positions"):
        job_of_input(source, MODEL)
    write_prompts(source, row(POSITIONS - 100))
    assert job_of_input(source, MODEL).ordinary.prompts == 1


def test_outputs_of_a_table_are_capped_by_the_rows(tmp_path: Path, source: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("prompt_tokens,output_tokens\n" + "20,4\n20,12\n20,40\n" * 20)
    found = job_of_input(source, MODEL, lengths=table)
    lengths = found.ordinary.lengths
    assert set(lengths.output_tokens) == {4, 12, 16}
    assert (lengths.longest_output, lengths.outputs_from) == (16, "lengths.csv")


def test_outputs_of_finished_rows_by_their_ids(tmp_path: Path) -> None:
    rows = [row(10 if i % 2 else 60, custom_id=f"q{i}", max_new_tokens=64) for i in range(200)]
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    results = tmp_path / "out.jsonl"
    done = [
        {"custom_id": f"q{i}", "token_ids": [1] * (2 if i % 2 else 30), "error": None}
        for i in range(0, 200)
        if i % 3
    ]
    failed = {"custom_id": "q3", "token_ids": [1] * 60, "error": "stopped"}
    write_prompts(results, *done, failed)
    lengths = job_of_input(source, MODEL, lengths=results).ordinary.lengths
    pairs = set(zip(lengths.prompt_tokens, lengths.output_tokens, strict=True))
    assert pairs == {(10, 2), (60, 30)}
    assert lengths.longest_output == 64
    write_prompts(results, *done[:15])
    with pytest.raises(SpecError, match=r"out\.jsonl has 15 finished rows"):
        job_of_input(source, MODEL, lengths=results)
    write_prompts(results, *({**each, "custom_id": f"other{each['custom_id']}"} for each in done))
    with pytest.raises(InputError, match="none of its 133 rows is one of the input"):
        job_of_input(source, MODEL, lengths=results)
    with pytest.raises(SpecError, match="results do not have their prompts' lengths; give"):
        job_of_prompts(10, lengths=results)


def test_jobs_without_a_file(tmp_path: Path) -> None:
    assert job_of_prompts(3000, 512) == Job.of(3000, 512, 100)
    table = tmp_path / "lengths.csv"
    table.write_text("prompt_tokens,output_tokens\n20,4\n30,50\n")
    assert job_of_prompts(9, lengths=table).in_flight(1).total_length == 80
    capped = job_of_prompts(9, new_tokens=25, lengths=table)
    assert capped.lengths.output_tokens == (4, 25)
    assert job_of_prompts(9, new_tokens=90, lengths=table).in_flight(1).total_length == 120
    for lengths in (None, table):
        with pytest.raises(SpecError, match="new_tokens is 0; it must be a whole number"):
            job_of_prompts(9, new_tokens=0, lengths=lengths)
    with pytest.raises(SpecError, match="prompt_length is -1; it must be a whole number"):
        job_of_prompts(9, prompt_length=-1)


def test_a_plan_has_one_for_long_rows_too(source: Path) -> None:
    cluster = Cluster.from_counts(["T4"], [1])
    job = job_of_input(source, MODEL)
    plan = cluster.plan(MODEL, job, in_flight=1, decode_micro_batch=1)
    assert plan.workload.global_batch == 1
    assert plan.workload.total_length == 45
    long = plan.spec.long_rows
    assert long is not None
    assert (long.workload.global_batch, long.workload.total_length) == (2, 716)
    assert PlanSpec.from_json(plan.spec.to_json()) == plan.spec


def test_slots_are_as_long_as_the_longest_row(tmp_path: Path) -> None:
    """The longest prompt and the longest limit of different rows are no row together."""
    rows = [row(700, max_new_tokens=16), row(20, max_new_tokens=500), row(600, max_new_tokens=180)]
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    found = job_of_input(source, MODEL)
    assert (found.long_rows, found.beyond) == (None, None)
    heads = found.ordinary.heads
    assert found.ordinary.in_flight(3) == Workload(3, 700, 500, slot_tokens=780, heads=heads)
    plan = Cluster.from_counts(["T4"], [1]).plan(MODEL, found)
    assert {stage_spec(plan.spec, stage).max_tokens for stage in plan.spec.stages} == {780}
    write_prompts(source, row(700), row(20, max_new_tokens=16))
    assert job_of_input(source, MODEL).ordinary.in_flight(1) == Workload(1, 700, 100)


def test_rows_beside_the_sample_count_for_the_longest(tmp_path: Path) -> None:
    """One row of many is neither of the longest prompt nor of the longest limit, but in all."""
    rows = [row(20, max_new_tokens=90 if i % 2 else 60) for i in range(12_000)]
    rows[1001], rows[2000] = row(40, max_new_tokens=85), row(50, max_new_tokens=60)
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    slots = job_of_input(source, MODEL).ordinary.in_flight(1)
    assert slots == Workload(1, 50, 90, slot_tokens=125)


def test_the_limit_of_rows_without_one_is_kept(tmp_path: Path) -> None:
    mixed = [row(20), row(30, max_new_tokens=500), row(9, max_new_tokens=5)]
    source = write_prompts(tmp_path / "in.jsonl", *mixed)
    job = job_of_input(source, MODEL).ordinary
    assert (job.default_new_tokens, job.lengths.longest_output) == (100, 500)
    assert job_of_input(source, MODEL, new_tokens=40).ordinary.default_new_tokens == 40
    write_prompts(source, row(9, max_new_tokens=7), row(9, max_new_tokens=5))
    assert job_of_input(source, MODEL).ordinary.default_new_tokens == 7, "no row may get more"


class Unfinished:
    """A job over 400 rows of which `done` have results: row i generates i % 7 + 1 tokens."""

    def __init__(self, folder: Path, done: Container[int], monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [row(10 + i % 2, custom_id=f"q{i}", max_new_tokens=90) for i in range(400)]
        rows[0]["max_new_tokens"] = 200
        del rows[399]["max_new_tokens"]
        self.source = write_prompts(folder / "in.jsonl", *rows)
        results = [
            {"custom_id": f"q{i}", "token_ids": [1] * (i % 7 + 1), "error": None if i else "bad"}
            for i in range(400)
            if i in done
        ]
        self.output = write_prompts(folder / "out.jsonl", *results)
        monkeypatch.setattr(measured_lengths, "_is_unfinished", lambda _: True)

    def job(self) -> InputJob:
        return job_of_input(self.source, MODEL, lengths=self.output)


def test_rows_that_are_left_of_a_job_are_planned(tmp_path: Path, monkeypatch: Any) -> None:
    found = Unfinished(tmp_path, range(300), monkeypatch).job()
    assert found.ordinary.prompts == 100
    assert found.ordinary.lengths.longest_output == 100, "row 0 with 200 is done, in error"
    assert found.ordinary.default_new_tokens == 100
    assert found.notes == ("300 rows are done already; planned for those that are left",)
    assert len(found.ordinary.lengths.prompt_tokens) == 100
    assert Unfinished(tmp_path, range(400), monkeypatch).job().done == 0, "it would begin again"


def test_outputs_are_of_the_first_rows_where_a_job_goes_on(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Beyond the first hundred only rows with one token have ended."""
    ended = {*range(100), *(i for i in range(110, 400) if i % 7 == 0)}
    outputs = Unfinished(tmp_path, ended, monkeypatch).job().ordinary.lengths
    assert outputs.mean_output == pytest.approx(4, rel=0.1)
    short = {i for i in range(400) if i % 7 == 0} - {0}
    with pytest.raises(SpecError, match="5% of its first rows have no result yet"):
        Unfinished(tmp_path, short, monkeypatch).job()


def test_long_rows_that_do_not_fit_are_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmpq import cluster as module

    find = module.find_plan

    def refused(spec: Any, shape: Any, source: str, workload: Any, options: Any) -> Any:
        if workload.lengths.longest_prompt == 700:
            raise InfeasibleError("0.1 GiB short")
        return find(spec, shape, source, workload, options)

    monkeypatch.setattr(module, "find_plan", refused)
    with pytest.raises(InfeasibleError, match=r"2 rows are much longer .*'long'.*0\.1 GiB short"):
        Cluster.from_counts(["T4"], [1]).plan(MODEL, job_of_input(source, MODEL), in_flight=8)


def test_the_heads_that_rows_share_are_planned_for(tmp_path: Path) -> None:
    """Two heads of 64 and 160 tokens, and rows that have none and are shorter than these."""
    tails = [[9 + i] * 20 for i in range(60)]
    heads = ([5] * 64, [6] * 160, [])
    rows = [{"prompt": heads[i % 3] + tail, "max_new_tokens": 8} for i, tail in enumerate(tails)]
    source = write_prompts(tmp_path / "in.jsonl", *rows)
    found = job_of_input(source, MODEL)
    job = found.ordinary
    assert job.heads.kept_tokens == 64 + 160
    assert job.computed_tokens == pytest.approx(20, abs=0.5)
    assert found.notes[0].startswith("prompts share 75 tokens in the mean, of heads of 224 tokens")
    assert requests_of(found).lengths.heads == job.heads
    batch = batch_of_input([source], str(MODEL), {"global_batch": 8}).workload
    assert batch.heads == job.heads
    cluster = Cluster.from_counts(["T4"], [1])
    plans = (cluster.plan("opt-1.3b", found, bits=[16], shared_tokens=each) for each in (None, 0))
    measured, whole = plans
    assert measured.workload.heads == job.heads
    assert whole.workload.heads.kept_tokens == 0
    assert measured.spec.predicted.latency_s < whole.spec.predicted.latency_s
    assert "mean 95 prompt tokens, 75 of them shared, 8 new" in repr(measured)
    assert "shared" not in repr(whole)


def test_each_answer_of_a_row_is_planned_for(tmp_path: Path) -> None:
    """As a row of its own would be, of which all but the first restore what the prompt shares."""
    rows = [
        {"prompt": [i] * (90 + i), "max_new_tokens": 4 + i, "temperature": 1.0} for i in range(20)
    ]
    rows[0]["prompt"] = [7] * 30  # too short to be shared
    several = [{**row, "n": 3} for row in rows] + [{"prompt": [1], "temperature": 0, "n": 9}]
    alone = [row for row in rows for _ in range(3)] + [{"prompt": [1], "temperature": 0}]
    found, each = (
        job_of_input(write_prompts(tmp_path / name, *given), MODEL)
        for name, given in (("n.jsonl", several), ("one.jsonl", alone))
    )
    job, other = found.ordinary, each.ordinary
    assert found.prompts == each.prompts == 61
    assert job.lengths == other.lengths
    assert found.notes[0].startswith("21 rows ask for 61 answers")
    assert requests_of(found).lengths.prompts == requests_of(each).lengths.prompts
    computed = 61 * job.computed_tokens
    assert computed == pytest.approx(61 * other.computed_tokens + other.heads.kept_tokens, rel=0.05)
    assert job.heads.kept_tokens <= 109 + job.heads.shared_tokens
    batches = (
        batch_of_input([tmp_path / name], str(MODEL), {}).workload
        for name in ("n.jsonl", "one.jsonl")
    )
    assert len({batch.global_batch for batch in batches}) == 1
