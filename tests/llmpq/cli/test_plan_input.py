"""Inputs of planning, and plans, given to the commands: exit codes and messages, without Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from llmpq.cli import serve
from llmpq.cli.common import EXIT_BAD_INPUT, EXIT_DONE
from llmpq.cli.measure.forecasts import lengths_main
from quant.common.errors import SpecError
from tests.paths import ROOT
from tests.planner.edits import Edit, change

MODEL = str(ROOT / "examples/demo_model")
SIZES = ["--global_bz", "4", "--s", "16", "--n", "8"]
BOMB = "b0: &b0 {a: 1}\n" + "\n".join(
    f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 10)}]}}" for i in range(1, 9)
)
ONE_T4 = "name: c\nnodes:\n  - accelerators: {T4: 1}\n    usable_memory_gib: SIZE\n"
FOREIGN = (
    "device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer\n"
    "T4,opt-125m,768,3072,64,0,prefill,16,2,1.5\n"
)


def run(main: Callable[[list[str]], int], *arguments: str) -> int:
    """The exit code, also of what the options' parser refuses."""
    try:
        return main(list(arguments))
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("cluster", "more", "message"),
    [
        (BOMB, [], "cluster.yaml:7: with its aliases and merge keys (<<) written out"),
        (ONE_T4.replace("SIZE", "60"), [], "usable_memory_gib: 60 GiB, but a T4-16GB has 16"),
        (
            ONE_T4.replace("SIZE", "8") + "emulate: {time_scale: 1.0e+9}\n",
            [],
            "emulate.time_scale: Input should be less than or equal to 1000",
        ),
        (
            ONE_T4.replace("SIZE", "0.6"),
            ["--dtype", "float32"],
            "0.02 of each GPU's memory is kept free (memory_margin)",
        ),
        (ONE_T4.replace("SIZE", "8"), ["--memory_margin", "1"], "memory_margin is 1.0; it must"),
        (
            "name: c\nnodes: [{accelerators: CPU, memory_gib: 4, threads: 2}]\n",
            ["--profiles", "PROFILE", "--strict_profiles"],
            "has not all times of node0/CPU:0: bits 3, 4, 5, 6, 8, 16: taken on T4-16GB",
        ),
        (
            ONE_T4.replace("SIZE", "8"),
            ["--strict-profiles"],
            "--strict_profiles has no effect without --profiles",
        ),
        (
            ONE_T4.replace("SIZE", "8"),
            ["--shared_tokens", "16"],
            "shared_tokens is 16, but prompts have at most 16 tokens",
        ),
        (
            ONE_T4.replace("SIZE", "8"),
            ["--shared_tokens", "-1"],
            "shared_tokens is -1; it must be at least 0",
        ),
    ],
)
def test_what_cannot_be_planned_with(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cluster: str,
    more: list[str],
    message: str,
) -> None:
    path, profile, plan = (tmp_path / name for name in ("cluster.yaml", "times.csv", "plan.json"))
    path.write_text(cluster)
    profile.write_text(FOREIGN)
    more = [str(profile) if each == "PROFILE" else each for each in more]
    given = ["--model", "opt-125m", *SIZES, "--cluster", str(path), "-o", str(plan), *more]
    assert run(plan_cli.main, *given) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    assert not plan.exists()


def test_what_is_assumed_is_noted_once_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "opt-125m", *SIZES, "--device_names", "V100", "--device_numbers", "2"]
    assert run(plan_cli.main, *given, "--json") == EXIT_DONE
    shown = capsys.readouterr()
    assert shown.err.count("note: V100 is taken for V100-SXM2-16GB (16 GB); if it is") == 1
    stage = json.loads(shown.out)["stages"][0]
    offered = stage["memory_limit_bytes"] + stage["memory_margin_bytes"]
    assert stage["memory_margin_bytes"] == pytest.approx(0.02 * offered, abs=1)


def test_the_table_says_where_times_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "times.csv").write_text(FOREIGN)
    given = ["--model", "opt-125m", *SIZES, "--device_names", "T4", "--device_numbers", "1"]
    assert run(plan_cli.main, *given, "--profiles", str(tmp_path / "times.csv")) == EXIT_DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "times: T4-16GB fitted to 1 profile rows of times.csv (bits 16); estimated: " in shown
    assert (
        "(bits 3, 4, 5, 6, 8: no rows; decode of bits 16: no rows); embedding and LM head" in shown
    )


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's plan."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    cluster = str(ROOT / "cluster_specs/demo_mixed_cpu.yaml")
    given = ["--model", MODEL, *SIZES, "--cluster", cluster, "--keep_all_devices"]
    assert run(plan_cli.main, *given, "-o", str(path)) == EXIT_DONE
    return path


