"""`llmpq profile`: the planner reads its file, and a second run goes on where the file ends."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from actors.profiling.links import measure_hops
from llmpq.cli import plan as plan_cli
from llmpq.cli.measure.forecasts import profile_main
from llmpq.profile.layers import workload_of
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.profiles.design import DesignSpace
from planner.profiles.fit import predicted_s
from planner.profiles.layer_terms import HEAD, LayerTerms
from planner.profiles.links import LoadRow, links_beside, links_path, loading_path
from planner.profiles.rows import read_profiles, read_table
from planner.search.request import latency_model_of
from quant.scheme import HEAD_BITWIDTHS
from tests.actors.configs import STATE_CONFIGS
from tests.actors.profiling.test_layers import TINY
from tests.llmpq.commands import exit_code

CPU_CLUSTER = """
name: one-cpu
nodes:
  - {name: a, accelerators: {CPU: 1}, memory_gib: 1, threads: 1}
"""
EMULATED = """
name: played
nodes:
  - {name: a, accelerators: {T4: 1}}
emulate: {time_scale: 0}
"""
pytestmark = pytest.mark.usefixtures("local_ray")
FEW = ("--bits", "4", "16", "--points", "5", "--rounds", "1", "--max_length", "40")
SMALL = (*FEW, "--layers_only")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-profiled")
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture(scope="module")
def times(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "times.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmpq.profile.transfers.measure_hops", partial(measure_hops, turns=5))
        assert profile_main(["--model", model, "-o", str(path), "--threads", "1", *FEW]) == 0
    return path


def test_the_file_has_the_design_and_is_planned_with(
    model: str, times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_profiles(times)
    assert (
        times.read_text()
        .splitlines()[0]
        .endswith(",attention_ms_per_layer,spread,repetitions,lengths,kind")
    )
    heads = [row for row in rows if row.layer.kind == HEAD]
    sizes = DesignSpace().batch_sizes
    assert {(r.bits, r.batch_size) for r in heads} == {*product(HEAD_BITWIDTHS, sizes)}
    assert {r.backend for r in heads} == {"int6pack", "int8pack", "plain"}
    assert {row.layer.linear_parameters for row in heads} == {64 * TINY["vocab_size"]}
    rows = rows[: -len(heads)]
    assert len({(r.bits, workload_of(r)) for r in rows}) == len(rows) == 20
    assert {r.backend for r in rows} == {"int4pack", "plain"}
    assert all(r.spread is not None and r.repetitions == 1 and r.threads == 1 for r in rows)
    assert all(r.attention_s is not None and 0 < r.attention_s < r.seconds for r in rows)
    (tmp_path / "cluster.yaml").write_text(CPU_CLUSTER)
    assert plan_cli.main(
        ["--model", model, "--cluster", str(tmp_path / "cluster.yaml"), "--profiles", str(times),
         "--bits", "4", "16", "--s", "16", "--n", "8", "--global_bz", "4"]
    ) == 0  # fmt: skip
    told = " ".join(capsys.readouterr().out.split())
    assert "fitted to 20 profile rows of times.csv" in told
    assert "of layers from the checkpoint" in told
    assert "(times.loading.csv)" in told
    loads = read_table(loading_path(times), LoadRow)
    assert {(r.bits, r.origin) for r in loads} == {
        (4, "checkpoint"),
        (4, "cache"),
        (16, "checkpoint"),
    }
    assert {link.way for link in links_beside(times)} == {"gloo"}


def test_loading_is_measured_for_the_bitwidths_that_lack_it(
    model: str, times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.csv"
    for source in (times, loading_path(times), links_path(times)):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    before = loading_path(path).read_bytes()
    command = ["--model", model, "-o", str(path), "--threads", "1", *FEW]
    assert profile_main([*command, "--bits", "4", "8"]) == 0
    told = capsys.readouterr()
    assert "CPU: loading at 8 bit" in told.err
    assert "hops between" not in told.err
    assert "hops between stages" in told.out
    assert loading_path(path).read_bytes().startswith(before)
    assert len(read_table(loading_path(path), LoadRow)) == 5


def test_what_is_measured_is_kept_and_the_rest_added(
    model: str, times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy cut off in its last row, with another model's row in front."""
    lines = times.read_text().splitlines()
    foreign = lines[1].replace(",64,128,", ",4096,11008,", 1)
    assert foreign != lines[1]
    torn = [lines[0], foreign, *lines[1:-3], lines[-3][:40]]
    path = tmp_path / "torn.csv"
    path.write_text("\n".join(torn))
    assert profile_main(["--model", model, "-o", str(path), "--threads", "1", *SMALL]) == 0
    told = capsys.readouterr()
    assert "CPU: 3 points to measure" in told.err
    kept = path.read_text().splitlines()
    assert kept[1 : len(torn) - 1] == torn[1:-1]
    assert len(kept) == len(lines) + 1
    parts = told.out.partition("attention, and the rest of a layer")[2]
    assert all(f" {phase} " in parts for phase in ("prefill", "decode"))
    again = path.read_bytes()
    assert profile_main(["--model", model, "-o", str(path), "--threads", "1", *SMALL]) == 0
    assert path.read_bytes() == again
    assert not list(tmp_path.glob("*.part"))


