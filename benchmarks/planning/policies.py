"""Which policy is fastest for which job: forecasts of plans for `static`, `orca` and `auto`.

    python -m benchmarks.planning.policies [--model opt-6.7b] [--devices T4-16GB] [--seconds 10]
    python -m benchmarks.planning.policies --run [--passes 3]

Twelve shapes of job, drawn with a fixed seed; two stages unless the shape says otherwise. Each plan
is searched for so many CPU seconds (of `auto` both together), and its tokens per second are those
of the whole job simulated. `--run` plans jobs of SmolLM2 for two stages of this machine's CPU in
place of these, and runs those that differ in turns, each from stages that are started anew.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.lab import header, processor_name, spread, table_row
from benchmarks.speed.throughput_contestants import CLUSTER
from llmpq import Cluster, Session
from planner.cluster.spec import ClusterSpec
from planner.lengths import IntArray, Lengths
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.search.find import find_plan
from planner.workload import Job
from quant.checkpoint.model_reference import DEMO

ROWS = 2000
Draw = Callable[[np.random.Generator, int], tuple[IntArray, IntArray]]


def alike(prompt: int, output: int) -> Draw:
    """Rows that are all of these lengths."""
    return lambda _, rows: (np.full(rows, prompt), np.full(rows, output))


def even(prompts: tuple[int, int], outputs: tuple[int, int]) -> Draw:
    """Every length of these ranges as likely as every other."""
    return lambda random, rows: (random.integers(*prompts, rows), random.integers(*outputs, rows))


def long_tail(prompt: float, output: float, longest: int) -> Draw:
    """Lengths as of chats, about these in the median: a few are some twenty times as long."""

    def draw(random: np.random.Generator, rows: int) -> tuple[IntArray, IntArray]:
        prompts = random.lognormal(np.log(prompt), 1, rows)
        outputs = random.lognormal(np.log(output), 1.2, rows)
        return tuple(np.clip(each, 1, longest).astype(int) for each in (prompts, outputs))

    return draw


@dataclass(frozen=True)
class Shape:
    """A kind of job; `stages` devices run it."""

    name: str
    draw: Draw
    rows: int = ROWS
    stages: int = 2

    def job(self) -> Job:
        """The job, of at most as many sampled rows as a plan keeps."""
        prompts, outputs = self.draw(np.random.default_rng(0), min(self.rows, 512))
        return Job(self.rows, Lengths(tuple(prompts.tolist()), tuple(outputs.tolist())))

    def prompts(self, turn: int) -> list[dict[str, object]]:
        """Rows of the job's lengths, of tokens that no other turn has."""
        random, lengths = np.random.default_rng(turn + 1), self.job().lengths
        return [
            {
                "prompt": random.integers(3, 30_000, prompt).tolist(),
                "max_new_tokens": output,
                "ignore_eos": True,
            }
            for prompt, output in zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)
        ]


MIXED = even((16, 512), (8, 200))
SHAPES = (
    Shape("equal lengths", alike(512, 100)),
    Shape("mixed", MIXED),
    Shape("long tail", long_tail(150, 55, 512)),
    Shape("prefill-heavy", even((512, 1024), (8, 32))),
    Shape("decode-heavy", even((16, 64), (200, 500))),
    Shape("short answers", even((64, 512), (1, 8))),
    Shape("few rows", MIXED, rows=24),
    Shape("many rows", MIXED, rows=20_000),
    Shape("one stage", MIXED, stages=1),
    Shape("four stages", MIXED, stages=4),
    Shape("equal and short prompts", alike(64, 400)),
    Shape("equal and long prompts", alike(1024, 16)),
)

