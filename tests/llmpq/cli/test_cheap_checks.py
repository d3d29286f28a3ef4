"""What can be refused without torch or Ray is refused before they are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmpq import Cluster, Plan, Workload, job_of_input
from llmpq.jobs.inputs import JobInput
from llmpq.jobs.job import OpenJob
from llmpq.jobs.job_output import JobOutput
from llmpq.run.checkpoint import job_identity
from llmpq.run.options import RunOptions
from planner.cluster.spec import ClusterSpec
from tests.llmpq.fake_jobs import SMALL_SHARDS, QuickDisk, answer
from tests.paths import ROOT, SPECS
from tests.planner.plan_alone import alone

DEMO_CLUSTER = SPECS / "demo_mixed_cpu.yaml"
MODEL = ROOT / "examples/demo_model"
PROMPTS = ROOT / "examples/demo_prompts.jsonl"
TEXT = ROOT / "README.md"

MOST_MODULES = 1000
"""That are imported by then; torch alone has as many more."""

HEAVY = ("torch", "ray", "transformers", "scipy", "pandas", "pyarrow")

CODE = f"""
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from pkgutil import resolve_name
from llmpq.cli.main import SUBCOMMANDS, main

todo = json.loads(sys.argv[1])
for command, _ in todo.values():  # once for all forks
    resolve_name(f"llmpq.cli.{{SUBCOMMANDS[command].entry}}")
