"""A job under faults at random times: what is lost, what is doubled, and what a fault costs.

    python -m benchmarks.stress.chaos [--seed 1] [--faults 25] [--rows 500] [--transport gloo]

`llmpq run` runs the demo model (float32, 16 bit, greedy) on three Ray nodes on this machine with
one emulated device each, once without faults and once with. Faults follow each other as soon as the
job goes on, and four of ten come with a second one on top of them: SIGKILL and SIGSTOP
of a stage's process; a Ray node removed for some seconds, or until the job has planned again for
what is left; SIGKILL, SIGTERM and SIGINT of the driver, which is started again; and a full disk: a
small tmpfs is filled (only where this process may mount one). Time lost is from the fault to the
next commit after everything is repaired (each result is its own commit, `--shard-rows 1`); for a
driver it includes the start of the process. The process ends with 1 when a row is lost, doubled,
has an error or another text than without faults, when the driver ends by itself, or when it hangs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from os import kill
from pathlib import Path

import torch

from benchmarks.lab import header, processor_name
from benchmarks.stress.chaos_job import DEVICES, STUCK_S, ChaosError, Disk, DistJob, Nodes
from llmpq import Cluster, Workload

MODEL = "examples/demo_model"
PROMPTS = Path("examples/demo_prompts.jsonl")
CLUSTER = """
name: chaos
nodes:
  - {name: a, accelerators: {T4: 1}}
  - {name: b, accelerators: {V100: 1}}
  - {name: c, accelerators: {A100: 1}}
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""
WORKLOAD = Workload(8, 64, 16)
HANG_S = 4.0
REPLACE_S = 20.0  # a node that returns does so before
LONGEST_AWAY_S = 5.0
ON_TOP = 0.4
MENDED = ("going on after", "started again", "planned again")
DONE = 0
EXPECTED_CODES = {"SIGKILL driver": -9, "SIGTERM driver": 143, "SIGINT driver": 130, "disk full": 2}
NOTICED_S = 60.0
LOOK_S = 0.02


