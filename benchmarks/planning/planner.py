"""Speed of the planner: against the published formulation, and on large clusters.

    python -m benchmarks.planning.planner clusters [--update docs/measurements/planner.md]
    python -m benchmarks.planning.planner defaults [--update docs/measurements/planner.md]
    python -m benchmarks.planning.planner bitwidths --clusters 1 3 4
    python -m benchmarks.planning.planner ends

Times are CPU seconds of one process, so that other work on the machine does not count. Costs are
the planner's own: rooflines, and memory by the kernels' rules. Sensitivities are random, uneven
across layers and no product of a layer's and a bitwidth's factor, seeded by the cluster's number.
The LM head stays on the last stage and no device is left out, as in the published formulation, but
in `defaults`: that is a plan as users get it, both places of the head and fewer devices tried, with
the default sensitivities and the baselines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.lab import PAPER_BITS, ROOT, header, show, table_row
from benchmarks.planning.published import PublishedOutcome, solve_published
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.optimiser.assignment import SolveOptions
from planner.optimiser.problem import AssignmentProblem, FloatArray
from planner.optimiser.solve import solve_by
from planner.options import PlanOptions
from planner.plan.builder import Solution
from planner.profiles.sensitivity import default_sensitivity
from planner.search.candidate_search import search
from planner.search.candidates import Candidates, SearchCandidate
from planner.search.find import find_plan
from planner.search.request import cost_model
from planner.workload import Workload
from quant.scheme import BITWIDTHS, FULL_BITS, HEAD_BITWIDTHS

GAP = 1e-4
CLUSTERS = ROOT / "cluster_specs"
WORKLOAD = Workload(global_batch=32, prompt_length=512, new_tokens=100)  # LLM-PQ section 6.1

OTHER_THETA = 1.0  # of clusters that are not the paper's

# LLM-PQ tables 3 and 9: the model served on each cluster, and its theta.
PAPER = {
    1: ("opt-13b", 1.0),
    2: ("opt-13b", 1.0),
    3: ("opt-30b", 1.0),
    4: ("opt-30b", 1000.0),
    5: ("opt-66b", 50.0),
    6: ("opt-66b", 100.0),
    7: ("bloom-176b", 10.0),
    8: ("bloom-176b", 10.0),
    9: ("opt-30b", 1.0),
    10: ("opt-66b", 1.0),
    11: ("bloom-176b", 10.0),
}


@dataclass(frozen=True)
class Timed:
    """One search and its CPU seconds, candidates' problems and bounds included."""

    solution: Solution
    cpu_s: float


def uneven_sensitivity(shape: ModelShape, seed: int) -> FloatArray:
    """Omega [L, K]: the default's size, disturbed by layer and by entry, falling with the bits."""
    rng = np.random.default_rng(seed)
    omega = default_sensitivity(shape, PAPER_BITS)
    factor = np.exp(rng.normal(0, 0.5, len(omega)))[:, np.newaxis]
    disturbed = omega * factor * rng.uniform(0.6, 1.4, omega.shape)
    falling: FloatArray = -np.sort(-disturbed, axis=1)
    return falling


def paper_costs(number: int, options: PlanOptions) -> CostModel:
    """The costs of one of the paper's clusters."""
    name, theta = PAPER[number]
    shape = model_shape(name)
    cluster = ClusterSpec.from_yaml(CLUSTERS / f"paper_{number:02}.yaml")
    omega = uneven_sensitivity(shape, number)
    options = replace(options, bits=PAPER_BITS, theta=theta, memory_margin=0.0)
    return cost_model(cluster, shape, WORKLOAD, options, omega)


def timed_search(costs: CostModel) -> Timed:
    """The whole search for a cluster, with all of its devices."""
    start = time.process_time()
    found = search(replace(costs, options=replace(costs.options, keep_all_devices=True)))
    return Timed(found, time.process_time() - start)


def sampled(candidates: Sequence[SearchCandidate], samples: int) -> list[AssignmentProblem]:
    """Problems spread evenly from the most to the least promising candidate."""
    places = np.linspace(0, len(candidates) - 1, min(samples, len(candidates)))
    return [candidates[round(place)].problem for place in places]


