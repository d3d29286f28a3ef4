"""Tokens per second of one pipeline and of pipelines that share the job, on three mixed clusters.

Everything is simulated, with the times of data sheets: one pipeline by simulating its passes,
replicas by handing rows out as slots become free. `groups` are tensor-parallel ones, chosen by the
planner. All plans have the quality `balanced`; perplexity is expected by the layers' sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from benchmarks.lab import header, show
from llmpq.report.quality import rise
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetSpec
from planner.fleet.planning import FleetRequest, find_fleet
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.workload import Job
from quant.common.errors import InfeasibleError

NODES = (("T4", 4), ("P100", 4), ("V100-SXM2-32GB", 2), ("A100-40GB", 2))
"""Nodes of a grown cluster, again and again: a type, and how many of it."""

INTERNODE_GBIT_PER_S = 25
SPECS = Path("cluster_specs")


def grown_cluster(devices: int) -> ClusterSpec:
    """So many GPUs of the four types on nodes of 4 or 2."""
    nodes = []
    for number, (name, count) in enumerate(cycle(NODES)):
        if devices <= 0:
            break
        nodes.append({"name": f"node{number}", "accelerators": {name: min(count, devices)}})
        devices -= count
    values = {
        "name": "grown",
        "nodes": nodes,
        "network": {"internode_gbit_per_s": INTERNODE_GBIT_PER_S},
    }
    return ClusterSpec.from_dict(values)


def single_gpu_nodes() -> ClusterSpec:
    """Sixteen machines with one GPU each, of four types, on a slow network."""
    kinds = ("T4", "V100-SXM2-32GB", "P100", "A100-40GB")
    nodes = [{"name": f"pc{n}", "accelerators": {kinds[n % 4]: 1}} for n in range(16)]
    values = {"name": "sixteen", "nodes": nodes, "network": {"internode_gbit_per_s": 10}}
    return ClusterSpec.from_dict(values)


def mixed_clusters() -> dict[str, ClusterSpec]:
    """Three clusters of unlike devices, by what they are."""
    return {
        "4 T4, 2 V100, A100, L4 on 3 nodes": ClusterSpec.from_yaml(SPECS / "t4_v100_a100.yaml"),
        "16 nodes of one GPU, 4 types": single_gpu_nodes(),
        "24 GPUs of 4 types on 8 nodes": ClusterSpec.from_yaml(SPECS / "mixed_24.yaml"),
    }


MODELS = ("opt-30b", "opt-66b")
PROMPTS, PROMPT, OUTPUT = 5000, 512, 100
SEARCH_S = 12.0  # of CPU time, so that what else a machine does changes no plan
WAYS = ("one pipeline", "one, groups", "replicas", "replicas, groups")


@dataclass(frozen=True)
class Compared:
    """One model on one cluster: tokens per second and nats a token that are lost by way, the
    pipelines of the best fleet, and the ceiling.
    """

    cluster: str
    model: str
    tokens_per_s: tuple[float, ...]
    divergence: tuple[float, ...]
    make_up: str
    ceiling: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what this part is told."""
    parser.add_argument("--update", type=Path, help="page whose tables are replaced")
    parser.add_argument("--plot", type=Path, help="picture to draw (SVG)")


def run(options: argparse.Namespace) -> None:
    """Print the tokens per second of every model on every cluster."""
    found = [
        compared(label, cluster, model)
        for label, cluster in mixed_clusters().items()
        for model in MODELS
    ]
    show(table(found), options.update, "fleets")
    if options.plot is not None:
        plot(found, options.plot)


def compared(label: str, cluster: ClusterSpec, model: str) -> Compared:
    """Plan all ways of using a cluster for a model."""
    plans = [
        _one(cluster, model, PlanOptions(tensor_parallel=degree, search_time_limit=SEARCH_S))
        for degree in (1, "auto")
    ]
    fleets = [
        _many(cluster, model, PlanOptions(tensor_parallel=degree, search_time_limit=SEARCH_S))
        for degree in (1, "auto")
    ]
    best = max(fleets, key=lambda fleet: fleet.tokens_per_s)
    make_up = ", ".join(f"{len(own)} of {name}" for name, own in best.make_ups().items())
    speeds = [plan.predicted.tokens_per_s if plan else 0.0 for plan in plans]
    return Compared(
        label,
        model,
        (*speeds, *(fleet.tokens_per_s for fleet in fleets)),
        (*(_lost(plan) if plan else 0.0 for plan in plans), *map(_lost_by, fleets)),
        make_up,
        best.record.ceiling_tokens_per_s,
    )


def _one(cluster: ClusterSpec, model: str, options: PlanOptions) -> PlanSpec | None:
    asked = cluster, model_shape(model), model, _job(), options
    try:
        return find_plan(*asked, time.process_time).plan
    except InfeasibleError:
        return None


def _many(cluster: ClusterSpec, model: str, options: PlanOptions) -> FleetSpec:
    request = FleetRequest(cluster, model_shape(model), model, _job(), options)
    return find_fleet(request, time.process_time)


def _job() -> Job:
    return Job.of(PROMPTS, PROMPT, OUTPUT)


def _lost(plan: PlanSpec) -> float:
    return 0.0 if plan.quality is None else plan.quality.divergence


def _lost_by(fleet: FleetSpec) -> float:
    """The mean of the pipeline that makes a token."""
    speeds = [plan.predicted.tokens_per_s for plan in fleet.replicas]
    pairs = zip(speeds, fleet.replicas, strict=True)
    return sum(speed * _lost(plan) for speed, plan in pairs) / sum(speeds)


def table(found: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of the table; more perplexity in brackets."""
    yield header(f"cluster | model | {' | '.join(WAYS)} | replicas / one | ceiling | pipelines")
    for each in found:
        pairs = zip(each.tokens_per_s, each.divergence, strict=True)
        cells = [f"{speed:,.0f} ({rise(nats)})" if speed else "–" for speed, nats in pairs]
        one = max(each.tokens_per_s[:2])
        ratio = f"{max(each.tokens_per_s[2:]) / one:.2f}" if one else "–"
        cells += [ratio, f"{each.ceiling:,.0f}", each.make_up]
        yield f"| {each.cluster} | {each.model} | {' | '.join(cells)} |"


def plot(found: Sequence[Compared], path: Path) -> None:
    """Draw bars of tokens per second, a panel for each cluster; needs matplotlib."""
    import matplotlib.pyplot as plt

    clusters = list(dict.fromkeys(each.cluster for each in found))
    figure, panels = plt.subplots(1, len(clusters), figsize=(10, 3.2), layout="constrained")
    for panel, cluster in zip(panels, clusters, strict=True):
        own = [each for each in found if each.cluster == cluster]
        for number, way in enumerate(WAYS):
            places = [index + 0.2 * number for index in range(len(own))]
            panel.bar(places, [each.tokens_per_s[number] for each in own], 0.18, label=way)
        panel.set_xticks([index + 0.3 for index in range(len(own))], [e.model for e in own])
        panel.set_title(cluster, fontsize=9)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(fontsize=8)
    figure.savefig(path)