MIXED_RUN = even((16, 128), (4, 48))
RUN = (
    Shape("equal lengths", alike(64, 24), rows=48),
    Shape("mixed", MIXED_RUN, rows=48),
    Shape("long tail", long_tail(32, 12, 128), rows=48),
    Shape("decode-heavy", even((8, 32), (32, 96)), rows=32),
    Shape("short answers", even((32, 256), (1, 8)), rows=48),
    Shape("one stage", MIXED_RUN, rows=48, stages=1),
)
RUN_IN_FLIGHT = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and print Markdown."""
    options = read_options(arguments)
    if options.run:
        run_jobs(options)
    else:
        forecast(options)


def run_jobs(options: argparse.Namespace) -> None:
    """Jobs on this machine's CPU, under each policy in turns."""
    print(f"{processor_name()}; SmolLM2-135M at 16 and 8 bit on two stages, or one, of a thread\n")
    heads = ["job", "policy", "plan for", "foretold tokens/s", "measured"]
    print(header([*heads, f"of {options.policies[0]}'s"]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        for shape in RUN:
            file.write_text(CLUSTER.format(stages=shape.stages, threads=1))
            cluster = Cluster.from_yaml(file)
            for row in _rows_of(shape, cluster, options):
                print(table_row(row), flush=True)


def _rows_of(
    shape: Shape, cluster: Cluster, options: argparse.Namespace
) -> Iterable[Sequence[object]]:
    plans = {
        policy: cluster.plan(
            DEMO,
            shape.job(),
            bits=(8, 16),
            in_flight=RUN_IN_FLIGHT,
            policy=policy,
            search_time_limit=options.seconds,
        )
        for policy in options.policies
    }
    keys = {
        policy: (plan.spec.policy.name, str(plan.spec.stages)) for policy, plan in plans.items()
    }
    different = {keys[policy]: plan for policy, plan in plans.items()}
    paces: dict[object, list[float]] = {key: [] for key in different}
    for turn in range(options.passes):
        for key, plan in different.items():
            with plan.session(no_cache=True) as session:
                _pace(session, shape.prompts(options.passes)[:4])  # warms up
                paces[key].append(_pace(session, shape.prompts(turn)))
    first = paces[keys[options.policies[0]]]
    for policy, plan in plans.items():
        measured = paces[keys[policy]]
        ratios = [one / other for one, other in zip(measured, first, strict=True)]
        foretold = f"{plan.predicted.tokens_per_s:,.0f}"
        taken = plan.spec.policy.name
        yield shape.name, policy, taken, foretold, spread(measured, 0), spread(ratios, 2)


def _pace(session: Session, rows: list[dict[str, object]]) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    results = session.run(rows, temperature=0.0)
    tokens = sum(len(result.token_ids) for result in results)
    return tokens / (time.perf_counter() - began)


def forecast(options: argparse.Namespace) -> None:
    """What plans foretell of each shape of job."""
    print(f"{processor_name()}; {options.model} on {options.devices}, at 16 and 8 bit\n")
    *_, last = names = options.policies
    print(header(f"job | {' | '.join(names)} | {last} takes | of the better one | CPU seconds"))
    shape = model_shape(options.model)
    for each in SHAPES:
        cluster = ClusterSpec.from_counts([options.devices], [each.stages])
        plans, seconds = {}, []
        for policy in names:
            given = {"policy": policy, "bits": (8, 16), "search_time_limit": options.seconds}
            asked, began = PlanOptions.of(given), time.process_time()
            found = find_plan(
                cluster, shape, options.model, each.job(), asked, clock=time.process_time
            )
            plans[policy] = found.plan
            seconds.append(f"{time.process_time() - began:.1f}")
        rates = {policy: plan.predicted.tokens_per_s for policy, plan in plans.items()}
        cells = " | ".join(f"{rate:,.0f}" for rate in rates.values())
        share = rates[last] / max(rates.values())
        taken = plans[last].policy.name
        row = f"| {each.name} | {cells} | {taken} | {share:.3f} | {', '.join(seconds)} |"
        print(row, flush=True)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="opt-6.7b")
    parser.add_argument("--devices", default="V100-SXM2-16GB", help="the kind of all of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    parser.add_argument("--policies", nargs="+", default=["static", "orca", "auto"])
    parser.add_argument("--run", action="store_true", help="real stages of this machine's CPU")
    parser.add_argument("--passes", type=int, default=3, help="of each policy, with --run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
