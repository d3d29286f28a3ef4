"""Pictures of the README, `docs/planner.md` and `docs/report.md`, made from real commands: the
planning of a job, its first seconds, its page, and a run in the terminal.

    python -m benchmarks.pictures [--folder docs] [--parts plan page run]

`planning.svg` is what `llmpq plan` prints of a job of OPT-30b on `cluster_specs/t4_v100_a100.yaml`,
`in_flight.svg` the curve of that plan over prompts in flight. `plan.svg` is the beginning of a job
of few slots and short answers on the same cluster, as `--trace` draws it. `run.svg` is what
`llmpq run` shows of the demo job: one moment of the run, and its end. `report_wide.png` and
`report_narrow.png` are the beginning of that plan's page in a window of 1280 pixels, light, and of
400, dark; they need playwright (`pip install '.[browser]'`) and Chromium (LLMPQ_BROWSER names it).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llmpq import Plan
from llmpq.report.plan_charts import curve_of, curve_svg

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 80
PAGE_HEIGHT = 900  # pixels of a page that are shown
SPECS = ROOT / "cluster_specs"
_REDRAWN = re.compile(r"\r?(?:\x1b\[(?:2K|1A|\?25[lh])\r?)+")
_IN_SLOTS = re.compile(r"queued, (\d+) in")
_JOB = "--model opt-30b --cluster cluster_specs/t4_v100_a100.yaml --prompts 3000 --s 512"
_PLAN = f"{_JOB} --n 100 --search_time_limit 60"
_FIRST_FILLS = f"{_JOB} --n 10 --in_flight 16 --theta 1"  # few enough passes to be told apart


def shown(module: str, arguments: list[str]) -> str:
    """Run a command line as in a colour terminal; returns all that it writes there."""
    settings = {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stderr + done.stdout


def busiest(frames: list[str]) -> str:
    """The moment that shows a run under way: the latest of those with the most slots in use."""
    used = [int(found[1]) if (found := _IN_SLOTS.search(f)) else -1 for f in frames]
    return frames[max(range(len(frames)), key=lambda i: (used[i], i))]


def save(path: Path, command: str, output: str) -> None:
    """Write a terminal's text with its colours as an SVG file."""
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output.strip("\n")))
    console.save_svg(str(path), title="llmpq")


def plan_pictures(folder: Path) -> None:
    """Write `planning.svg`, `in_flight.svg` and `plan.svg`."""
    with tempfile.TemporaryDirectory() as aside:
        plan = f"{aside}/plan.json"
        text = shown("llmpq.cli.plan", [*_PLAN.split(), "-o", plan])
        text = _REDRAWN.split(text)[-1].replace(plan, "plan.json")  # without the bar of the search
        curve = curve_of(Plan.load(plan).spec)
        assert curve is not None, "the plan of a job has one"
        (folder / "in_flight.svg").write_text(curve_svg(curve, alone=True))
    save(folder / "planning.svg", f"llmpq plan {_PLAN} -o plan.json", text)
    shown("llmpq.cli.plan", [*_FIRST_FILLS.split(), "--trace", str(folder / "plan.svg")])


def page_pictures(folder: Path) -> None:
    """Write `report_wide.png` and `report_narrow.png`."""
    from playwright.sync_api import sync_playwright

    installed = os.environ.get("LLMPQ_BROWSER") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as aside, sync_playwright() as playwright:
        page = Path(aside) / "page.html"
        shown("llmpq.cli.plan", [*_PLAN.split(), "--report", str(page)])
        browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        for name, width, scheme in (("wide", 1280, "light"), ("narrow", 400, "dark")):
            window = browser.new_page(
                viewport={"width": width, "height": PAGE_HEIGHT}, color_scheme=scheme
            )
            window.goto(page.as_uri())
            window.screenshot(path=folder / f"report_{name}.png")
        browser.close()


def run_picture(folder: Path) -> None:
    """Write `run.svg`."""
    cluster, prompts = "cluster_specs/demo_mixed_cpu.yaml", "examples/demo_prompts.jsonl"
    with tempfile.TemporaryDirectory() as aside:
        plan, results = f"{aside}/plan.json", f"{aside}/results.jsonl"
        asked = ["--model", "examples/demo_model", "--cluster", cluster, "--input", prompts]
        shown("llmpq.cli.plan", [*asked, "--n", "48", "-o", plan])
        told = ["--plan", plan, "--cluster", cluster, "--input", prompts, "--output", results]
        *frames, end = _REDRAWN.split(shown("llmpq.cli.run", told))
    text = f"{busiest(frames).strip()}\n\n{end.strip()}".replace(f"{aside}/", "")
    command = f"llmpq run --plan plan.json --input {prompts} --output results.jsonl"
    save(folder / "run.svg", command, text)


PARTS = {"plan": plan_pictures, "page": page_pictures, "run": run_picture}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    for part in options.parts:
        PARTS[part](options.folder)
    print(f"the pictures of {', '.join(options.parts)} are in {options.folder}")


if __name__ == "__main__":
    main()