def test_a_spent_budget_says_how_many_points_remain(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.csv"
    options = ["--model", model, "-o", str(path), "--budget_s", "1e-9", *SMALL]
    assert profile_main(options) == 0
    assert "50 points remain" in capsys.readouterr().out
    assert read_profiles(path) == ()


def test_a_ray_task_measures_the_cpu_of_a_cluster(model: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CPU_CLUSTER)
    path = tmp_path / "p.csv"
    command = ["--model", model, "-o", str(path), "--cluster", str(tmp_path / "cluster.yaml")]
    assert profile_main([*command, *SMALL]) == 0
    assert len(read_profiles(path)) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--points", "2"], "points is 2"),
        (["--rounds", "0"], "rounds is 0"),
        (["--budget_s", "-1"], "budget_s is -1"),
        (["--batch_sizes", "0"], "batch_sizes are [0]"),
        (["--max_length", "0"], "max_length is 0"),
        (["--dtype", "int8"], "--dtype: unknown value 'int8'"),
        (["--threads", "0"], "threads"),
        (["--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["-o", "no/such/folder/p.csv"], "cannot write"),
        (["--cluster", "played.yaml"], "is emulated"),
        (["--cluster", "missing.yaml"], "missing.yaml"),
        (["-o", "other.csv"], "other.csv:1: profile lacks the columns"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    options: list[str],
    message: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("played.yaml").write_text(EMULATED)
    Path("other.csv").write_text("a,b\n1,2\n")
    assert exit_code(profile_main, ["--model", model, "-o", "p.csv", *SMALL, *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_kinds_of_layers_are_measured_and_planned_with(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model with mixers, attention and experts: each kind by itself, experts apart."""
    folder, path = tmp_path / "mixed", tmp_path / "times.csv"
    STATE_CONFIGS["qwen3_5_moe"].save_pretrained(folder)
    command = ["--model", str(folder), "-o", str(path), "--threads", "1", *SMALL]
    assert profile_main(command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "mixed, linear_attention on CPU" in told
    assert "mixed, full_attention on CPU" in told
    assert "experts were asked about evenly" in told
    rows, kinds = read_profiles(path), model_shape(str(folder)).kinds
    for kind in kinds:
        own = [row for row in rows if row.layer == LayerTerms.of(kind)]
        assert len(own) == 20
        assert all(row.experts_s and row.attention_s for row in own)
    before = path.read_bytes()
    assert profile_main(command) == 0, "nothing is left to measure"
    assert path.read_bytes() == before
    capsys.readouterr()
    (tmp_path / "cluster.yaml").write_text(CPU_CLUSTER)
    plan = ["--cluster", str(tmp_path / "cluster.yaml"), "--profiles", str(path), "--bits", "4",
            "16", "--s", "16", "--n", "8", "--global_bz", "4", "--strict_profiles"]  # fmt: skip
    assert plan_cli.main(["--model", str(folder), *plan]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fitted to 20 profile rows of times.csv" in told
    assert "estimated (bits" not in told
    cluster = ClusterSpec.from_yaml(tmp_path / "cluster.yaml")
    latency = latency_model_of(
        cluster, model_shape(str(folder)), PlanOptions(profiles=path, profile_use="measured")
    )
    for row in (each for each in rows if each.layer.kind != HEAD):
        own = latency.of_kind([LayerTerms.of(kind) for kind in kinds].index(row.layer))
        found = predicted_s(own, cluster.devices[0], row, "bfloat16")
        assert found == pytest.approx(row.seconds)
    assert exit_code(plan_cli.main, ["--model", model, *plan]) == 2
    assert "taken of experts 6x32, asked 2" in capsys.readouterr().err
