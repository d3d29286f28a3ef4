"""Jobs and serving of two checkouts in turns: what a change to the product costs or wins.

`git worktree add --detach ../before COMMIT`, then `python -m benchmarks.speed.trees ../before
[--work static orca serve] [--model demo] [--turns 5]`. Each tree makes its own plan of one stage
on this machine's CPU, and does the work by its command line in processes of its own, the other
tree first in every second turn. Printed as Markdown: for each work medians with least and most of
both, and the ratio of this checkout to the other, turn by turn. A fixed loop is timed beside each
turn; where its seconds differ, the machine was not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.lab import ROOT, header, processor_name, spread, table_row

COMMAND = "import sys; from llmpq.cli.main import main; sys.exit(main())"
CLUSTER = {
    "name": "one",
    "nodes": [{"name": "a", "accelerators": {"V100-SXM2-16GB": 1}}],
    "emulate": {"time_scale": 0},
}
SLOTS, PROMPT_WORDS = 16, (8, 30)
CLIENTS, WARM_UPS = 8, 16
WORDS = ["one", "two", "red", "blue", "old", "new", "house", "tree", "walk", "see", "small"]
SUMMARY = re.compile(r"(\d+) tokens in ([\d.]+) (s|ms|min)")
PROBE_LOOPS = 3_000_000


def prompts(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(*PROMPT_WORDS))) for _ in range(count)]


class Tree:
    """A checkout, with a folder in which its commands run."""

    def __init__(self, root: Path, folder: Path, model: str, tokens: int) -> None:
        self._root, self._folder, self._tokens = root.resolve(), folder, tokens
        folder.mkdir()
        (folder / "cluster.json").write_text(json.dumps(CLUSTER))  # which is YAML too
        sizes = f"--s 128 --n {tokens} --global_bz {SLOTS} --bits 16"
        for policy in ("static", "orca"):
            self.call(
                f"plan --model {model} --cluster cluster.json {sizes} --policy {policy} "
                f"-o {policy}.json"
            )

    def start(self, arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments.split()],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(self._root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, arguments: str) -> str:
        process = self.start(arguments)
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{self._root}: llmpq {arguments} ended with an error:\n{said}")
        return said

    def job(self, policy: str, rows: list[str]) -> dict[str, float]:
        """Tokens per second that the command tells, and seconds of the whole command."""
        lines = [json.dumps({"custom_id": f"{i}", "prompt": text}) for i, text in enumerate(rows)]
        (self._folder / "rows.jsonl").write_text("\n".join(lines))
        began = time.perf_counter()
        said = self.call(
            f"run --plan {policy}.json --input rows.jsonl --output out.jsonl --overwrite "
            f"--ignore_eos --generation_config none --max_new_tokens {self._tokens}"
        )
        whole_s = time.perf_counter() - began
        found = SUMMARY.search(said)
        if found is None or int(found[1]) != len(rows) * self._tokens:
            raise SystemExit(f"{self._root}: the job did not make all tokens:\n{said}")
        seconds = float(found[2]) * {"ms": 1e-3, "s": 1, "min": 60}[found[3]]
        return {"tokens/s": int(found[1]) / seconds, "whole command, s": whole_s}

    def serve(self, rows: list[str]) -> dict[str, float]:
        """Requests per second of clients that each send the next when the last is answered."""
        process = self.start("serve --plan orca.json --port 0 --served_model_name it")
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://[\w.]+:(\d+)", line):
                    break
            else:
                raise SystemExit(f"{self._root}: the server ended before it listened")
            port = int(found[1])
            while _ready_status(port) != HTTPStatus.OK and process.poll() is None:
                time.sleep(0.2)
            self._requests(port, rows[:WARM_UPS])
            began = time.perf_counter()
            self._requests(port, rows)
            return {"requests/s": len(rows) / (time.perf_counter() - began)}
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()

    def _requests(self, port: int, rows: list[str]) -> None:
        def client(number: int) -> None:
            connection = HTTPConnection("127.0.0.1", port)
            for text in rows[number::CLIENTS]:
                body = {"model": "it", "prompt": text, "max_tokens": self._tokens}
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body | {"ignore_eos": True, "temperature": 0}),
                    {"Content-Type": "application/json"},
                )
                answer = json.loads(connection.getresponse().read())
                if answer.get("usage", {}).get("completion_tokens") != self._tokens:
                    raise SystemExit(f"{self._root}: an answer is not complete: {answer}")

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))


def _ready_status(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/ready")
    return connection.getresponse().status


def probe_s() -> float:
    began = time.perf_counter()
    sum(i * i for i in range(PROBE_LOOPS))
    return time.perf_counter() - began


def race(work: str, rows: list[str], trees: list[Tree], turns: int) -> list[str]:
    """Rows of the table: both trees' figures of each turn, with their ratios."""
    found: list[list[dict[str, float]]] = [[], []]
    probes = []
    for turn in range(turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            probes.append(probe_s())
            tree = trees[i]
            found[i].append(tree.serve(rows) if work == "serve" else tree.job(work, rows))
    lines = []
    for figure in found[0][0]:
        before, now = ([one[figure] for one in each] for each in found)
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        shown = [spread(before, 1), spread(now, 1), spread(ratios, 3), spread(probes, 2)]
        lines.append(table_row([figure, *shown]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="checkout to compare this one with")
    parser.add_argument("--work", nargs="+", default=["static", "orca", "serve"])
    parser.add_argument("--model", default=str(ROOT / "examples/demo_model"))
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    rows = prompts(options.rows)
    print(f"{processor_name()}; {options.rows} rows, {options.tokens} tokens each\n")
    print(header("work | figure | before | now | now / before | probe, s"))
    with tempfile.TemporaryDirectory() as folder:
        trees = [
            Tree(root, Path(folder) / name, options.model, options.tokens)
            for name, root in (("before", options.before), ("now", ROOT))
        ]
        for work in options.work:
            for line in race(work, rows, trees, options.turns):
                print(f"| {work} {line}", flush=True)


if __name__ == "__main__":
    main()
