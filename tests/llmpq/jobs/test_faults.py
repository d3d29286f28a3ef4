"""Exactly once: a job that dies at any of its calls to the disk, or finds it full, is resumed."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from llmpq.jobs.job import JobOptions
from llmpq.jobs.result_lines import OutputOptions
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import (
    OVERWRITE,
    SMALL_SHARDS,
    Crash,
    FaultMode,
    FaultyDisk,
    QuickDisk,
    prompts,
    results_in,
    run_job,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("no_waiting")

PROMPTS = 3
ROWS = [*prompts(PROMPTS), '{"custom_id": "broken"}', {"custom_id": "e", "prompt": "bad one"}]


@dataclass(frozen=True)
class Scenario:
    """A job on top of what earlier ones left: `before` rows done, the first with their errors."""

    target: str = "out.jsonl"
    before: int = 0
    interrupted: int | None = None
    options: OutputOptions = SMALL_SHARDS
    retry: bool = False


SCENARIOS = {
    "new file": Scenario(),
    "new folder": Scenario(target="out/"),
    "new Parquet file": Scenario(target="out.parquet"),
    "new CSV, Zstandard": Scenario(target="out.csv.zst"),
    "longer input": Scenario(before=3),
    "longer input, gzip": Scenario(target="out.jsonl.gz", before=3),
    "longer input, folder": Scenario(target="out/", before=3),
    "overwrite": Scenario(before=len(ROWS), options=OVERWRITE),
    "overwrite shards": Scenario(before=len(ROWS), interrupted=3, options=OVERWRITE),
    "overwrite folder": Scenario(target="out/", before=len(ROWS), options=OVERWRITE),
    "errors again": Scenario(before=len(ROWS), retry=True),
    "errors again, folder": Scenario(target="out/", before=len(ROWS), retry=True),
    "errors again, Parquet": Scenario(target="out.parquet", before=len(ROWS), retry=True),
}

ALL_MODES = ("new file", "new folder", "overwrite")
CASES = [
    (name, mode)
    for name, scenario in SCENARIOS.items()
    for mode in ("torn", "after", "full")
    if mode == "torn" or name in ALL_MODES
]
CASES += [
    pytest.param(name, mode, marks=pytest.mark.rare)
    for name in ("new CSV, Zstandard", "errors again")
    for mode in ("after", "full")
]


class Case:
    """One scenario in a folder of its own."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.kept = folder, folder.with_name("kept")
        self.scenario = scenario
        self.named = f"{folder}/{scenario.target}"
        self.target = Path(self.named)
        self.source = folder / "prompts.jsonl"
        if scenario.before:
            write_prompts(self.source, *ROWS[-scenario.before :])
            run_job(self.source, self.named, limit=scenario.interrupted)
        write_prompts(self.source, *ROWS)
        self.old = self.target.read_bytes() if self.target.is_file() else None
        shutil.copytree(folder, self.kept)

    def begin_again(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)

    def run(self, disk: QuickDisk, options: OutputOptions | None = None) -> None:
        retry = self.scenario.retry
        how = JobOptions(retry, extend=0 < self.scenario.before < len(ROWS))
        run_job(self.source, self.named, options or self.scenario.options, disk, how)

    def check(self) -> None:
        found = results_in(self.target)
        assert set(found) == {*(f"q{i}" for i in range(PROMPTS)), "broken", "e"}
        assert {i: found[f"q{i}"]["text"] for i in range(PROMPTS)} == {
            i: f"prompt {i}"[::-1] for i in range(PROMPTS)
        }
        assert {name for name, row in found.items() if row["error"]} == {"broken", "e"}
        rest = {path.name for path in self.target.parent.rglob("*") if path.is_file()}
        shards = {path.name for path in self.target.glob("part-*")}
        assert rest - shards <= {"prompts.jsonl", self.target.name, "job.json"}

    def check_output_is_old_or_whole(self) -> None:
        if self.target.is_file() and self.target.read_bytes() != self.old:
            assert len(results_in(self.target)) == len(ROWS)
        else:
            assert self.target.is_dir() or self.old is None or self.target.is_file()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_fault_at_any_call_and_a_resume_give_every_id_once(
    name: str, mode: FaultMode, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    draw = random.Random(name + mode)
    case = Case(scenario, tmp_path / "job")
    for fail_at in count(1):
        case.begin_again()
        disk = FaultyDisk(fail_at, mode)
        try:
            case.run(disk)
        except Crash:
            case.check_output_is_old_or_whole()
        except InputError as full:
            case.check_output_is_old_or_whole()
            if "No space left" not in str(full):
                raise
        if disk.calls < fail_at:
            case.check()
            assert fail_at > 10
            return
        if fail_at % 2:
            try:  # once more, wherever it strikes
                case.run(FaultyDisk(draw.randrange(1, 30), mode), SMALL_SHARDS)
            except (Crash, InputError):
                case.check_output_is_old_or_whole()
        case.run(QuickDisk(), SMALL_SHARDS)
        case.check()