for name, (command, calls) in todo.items():
    if os.fork():
        os.wait()
        continue
    for arguments in calls:
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            try:
                code = main([command, *arguments])
            except SystemExit as left:
                code = left.code
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        print(json.dumps([name, code, heavy, len(sys.modules), said.getvalue()]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's plan, an input with an id twice, and the output of a demo job that is done."""
    made = tmp_path_factory.mktemp("cheap")
    with alone():
        job = job_of_input(PROMPTS, MODEL, 48)
        plan = Cluster.from_yaml(DEMO_CLUSTER).plan(
            MODEL, job, theta=1.0, in_flight=8, policy="static", bits=(3, 4, 8, 16)
        )
    plan.save(made / "plan.json")
    lines = PROMPTS.read_text().splitlines(keepends=True)
    (made / "twice.jsonl").write_text("".join([*lines, lines[0]]))
    finish(plan, made / "done.jsonl")
    node = {"accelerators": {"CPU": 1}, "threads": 4096, "memory_gib": 1}
    crowd = Cluster(ClusterSpec.from_dict({"name": "crowd", "nodes": [node]}))
    crowd.plan(MODEL, Workload(2, 16, 4)).save(made / "threads.json")
    cluster = DEMO_CLUSTER.read_text().replace("T4", "V100", 1)
    (made / "other.yaml").write_text(cluster)
    rounded = json.loads((made / "plan.json").read_text()) | {"rounding": "gptq"}
    del rounded["digest"]
    (made / "gptq.json").write_text(json.dumps(rounded))
    return made


def finish(plan: Plan, target: Path) -> None:
    source = JobInput.find([PROMPTS])
    with JobOutput(target, SMALL_SHARDS, disk=QuickDisk()) as output:
        job = OpenJob(source, output, job_identity(plan.spec, RunOptions()))
        for result in answer(job.todo()):
            job.write(result)
        job.finish()


RUN = ("--plan", "plan.json", "--input", PROMPTS, "--output", "out.jsonl")
QUANTIZE = ("--plan", "plan.json", "--calibration", TEXT, "-o", "quantized")
INDICATOR = ("--model", MODEL, "--calibration", TEXT, "-o", "omega.json")
EVAL = ("--bits", "4", "--model", MODEL, "--text", TEXT)
PLAN = ("--model", MODEL, "--cluster", DEMO_CLUSTER)
MISTAKES: dict[str, list[tuple[tuple[object, ...], str]]] = {
    "run": [
        ((*RUN, "--input", "twice.jsonl"), "stands in"),
        ((*RUN, "--plan", "gone.json"), "cannot read plan gone.json"),
        ((*RUN, "--importance", "gone"), "gone cannot be read"),
        ((*RUN, "--importance", PROMPTS), "holds no importance"),
        ((*RUN, "--plan", "threads.json"), "needs 4096 CPUs for 1 stage, but this machine has"),
        ((*RUN, "--input", "gone.jsonl"), "cannot read input gone.jsonl"),
        ((*RUN, "--cluster", "other.yaml"), "which differs from other.yaml"),
        ((*RUN, "--output", "done.jsonl", "--temperature", "1"), "was made with temperature"),
        ((*RUN, "--trace", "gone/run.json"), "cannot write the trace"),
        ((*RUN, "--policy", "s3", "--predictor", "gone"), "'gone' is no folder"),
        ((*RUN, "--policy", "exegpt"), "llmpq plan --max_request_latency_s"),
        ((*RUN, "--max_new_tokens", "999"), "the plan has room for 48"),
        ((*RUN, "--model", "./gone"), "no folder"),
    ],
    "serve": [
        (("--plan", "plan.json", "--importance", "gone"), "gone cannot be read"),
        (("--plan", "threads.json"), "or of fewer threads each, or give the --address"),
        (("--plan", "plan.json", "--policy", "exegpt"), "the plan has none"),
        (("--plan", "plan.json", "--model", "./gone"), "no folder"),
    ],
    "plan": [
        ((*PLAN, "-o", "gone/plan.json"), "name a file in a folder that exists"),
        ((*PLAN, "--report", "gone/plan.html"), "name a file in a folder that exists"),
        ((*PLAN, "--input", "gone"), "cannot read input gone"),
    ],
    "quantize": [
        ((*QUANTIZE, "--plan", "gone.json"), "cannot read plan gone.json"),
        ((*QUANTIZE, "--calibration", "gone.txt"), "cannot read text gone.txt"),
        ((*QUANTIZE, "--device", "tpu"), "choose from auto, cpu, cuda"),
        ((*QUANTIZE, "--damping", "-1"), "damping is -1.0"),
        ((*QUANTIZE, "-o", MODEL), "is the model itself"),
    ],
    "indicator": [
        ((*INDICATOR, "--input", "gone"), "cannot read input gone"),
        ((*INDICATOR, "--dtype", "int8"), "unknown value 'int8'"),
        ((*INDICATOR, "--perplexity", "gone"), "cannot read text gone"),
        ((*INDICATOR, "--model", "./gone"), "no folder"),
    ],
    "eval": [
        ((*EVAL, "--importance", "gone"), "gone cannot be read"),
        ((*EVAL, "--bits", "7"), "bitwidth 7 is not one of"),
        ((*EVAL, "--text", "gone"), "cannot read text gone"),
    ],
    "profile": [
        (("--model", MODEL, "-o", "times.csv", "--points", "0"), "points is 0"),
        (("--model", "gone", "-o", "times.csv"), "gone"),
        (("--model", MODEL, "-o", "gone/times.csv"), "a folder that exists"),
    ],
}


CALLS: dict[str, tuple[str, list[tuple[object, ...]]]] = {
    **{name: (name, [arguments for arguments, _ in calls]) for name, calls in MISTAKES.items()},
    "done": ("run", [(*RUN, "--output", "done.jsonl")]),
    "checkpoint": (
        "run",
        [("--plan", "gptq.json", "--input", "twice.jsonl", "--output", "out.jsonl")],
    ),
    "devices": ("devices", [()]),
    "models": ("models", [()]),
}
"""Commands, each in a process of its own, and the arguments of its calls."""

Told = tuple[int, list[str], int, str]


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, list[Told]]:
    """Of each call: the exit code, heavy modules and how many in all, and what was said."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(CALLS, default=str)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "400", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, list[Told]] = {name: [] for name in CALLS}
    for name, *call in map(json.loads, done.stdout.splitlines()):
        answers[name].append(tuple(call))
    return answers


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_anything_slow_is_imported(
    name: str, told: dict[str, list[Told]], folder: Path
) -> None:
    for (_, message), (code, heavy, _, said) in zip(MISTAKES[name], told[name], strict=True):
        assert (code, heavy) == (2, []), said
        assert message in said
    assert told[name][0][2] < MOST_MODULES
    assert not (folder / "out.jsonl").exists()


def test_a_job_that_is_done_is_told_at_once(told: dict[str, list[Told]]) -> None:
    [(code, heavy, modules, said)] = told["done"]
    assert (code, heavy) == (0, []), said
    assert "all 72 rows are done" in said
    assert modules < MOST_MODULES


def test_ids_are_looked_at_before_a_checkpoint_is_calibrated(told: dict[str, list[Told]]) -> None:
    [(code, heavy, _, said)] = told["checkpoint"]
    assert (code, heavy) == (2, []), said
    assert "twice.jsonl:73 stands in twice.jsonl:1 already" in said


@pytest.mark.parametrize("name", ["devices", "models"])
def test_a_list_takes_little_work(name: str, told: dict[str, list[Told]]) -> None:
    [(code, heavy, modules, said)] = told[name]
    assert (code, heavy) == (0, []), said
    assert modules < MOST_MODULES
