"""The command lines as users call them: what they print, what they refuse, how they exit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmpq import Cluster, Plan, Workload
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from llmpq.cli.measure.checkpoints import convert_main
from quant.common.errors import LlmpqError
from tests.actors.configs import CONFIGS
from tests.actors.models import reference, save_tiny
from tests.llmpq.commands import exit_code
from tests.llmpq.conftest import NEW_TOKENS

SMALL = ["--global_bz", "4", "--s", "64", "--n", "16"]


@pytest.fixture(scope="session")
def plan_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return path


def prompts_file(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_dist(plan_file: Path, prompts: Path, output: Path, *more: str) -> int:
    return run_cli.main(
        [
            "--strat_file_name",
            str(plan_file),
            "--input",
            str(prompts),
            "--output",
            str(output),
            *more,
        ]
    )


# ------------------------------------------------------------------------------------ llmpq plan


def test_the_papers_spelling_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    devices = ["--device_names", "T4", "V100-32GB", "--device_numbers", "2", "1"]
    options = ["--theta", "2", "--ilp-time-limit", "30", "--bits", "4", "8", "-o", str(target)]
    code = plan_cli.main(["--model-name", "opt", "--model_size", "13b", *devices, *SMALL, *options])
    printed = capsys.readouterr().out
    assert code == 0
    plan = Plan.load(target)
    assert plan.workload == Workload(4, 64, 16)
    assert sum(len(stage.layers) for stage in plan.stages) == 40
    assert {b for stage in plan.stages for b in stage.bitwidths} <= {4, 8}
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in plan.stages)
    for stage in plan.stages:
        assert all(f"{part} " in printed for part in stage.device.replace("/", "/ ").split())
    assert f"wrote {target}; run it: llmpq run --plan {target} --input prompts.jsonl" in printed


def test_json_on_stdout_is_the_plan_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "opt-1.3b", "--device-names", "T4", "--device-numbers", "1", *SMALL]
    assert plan_cli.main([*arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["model"]["name"] == "opt-1.3b"
    assert content["stages"][0]["layers"] == [0, 24]


def test_comparison_front_trace_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = ["--device_names", "T4", "V100-32GB", "--device_numbers", "1", "1"]
    arguments = ["--model", "opt-6.7b", *devices, *SMALL, "--head", "last"]
    front, trace, picture = (tmp_path / name for name in ("f.json", "t.json", "g.svg"))
    assert plan_cli.main([*arguments, "--compare", "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    for scheme in ("uniform", "pipeedge", "adabits", "flexgen", "binds"):
        assert scheme in printed
    assert json.loads(trace.read_text())["traceEvents"]
    assert plan_cli.main([*arguments, "--trace", str(picture), "--shaq-efficient"]) == 0
    assert picture.read_text().startswith("<svg")
    capsys.readouterr()
    report = tmp_path / "report.html"
    assert plan_cli.main([*arguments, "--pareto", str(front), "--report", str(report)]) == 0
    assert "time a batch" in capsys.readouterr().out
    assert len(json.loads(front.read_text())) >= 1
    assert "opt-6.7b" in report.read_text()
    assert plan_cli.main([*arguments, "--pareto", str(tmp_path / "front.png")]) == 2


def test_group_decides_layers_together() -> None:
    cluster = Cluster.from_counts(["T4", "V100-32GB"], [1, 1])
    plan = cluster.plan("opt-13b", Workload(4, 64, 16), group=4)
    for stage in plan.stages:
        assert stage.layers.start % 4 == 0
        for i in range(0, len(stage.layers), 4):
            assert len(set(stage.bitwidths[i : i + 4])) == 1


def test_cluster_of_this_machine_can_be_written(tmp_path: Path) -> None:
    found = tmp_path / "here.yaml"
    assert plan_cli.main(["--model", "opt-125m", *SMALL, "--write_cluster", str(found)]) == 0
    assert Cluster.from_yaml(found).spec.devices


REFUSED_PLANS = {
    "unknown GPU": (["--device_names", "T5", "--device_numbers", "1"], "T4"),
    "uneven counts": (["--device_names", "T4", "V100", "--device_numbers", "1"], "2 device names"),
    "names alone": (["--device_names", "T4"], "go together"),
    "zero devices": (["--device_names", "T4", "--device_numbers", "0"], "T4"),
    "no such file": (["--cluster", "missing.yaml"], "missing.yaml"),
    "two clusters": (["--cluster", "x.yaml", "--device_names", "T4"], "once"),
    "negative theta": (["--device_names", "T4", "--device_numbers", "1", "--theta", "-1"], "theta"),
    "group": (["--device_names", "T4", "--device_numbers", "1", "--group", "5"], "24 layers"),
    "solver": (["--device_names", "T4", "--device_numbers", "1", "--solver", "glop"], "glop"),
    "objective": (
        ["--device_names", "T4", "--device_numbers", "1", "--objective", "x"],
        "pipeline",
    ),
    "too long": (["--device_names", "T4", "--device_numbers", "1", "--s", "4000"], "2048"),
    "profiles": (
        ["--device_names", "T4", "--device_numbers", "1", "--profiles", "no.csv"],
        "no.csv",
    ),
    "omega": (
        ["--device_names", "T4", "--device_numbers", "1", "--omega_file", "no.json"],
        "no.json",
    ),
}


@pytest.mark.parametrize("name", REFUSED_PLANS)
def test_bad_planning_input_exits_2_with_one_message(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED_PLANS[name]
    assert exit_code(plan_cli.main, ["--model", "opt-1.3b", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_misspelt_key_names_file_line_and_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text("name: x\nnodes:\n  - {name: a, acelerators: {T4: 1}}\n")
    assert plan_cli.main(["--model", "opt-1.3b", "--cluster", str(path)]) == 2
    error = capsys.readouterr().err
    for part in ("typo.yaml", "3", "acelerators", "accelerators"):
        assert part in error


def test_infeasible_says_what_is_short_and_what_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = plan_cli.main(["--model", "opt-66b", "--device_names", "T4", "--device_numbers", "2"])
    error = capsys.readouterr().err
    assert code == 2
    assert "does not fit" in error
    assert "GiB" in error
    assert "more T4-16GB" in error


def test_what_the_remedy_says_does_fit() -> None:
    cluster = Cluster.from_counts(["T4"], [1])
    with pytest.raises(LlmpqError, match=r"--global_bz (\d+)") as caught:
        cluster.plan("opt-6.7b", Workload(256, 512, 100))
    batch = int(str(caught.value).partition("--global_bz ")[2].split()[0])
    cluster.plan("opt-6.7b", Workload(batch, 512, 100))
    with pytest.raises(LlmpqError):
        cluster.plan("opt-6.7b", Workload(batch + 1, 512, 100))


def test_model_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = plan_cli.main(
        ["--model", str(tmp_path), "--device_names", "T4", "--device_numbers", "1"]
    )
    assert code == 2
    assert "config.json" in capsys.readouterr().err


def test_unwritable_plan_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "no" / "such" / "folder" / "plan.json"
    arguments = ["--model", "opt-1.3b", "--device_names", "T4", "--device_numbers", "1"]
    assert plan_cli.main([*arguments, "-o", str(target)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ llmpq run


@pytest.mark.rare  # `test_security.py` runs such a process, `test_jobs_command.py` looks at tokens
def test_a_batch_end_to_end_as_a_process(
    tiny: tuple[Path, Any], plan_file: Path, tmp_path: Path
) -> None:
    good = [{"custom_id": f"q{i}", "prompt": [5 + i] * (1 + i % 7)} for i in range(9)]
    long = {"custom_id": "long", "prompt": [3] * 40}
    prompts = prompts_file(tmp_path, *good, long)
    output = tmp_path / "out" / "results.jsonl"
    command = [sys.executable, "-m", "llmpq.cli.run", "--strat-file-name", str(plan_file)]
    done = subprocess.run(
        [*command, "--input", str(prompts), "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "tokens/s" in done.stderr
    results = {r["custom_id"]: r for r in map(json.loads, output.read_text().splitlines())}
    assert set(results) == {"long"} | {row["custom_id"] for row in good}
    assert "40 tokens" in results["long"]["error"]
    for row in good:
        expected = reference(tiny[1], tuple(row["prompt"]), NEW_TOKENS)  # type: ignore[arg-type]
        assert results[str(row["custom_id"])]["token_ids"] == expected


def check_refused(capsys: pytest.CaptureFixture[str], code: int, *parts: str) -> None:
    error = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in error
    for part in parts:
        assert part in error


def test_duplicate_ids_and_empty_input(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"custom_id": "same", "prompt": [3]}
    output = tmp_path / "results.jsonl"
    code = run_dist(plan_file, prompts_file(tmp_path, row, row), output)
    check_refused(capsys, code, "'same'", "prompts.jsonl:2")
    check_refused(capsys, run_dist(plan_file, prompts_file(tmp_path), output), "no prompts")
    check_refused(capsys, run_dist(plan_file, tmp_path / "gone", output), "cannot read input")
    assert not output.exists()


def test_output_that_cannot_or_must_not_be_written(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_file(tmp_path, {"prompt": [3]})
    (tmp_path / "file").write_text("in the way")
    check_refused(
        capsys, run_dist(plan_file, prompts, tmp_path / "file" / "r.jsonl"), "cannot write output"
    )
    check_refused(capsys, run_dist(plan_file, prompts, tmp_path), "is a folder with other files")
    code = run_dist(plan_file, prompts, prompts, "--overwrite")
    check_refused(capsys, code, "is the input too")
    assert prompts.read_text()
    check_refused(
        capsys, run_dist(plan_file, prompts, tmp_path / ("x" * 300)), "cannot write output"
    )
    kept = tmp_path / "kept.jsonl"
    kept.write_text("earlier results\n")
    check_refused(capsys, run_dist(plan_file, prompts, kept), "exists already", "--overwrite")
    assert kept.read_text() == "earlier results\n"


def test_plan_for_another_model_or_cluster(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = prompts_file(tmp_path, {"prompt": [3]}), tmp_path / "results.jsonl"
    other_model = tmp_path / "other"
    save_tiny(other_model, CONFIGS["opt"])
    code = run_dist(plan_file, prompts, output, "--model", str(other_model))
    check_refused(capsys, code, "the plan is for", "plan again")
    other_cluster = tmp_path / "other.yaml"
    other_cluster.write_text("name: one\nnodes:\n  - {name: a, accelerators: {T4: 1}}\n")
    code = run_dist(plan_file, prompts, output, "--cluster", str(other_cluster))
    check_refused(capsys, code, "the plan is for cluster", "plan again")
    assert not output.exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "no config"])
def test_unusable_weights(
    damage: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, CONFIGS["llama"])
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    else:
        (folder / "config.json").unlink()
    prompts, output = prompts_file(tmp_path, {"prompt": [3]}), tmp_path / "results.jsonl"
    code = run_dist(plan_file, prompts, output, "--model", str(folder))
    check_refused(capsys, code, str(folder))


def test_plan_files_that_are_none(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = prompts_file(tmp_path, {"prompt": [3]}), tmp_path / "results.jsonl"
    content = json.loads(plan_file.read_text())
    del content["digest"]
    broken = {
        "not JSON": "{",
        "not a plan": "{}",
        "plan version 99": json.dumps(content | {"version": 99}),
        "theta": json.dumps(content | {"solver": content["solver"] | {"theta": "high"}}),
        "4 of 5 layers": json.dumps(content | {"stages": shorter(content["stages"])}),
    }
    for message, text in broken.items():
        path = tmp_path / "broken.json"
        path.write_text(text)
        check_refused(capsys, run_dist(path, prompts, output), "broken.json", message)
    check_refused(capsys, run_dist(tmp_path / "none.json", prompts, output), "none.json")


def shorter(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stages without the last layer."""
    *others, last = stages
    first, end = last["layers"]
    return [*others, last | {"layers": [first, end - 1], "bitwidths": last["bitwidths"][:-1]}]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top_p", "0"], "top_p"),
        (["--max-new-tokens", "999"], "room for 8"),
        (["--stop", ""], "stop"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--min_p", "2"], "min_p"),
        (["--logit_bias", "5"], "ID=BIAS"),
        (["--logit_bias", "5=1", "6=200"], "token '6' is 200"),
        (["--logit_bias", "199=1"], "vocabulary ends at 198"),
    ],
)
def test_sampling_options_out_of_range(
    option: list[str],
    message: str,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = prompts_file(tmp_path, {"prompt": [3]})
    check_refused(capsys, run_dist(plan_file, prompts, tmp_path / "r.jsonl", *option), message)


def test_defaults_of_the_model_are_told_and_part_of_the_job(
    tiny: tuple[Path, Any], plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a row that cannot run, so that nothing is started for it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny[0], folder)
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "no_repeat_ngram_size": 2}
    (folder / "generation_config.json").write_text(json.dumps(config))
    prompts = prompts_file(tmp_path, {"prompt": [3] * 99})
    arguments = (plan_file, prompts, tmp_path / "r.jsonl", "--model", str(folder))
    with pytest.warns(UserWarning, match="no_repeat_ngram_size 2"):
        assert run_dist(*arguments, "--top_p", "0.5", "--logit_bias", "7=-1.5", "8=2") == 3
    told = capsys.readouterr().err
    assert "defaults of the model's generation_config.json: temperature 0.6; --gen" in told
    assert f"wrote {tmp_path / 'r.jsonl'}; its figures: llmpq jobs show" in told
    manifest = json.loads((tmp_path / "r.jsonl.job" / "job.json").read_text())
    kept = {"temperature": 0.6, "top_p": 0.5, "logit_bias": {"7": -1.5, "8": 2.0}}
    assert kept.items() <= manifest["sampling"].items()
    code = run_dist(*arguments, "--generation_config", "none")
    check_refused(capsys, code, "was made with temperature 0.6, this job has 0.0")


def test_no_ray_at_the_address(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_file(tmp_path, {"prompt": [3]})
    code = run_dist(plan_file, prompts, tmp_path / "r.jsonl", "--address", "127.0.0.1:1")
    check_refused(capsys, code, "127.0.0.1:1", "ray start --head")


# ----------------------------------------------------------------------------------- other things


def test_convert_refuses_a_folder_without_bin_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(capsys, convert_main([str(tmp_path), str(tmp_path / "made")]), str(tmp_path))