def clusters_table(numbers: Sequence[int], samples: int, limit_s: float) -> Iterator[str]:
    """Markdown rows: the published formulation beside this search."""
    yield header(
        "cluster | devices, layers | candidates | published, sampled (s) | "
        "published, whole search (s) | this search (s) | ratio | solved | gap"
    )
    total_published = total_ours = 0.0
    bounded = False
    for number in numbers:
        costs = paper_costs(number, PlanOptions(relative_gap=GAP, head="last"))
        ours = timed_search(costs)
        problems = sampled(list(Candidates(costs)), samples)
        published = [solve_published(problem, limit_s, GAP) for problem in problems]
        for problem, outcome in zip(problems, published, strict=True):
            check_agreement(problem, outcome)
        cut = any(not outcome.finished for outcome in published)
        bounded = bounded or cut
        mean_s = sum(outcome.cpu_s for outcome in published) / len(published)
        whole_s = mean_s * ours.solution.candidates
        total_published, total_ours = total_published + whole_s, total_ours + ours.cpu_s
        sign = "≥ " if cut else ""
        cells = (
            number,
            f"{problems[0].stages}, {problems[0].layers}",
            ours.solution.candidates,
            ", ".join(("" if o.finished else "≥ ") + f"{o.cpu_s:.1f}" for o in published),
            f"{sign}{whole_s:.0f}",
            f"{ours.cpu_s:.2f}",
            f"{sign}{whole_s / ours.cpu_s:.0f}",
            ours.solution.solved,
            f"{ours.solution.gap:.0e}",
        )
        yield table_row(cells)
    sign = "≥ " if bounded else ""
    yield ""
    yield (
        f"Together: published {sign}{total_published:.0f} s (extrapolated from "
        f"{samples} problems a cluster of at most {limit_s:.0f} s each), this search "
        f"{total_ours:.1f} s, {sign}{total_published / total_ours:.0f} times less."
    )


def check_agreement(problem: AssignmentProblem, published: PublishedOutcome) -> None:
    """Stop where the two formulations contradict each other."""
    ours = solve_by("auto", problem, SolveOptions(relative_gap=GAP))
    worse = ours.objective > published.objective * (1 + GAP + 1e-6)
    missed = published.finished and published.objective > ours.objective * (1 + GAP + 1e-6)
    if worse or missed or published.bound > ours.objective * (1 + 1e-6):
        raise SystemExit(f"ours {ours.objective}, published {published}: they disagree")


KINDS = ("T4-16GB", "P100-PCIE-12GB", "V100-SXM2-32GB", "A100-SXM4-40GB", "V100-SXM2-16GB", "L4")
NODES: dict[str, tuple[str, list[tuple[int, int]]]] = {
    "8 nodes of one T4": ("opt-30b", [(0, 1)] * 8),
    "9 nodes of one T4": ("opt-30b", [(0, 1)] * 9),
    "12 nodes of one T4": ("opt-66b", [(0, 1)] * 12),
    "4 nodes of 4 kinds": ("opt-30b", [(kind, 1) for kind in range(4)]),
    "5 nodes of 5 kinds": ("opt-30b", [(kind, 1) for kind in range(5)]),
    "6 nodes of 6 kinds": ("opt-30b", [(kind, 1) for kind in range(6)]),
    "12 nodes, 3 of each of 4 kinds": ("opt-66b", [(kind, 1) for kind in range(4)] * 3),
    "8 nodes of 2 or 4, 4 kinds": (
        "opt-66b",
        [(0, 4), (0, 4), (1, 4), (1, 2), (2, 2), (2, 4), (3, 2), (3, 2)],
    ),
}
"""Clusters by what they are called: a model, and for each node the kind and number of its GPUs."""


def defaults_table() -> Iterator[str]:
    """Markdown rows of what users get without options, baselines included."""
    yield header("cluster | GPUs | model | candidates | solved | plan (s) | gap | GPUs used")
    for number, (name, theta) in PAPER.items():
        cluster = ClusterSpec.from_yaml(CLUSTERS / f"paper_{number:02}.yaml")
        yield _defaults_row(f"paper {number}", name, cluster, theta)
    for what, (name, nodes) in NODES.items():
        values = {
            "name": what,
            "nodes": [{"accelerators": {KINDS[kind]: count}} for kind, count in nodes],
            "network": {"internode_gbit_per_s": 25},
        }
        yield _defaults_row(what, name, ClusterSpec.from_dict(values), OTHER_THETA)