@dataclass
class Lost:
    """Seconds that each fault cost, by kind; a fault on top of another is counted with that one."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    on_top: Counter[str] = field(default_factory=Counter)

    def count(self) -> int:
        """Faults in all."""
        return sum(map(len, self.seconds.values())) + sum(self.on_top.values())


class Chaos:
    """Faults to `job`, drawn by `seed`."""

    def __init__(self, job: DistJob, nodes: Nodes, disk: Disk, seed: int, kinds: set[str]) -> None:
        self._job, self._nodes, self._disk = job, nodes, disk
        self._draw = random.Random(seed)
        self._marks = 0
        self.lost = Lost()
        self._stage_kinds: dict[str, tuple[float, Callable[[], None]]] = {
            "SIGKILL stage": (6, lambda: self._signal_stage(signal.SIGKILL)),
            "SIGSTOP stage": (2, lambda: self._signal_stage(signal.SIGSTOP)),
        }
        self._kinds: dict[str, tuple[float, Callable[[], None]]] = {
            **self._stage_kinds,
            "node returns": (1.5, self._node_returns),
            "node lost": (0.7, self._node_lost),
            "SIGKILL driver": (1.5, lambda: self._driver("SIGKILL driver", signal.SIGKILL)),
            "SIGTERM driver": (0.7, lambda: self._driver("SIGTERM driver", signal.SIGTERM)),
            "SIGINT driver": (0.7, lambda: self._driver("SIGINT driver", signal.SIGINT)),
            "disk full": (1, self._disk_full),
        }
        if not disk.is_mounted:
            del self._kinds["disk full"]
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in kinds}

    def run(self, faults: int, seconds: float) -> None:
        """Start the job and disturb it, for so long; then let it come to its end."""
        ends = time.monotonic() + seconds
        self._job.start()
        self._await(lambda: self._job.committed() > 0)
        while self.lost.count() < faults and time.monotonic() < ends:
            self._pause(self._draw.uniform(0.0, 1.0))
            if self._job.ended() is not None:
                break
            self._fault()
        self._await(lambda: False)
        code = self._job.wait_for_end()
        if code != DONE:
            raise ChaosError(f"the driver ended with {code}: {self._job.told()[-3000:]}")

    def _fault(self) -> None:
        weights = [weight for weight, _ in self._kinds.values()]
        kind = self._draw.choices(list(self._kinds), weights)[0]
        self._marks = self._mended()
        began = time.monotonic()
        committed = self._job.committed()
        self._say(f"{kind} at {committed} rows")
        self._kinds[kind][1]()
        if self._draw.random() < ON_TOP:
            self._on_top()
        if kind not in EXPECTED_CODES:
            self._await(lambda: self._mended() > self._marks, NOTICED_S)
            if self._mended() <= self._marks and self._job.ended() is None:
                self._say(f"{kind} hit nothing that was needed, and does not count")
                return
        before = self._job.committed()
        self._await(lambda: self._job.committed() > before)
        lost_s = time.monotonic() - began
        self.lost.seconds.setdefault(kind, []).append(lost_s)
        self._say(f"{kind} cost {lost_s:.1f} s")

    def _on_top(self) -> None:
        self._await(lambda: self._nodes.stage_pids() != [])
        self._pause(self._draw.uniform(0.0, 4.0))
        kind = self._draw.choice(list(self._stage_kinds))
        if self._nodes.stage_pids() and self._job.ended() is None:
            self._say(f"{kind} on top")
            self._stage_kinds[kind][1]()
            self.lost.on_top[kind] += 1

    def _signal_stage(self, what: int) -> None:
        self._await(lambda: self._nodes.stage_pids() != [])
        with suppress(ProcessLookupError):  # it has died since
            kill(self._draw.choice(self._nodes.stage_pids()), what)

    def _node_returns(self) -> None:
        name = self._draw.choice(self._nodes.in_use() or self._nodes.present)
        self._nodes.remove(name)
        self._pause(self._draw.uniform(0.5, LONGEST_AWAY_S))
        self._nodes.add(name)

    def _node_lost(self) -> None:
        """Until there is another plan."""
        used = self._nodes.in_use()
        if len(used) < 2:
            self._node_returns()
            return
        name = self._draw.choice(used)
        self._nodes.remove(name)
        self._await(lambda: self._mended() > self._marks, REPLACE_S + 15)
        self._nodes.add(name)
        self._marks = min(self._marks, self._mended() - 1)

    def _driver(self, kind: str, what: int) -> None:
        self._job.send(what)
        self._restart(kind)

    def _disk_full(self) -> None:
        self._disk.fill()
        self._await(lambda: self._job.ended() is not None)
        self._disk.free()
        self._restart("disk full")

    def _restart(self, kind: str) -> None:
        code = self._job.wait_for_end()
        if code not in (EXPECTED_CODES[kind], DONE):
            raise ChaosError(
                f"after {kind} the driver ended with {code}: {self._job.told()[-3000:]}"
            )
        self._job.start()

    def _mended(self) -> int:
        told = self._job.told()
        return sum(told.count(words) for words in MENDED)

    def _await(self, happened: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Until then, or the driver's end; raises `ChaosError` if the job makes no progress."""
        began = moved = time.monotonic()
        committed = self._job.committed()
        while not happened() and self._job.ended() is None and time.monotonic() - began < limit_s:
            now = self._job.committed()
            if now != committed:
                committed, moved = now, time.monotonic()
            if time.monotonic() - moved > STUCK_S:
                pids = self._nodes.stage_pids()
                raise ChaosError(
                    f"no commit for {STUCK_S:g} s, stages {pids}: {self._job.diagnosis()}"
                )
            time.sleep(LOOK_S)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _say(self, line: str) -> None:
        print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def differences(expected: Path, found: Path) -> list[str]:
    """Describe the rows that are lost, doubled or different; empty where there are none."""
    should = {row["custom_id"]: row for row in map(json.loads, expected.open())}
    rows = [json.loads(line) for line in found.open()]
    seen = Counter(row["custom_id"] for row in rows)
    problems = [f"{i} is lost" for i in should if not seen[i]]
    problems += [f"{i} is there {n} times" for i, n in seen.items() if n > 1]
    problems += [f"{i} was not asked for" for i in seen if i not in should]
    for row in rows:
        if row.get("error"):
            problems.append(f"{row['custom_id']} is an error row: {row['error']}")
        elif row != should.get(row["custom_id"]):
            problems.append(f"{row['custom_id']} has another text")
    return problems


