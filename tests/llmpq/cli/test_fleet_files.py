"""Files of fleets on the command line: what takes them, and what says that it does not."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmpq import Fleet
from llmpq.cli import run as run_cli
from llmpq.cli import serve
from llmpq.cli.measure.checkpoints import quantize_main
from llmpq.cli.measure.quality import evaluate_main
from llmpq.cli.submit import entrypoint
from llmpq.errors import SpecError
from planner.fleet.fleet_spec import shown_plan
from tests.llmpq.conftest import EMULATED
from tests.llmpq.fake_jobs import write_prompts

QUANTIZE = ["--output", "quantized", "--calibration", "text.txt"]
RUN = ["--input", "in.jsonl", "--output", "out.jsonl"]


@pytest.fixture
def here(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the fleet, prompts, and a cluster that is another one."""
    fleet.save(tmp_path / "fleet.json")
    write_prompts(tmp_path / "in.jsonl", {"prompt": [3, 4]})
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "other.yaml").write_text(EMULATED.replace("T4", "A10G"))
    (tmp_path / "same.yaml").write_text(EMULATED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("main", "options", "words"),
    [
        (evaluate_main, ["--text", "text.txt"], "fleet.json: a fleet of pipelines where one plan"),
        (
            quantize_main,
            ["--output", "quantized", "--calibration", "text.txt"],
            "a fleet of pipelines where one plan belongs",
        ),
        (run_cli.main, [*RUN, "--replan", "auto"], "replan auto has no effect with a fleet"),
        (run_cli.main, [*RUN, "--trace", "t.json"], "trace has no effect with a fleet"),
        (run_cli.main, [*RUN, "--cluster", "other.yaml"], "'two-pipelines', which differs from"),
        (serve.main, ["--replicas", "2"], "--replicas has no effect with a fleet"),
        (serve.main, [], "the model folder has no tokenizer"),
    ],
)
def test_what_takes_no_fleet_says_so_with_exit_code_2(
    main: Callable[[list[str]], int],
    options: list[str],
    words: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--plan", "fleet.json", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (here / "out.jsonl").exists()


def test_a_cluster_with_all_devices_of_the_fleet_is_the_one_that_was_planned_for(
    here: Path, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--plan", "fleet.json", *RUN, "--cluster", "same.yaml", "--model", "nothing"]
    assert run_cli.main(command) == 2
    assert "differs from" not in capsys.readouterr().err, "the model is what is missing"


def test_a_fleet_travels_with_a_job(here: Path, fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    command = ["--plan", "fleet.json", "--input", "in.jsonl", "--output", "/shared/out.jsonl"]
    words = shlex.split(entrypoint(command, shown_plan(fleet.spec), folder))
    assert words[:4] == ["exec", "llmpq-dist", "--plan", "plan.json"]
    assert Fleet.load(folder / "plan.json").spec == fleet.spec


def test_rooms_that_differ_are_refused(fleet: Fleet) -> None:
    first, second = fleet.spec.replicas
    wide: Any = replace(second, workload=replace(second.workload, prompt_length=17))
    unequal = Fleet(replace(fleet.spec, replicas=(first, wide)), "f.json")
    with pytest.raises(SpecError, match=r"field replicas\.1\.workload: room for 17 prompt"):
        unequal.run([[3]])