def put_on_one_device(content: dict[str, Any]) -> None:
    del content["digest"]
    content["stages"][1]["device"] = content["stages"][0]["device"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("workload", "global_batch", to=2**20), "field stages.0.memory.kv_cache: "),
        (change("micro_batches", "prefill", to="4"), "field micro_batches.prefill: "),
        (change("stages", 0, "emulated", to=1), "field stages.0.emulated: "),
        (change("stages", 0, "memory", "weights", to=4.0), "field stages.0.memory.weights: "),
        (put_on_one_device, "stands in stages.0.device already"),
        (change("stages", 0, "custom_resource", to="moon"), "field stages.0.custom_resource: "),
        (change("time_scale", to=1e9), "field time_scale: "),
        (change("origin", "cluster", to=BOMB), "field origin: the plan's origin.cluster:7: with"),
    ],
)
def test_an_edited_plan_is_not_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plan_file: Path,
    edit: Edit,
    message: str,
) -> None:
    content = json.loads(plan_file.read_text())
    edit(content)
    plan, prompts, output = (tmp_path / name for name in ("p.json", "in.jsonl", "out.jsonl"))
    plan.write_text(json.dumps(content))
    prompts.write_text('{"prompt": [1]}\n')
    given = ["--plan", str(plan), "--input", str(prompts), "--output", str(output)]
    assert run(run_cli.main, *given) == EXIT_BAD_INPUT
    shown = capsys.readouterr().err
    assert message in shown
    assert f"llmpq-dist: error: {plan}: field " in shown
    assert not output.exists()


def test_python_names_the_file_too(tmp_path: Path, plan_file: Path) -> None:
    content = json.loads(plan_file.read_text())
    change("stages", 0, "custom_resource", to="moon")(content)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match=r"p\.json: field .* plan again with llmpq plan"):
        Plan.load(path).run([[1]])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--chat_template", "BROKEN"], "broken.jinja: expected token 'end of print statement'"),
        (["--chat_template", "BROKEN"], "(line 2 of it); mend it"),
        (["--chat_template_kwargs", "{"], "--chat_template_kwargs: '{' is no JSON"),
        (["--chat-template-kwargs", "[1]"], "'[1]' is no JSON object; give names and values"),
        (["--add_special_tokens", "yes"], "'yes' is neither true nor false"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run", "serve", "lengths"])
def test_what_no_template_can_be_given(
    command: str,
    wrong: list[str],
    message: str,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, prompts, plan = (
        tmp_path / "broken.jinja",
        tmp_path / "in.jsonl",
        ["--plan", str(plan_file)],
    )
    broken.write_text("{% for m in messages %}\n{{ m.content {% endfor %}")
    prompts.write_text('{"prompt": "a", "output_tokens": 1}\n')
    plan, given = ["--plan", str(plan_file)], ["--input", str(prompts)]
    main, arguments = {
        "plan": (plan_cli.main, ["--model", MODEL, *given]),
        "run": (run_cli.main, [*plan, *given, "--output", str(tmp_path / "out.jsonl")]),
        "serve": (serve.main, plan),
        "lengths": (lengths_main, ["train", "--model", MODEL, *given, "-o", str(tmp_path / "p")]),
    }[command]
    wrong = [str(broken) if each == "BROKEN" else each for each in wrong]
    assert run(main, *arguments, *wrong) == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_that_runs_a_plan_says_how_prompts_become_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": [5]}\n')
    how = ["--chat_template_kwargs", '{"mood": "calm"}', "--add_special_tokens", "FALSE"]
    given = [
        "--model",
        MODEL,
        "--input",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "p.json"),
    ]
    devices = ["--device_names", "T4", "--device_numbers", "1"]
    assert run(plan_cli.main, *given, *devices, *how) == EXIT_DONE
    shown = capsys.readouterr().out
    assert """--chat_template_kwargs '{"mood": "calm"}' --add_special_tokens false""" in shown


def test_templates_are_for_rows(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", MODEL, "--prompts", "5", "--chat_template_kwargs", "{}"]
    assert run(plan_cli.main, *given) == EXIT_BAD_INPUT
    assert "--chat_template_kwargs has no effect without --input" in capsys.readouterr().err
