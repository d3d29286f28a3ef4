"""Starts of a run: seconds from the command to its first answers, and where they go.

`python -m benchmarks.speed.start [--before ../CHECKOUT] [--turns 3]` plans the demo's model over
the demo's three devices, which CPUs play, and runs three prompts of one new token each: their
answers are first tokens. The first run finds empty caches of packed layers and compiled loops, the
second one finds them full. With `--before` another checkout takes turns with this one.

Printed as Markdown, medians of all turns: seconds until Ray's first process and the first stage's
were there, until the first answer and until the command had ended; and the CPU seconds of each kind
of process. Where cores are few, these decide.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import ray  # noqa: F401  (brings psutil)

# isort: split
import psutil

from benchmarks.lab import ROOT, header, processor_name, table_row

COMMAND = "import sys; from llmpq.cli.main import main; sys.exit(main())"
CLUSTER = ROOT / "llmpq" / "demo" / "cluster.yaml"
PROMPTS = ("Why is the sky blue?", "What is a prime number?", "Name a river.")
LOOK_S = 0.05
TIMES = ("ray", "stages", "first answer", "end")
KINDS = {
    "tokenizer_child": "tokenizer",
    "worker_forks.py call": "callers",
    "setup_worker.py": "callers",
    "worker_forks.py": "prepared",
    "StageActor": "stages",
    "/ray/": "ray",
    "ray::": "ray",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    trees = {"this": ROOT} | ({} if options.before is None else {"before": options.before})
    found: dict[tuple[str, str], list[Mapping[str, float]]] = defaultdict(list)
    for _ in range(options.turns):
        for name, tree in trees.items():
            for run, figures in starts(tree.resolve()):
                found[name, run].append(figures)
                print(name, run, figures, file=sys.stderr, flush=True)
    kinds = dict.fromkeys(f"CPU: {kind}" for kind in ("driver", *KINDS.values(), "all"))
    print(f"{processor_name()}, {os.cpu_count()} cores, medians of {options.turns} turns\n")
    print(header(["checkout", "run", *TIMES, *kinds]))
    for key, turns in found.items():
        medians = (statistics.median(turn.get(x, 0.0) for turn in turns) for x in (*TIMES, *kinds))
        print(table_row([*key, *(f"{each:.1f}" for each in medians)]))


def starts(tree: Path) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Figures of the first and the second run of a new plan, in a cache folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": text, "max_new_tokens": 1} for text in PROMPTS]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        variables = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(folder / "cache")}
        plan = f"plan --model demo --cluster {CLUSTER} --input rows.jsonl --bits 8 16 -o plan.json"
        command = [sys.executable, "-c", COMMAND]
        subprocess.run([*command, *plan.split()], cwd=folder, env=variables, check=True,
                       capture_output=True)  # fmt: skip
        for run in ("first", "second"):
            words = f"run --plan plan.json --input rows.jsonl --output {run}.jsonl --shard_rows 1"
            began_s = time.monotonic()
            with subprocess.Popen(
                [*command, *words.split()], cwd=folder, env=variables, stderr=subprocess.DEVNULL
            ) as process:
                figures = watched(process, folder / f"{run}.jsonl.job", began_s)
            assert process.returncode == 0, f"llmpq {words} failed"
            yield run, figures


def watched(process: subprocess.Popen[bytes], job: Path, began_s: float) -> dict[str, float]:
    """The seconds at which each thing was seen first, and the CPU seconds by kind of process."""
    seen: dict[str, float] = {}
    cpu_s: dict[int, tuple[str, float]] = {}
    root = psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            for each in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    if not (command := each.cmdline()):  # it has just ended
                        continue
                    kind = "driver" if each == root else kind_of(" ".join(command))
                    used = each.cpu_times()
                    cpu_s[each.pid] = kind, used.user + used.system
                    seen.setdefault(kind, time.monotonic() - began_s)
        if "first answer" not in seen and any(job.glob("part-*")):
            seen["first answer"] = time.monotonic() - began_s
        time.sleep(LOOK_S)
    seen["end"] = time.monotonic() - began_s
    for kind, used_s in cpu_s.values():
        for name in (f"CPU: {kind}", "CPU: all"):
            seen[name] = seen.get(name, 0.0) + used_s
    return seen


def kind_of(command: str) -> str:
    return next((kind for mark, kind in KINDS.items() if mark in command), "other")


if __name__ == "__main__":
    main()