def write_prompts(path: Path, count: int) -> None:
    """The demo prompts again and again, each with a number."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.open()]
    with path.open("w") as file:
        for i in range(count):
            row = {"custom_id": f"row-{i}", "prompt": f"{i} {prompts[i % len(prompts)][:60]}"}
            file.write(json.dumps(row) + "\n")


def table(lost: Lost) -> str:
    """Markdown."""
    lines = [header("fault | alone | on top | median s | worst s")]
    for kind in sorted({*lost.seconds, *lost.on_top}):
        seconds = lost.seconds.get(kind, [])
        figures = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "| "
        lines.append(f"| {kind} | {len(seconds)} | {lost.on_top[kind]} | {figures} |")
    return "\n".join(lines)


def arguments_for(folder: Path, output: Path, nodes: Nodes, transport: str) -> list[str]:
    """The arguments of `llmpq run`."""
    return [
        *("--plan", str(folder / "plan.json"), "--input", str(folder / "prompts.jsonl")),
        *("--output", str(output), "--address", nodes.address, "--transport", transport),
        *("--cache-dir", str(folder / "cache"), "--shard-rows", "1", "--ignore-eos"),
        *("--hang-s", str(HANG_S), "--replace-s", str(REPLACE_S)),
    ]


def undisturbed(folder: Path, nodes: Nodes, transport: str) -> Path:
    """The output of a run without faults."""
    output = folder / "expected.jsonl"
    job = DistJob(arguments_for(folder, output, nodes, transport), output, folder / "expected.log")
    with job:
        job.start()
        assert job.process is not None
        if job.process.wait() != DONE:
            raise ChaosError(f"without faults it failed: {job.told()[-3000:]}")
    return output


def measure(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The report, and what is wrong."""
    with tempfile.TemporaryDirectory() as name, Nodes() as nodes, Disk() as disk:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl", options.rows)
        (folder / "cluster.yaml").write_text(CLUSTER)
        cluster = Cluster.from_yaml(folder / "cluster.yaml")
        plan = cluster.plan(MODEL, WORKLOAD, dtype="float32", bits=[16], keep_all_devices=True)
        plan.save(folder / "plan.json")
        began = time.monotonic()
        expected = undisturbed(folder, nodes, options.transport)
        alone_s = time.monotonic() - began
        output = disk.folder / "out.jsonl"
        command = arguments_for(folder, output, nodes, options.transport)
        job = DistJob(command, output, folder / "run.log")
        chaos = Chaos(job, nodes, disk, options.seed, set(options.kinds or _KINDS))
        began = time.monotonic()
        try:
            with job:
                chaos.run(options.faults, options.seconds)
            problems = differences(expected, output)
        except ChaosError as error:
            problems = [str(error)]
        seconds = time.monotonic() - began
        if options.log:
            Path(options.log).write_text(job.told())
    raw = json.dumps({"seconds": chaos.lost.seconds, "on_top": chaos.lost.on_top})
    report = (
        f"Seed {options.seed}, {options.transport}, {options.rows} rows, {len(DEVICES)} stages, "
        f"{processor_name()}, torch {torch.__version__}: {chaos.lost.count()} faults in "
        f"{seconds:.0f} s ({alone_s:.0f} s without), {job.starts} starts of the driver, "
        f"{len(problems)} rows or events amiss.\n\n{table(chaos.lost)}\n\n<!-- {raw} -->"
    )
    return report, problems


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was lost, doubled or changed."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Ray's nodes are ended all the same
    with redirect_stdout(sys.stderr):  # Ray tells of nodes that die
        report, problems = measure(options)
    print(report)
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


_KINDS = (
    *("SIGKILL stage", "SIGSTOP stage", "node returns", "node lost", "SIGKILL driver"),
    *("SIGTERM driver", "SIGINT driver", "disk full"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=25, help="at most: the rows may end before")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no faults after so long")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--transport", choices=("gloo", "ray"), default="gloo")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, help="only these (all)")
    parser.add_argument("--log", help="keep what the driver wrote")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