def bitwidths_table(numbers: Sequence[int]) -> Iterator[str]:
    """Markdown rows: plans of four bitwidths and of six, by the theta of the paper."""
    yield header("cluster | bits | candidates | solved | plan (s) | gap | tokens/s | divergence")
    for number in numbers:
        name, theta = PAPER[number]
        cluster = ClusterSpec.from_yaml(CLUSTERS / f"paper_{number:02}.yaml")
        for bits in (PAPER_BITS, BITWIDTHS):
            options = PlanOptions(theta=theta, bits=bits, head_bits=(FULL_BITS,))
            start = time.process_time()
            plan = find_plan(cluster, model_shape(name), name, WORKLOAD, options).plan
            cpu_s, solver = time.process_time() - start, plan.solver
            lost = "" if plan.quality is None else f"{plan.quality.divergence:.4f}"
            told = (f"{cpu_s:.1f}", f"{solver.gap:.0e}", f"{plan.predicted.tokens_per_s:.1f}", lost)
            listed = " ".join(map(str, bits))
            yield table_row((f"paper {number}", listed, solver.candidates, solver.solved, *told))


def ends_table(numbers: Sequence[int]) -> Iterator[str]:
    """Markdown rows: plans whose embedding and LM head have 16 bit, what is taken where nothing is
    said, and any of their bits.
    """
    yield header("cluster | head_bits | taken | plan (s) | tokens/s | divergence")
    spent = {(FULL_BITS,): 0.0, (): 0.0, HEAD_BITWIDTHS: 0.0}
    for number in numbers:
        name, theta = PAPER[number]
        cluster = ClusterSpec.from_yaml(CLUSTERS / f"paper_{number:02}.yaml")
        for named in spent:
            start, options = time.process_time(), PlanOptions(theta=theta, head_bits=named)
            plan = find_plan(cluster, model_shape(name), name, WORKLOAD, options).plan
            cpu_s = time.process_time() - start
            spent[named] += cpu_s
            lost = "" if plan.quality is None else f"{plan.quality.divergence:.4f}"
            told = plan.head_bits, f"{cpu_s:.1f}", f"{plan.predicted.tokens_per_s:.1f}", lost
            yield table_row((f"paper {number}", " ".join(map(str, named)) or "default", *told))
    plain_s, default_s, chosen_s = spent.values()
    yield ""
    times = f"{default_s / plain_s:.2f} and {chosen_s / plain_s:.2f} times"
    yield f"Together {plain_s:.1f}, {default_s:.1f} and {chosen_s:.1f} s, {times}."


def _defaults_row(what: str, name: str, cluster: ClusterSpec, theta: float) -> str:
    start = time.process_time()
    plan = find_plan(cluster, model_shape(name), name, WORKLOAD, PlanOptions(theta=theta)).plan
    cpu_s = time.process_time() - start
    cells = (
        what,
        len(cluster.devices),
        name,
        plan.solver.candidates,
        plan.solver.solved,
        f"{cpu_s:.1f}",
        f"{plan.solver.gap:.0e}",
        len(cluster.devices) - len(plan.unused_devices),
    )
    return table_row(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and update a page or plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["clusters", "defaults", "bitwidths", "ends"])
    parser.add_argument("--clusters", type=int, nargs="+", default=list(PAPER), choices=PAPER)
    parser.add_argument("--samples", type=int, default=3, help="published problems a cluster")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each of them")
    parser.add_argument("--update", type=Path, help="page whose section is replaced")
    chosen = parser.parse_args(arguments)
    if chosen.what == "clusters":
        rows = clusters_table(chosen.clusters, chosen.samples, chosen.limit)
    elif chosen.what == "bitwidths":
        rows = bitwidths_table(chosen.clusters)
    elif chosen.what == "ends":
        rows = ends_table(chosen.clusters)
    else:
        rows = defaults_table()
    show(rows, chosen.update, chosen.what)


if __name__ == "__main__":
    main()
