"""LLM-PQ's experiments beside its tables of latencies, each by a command of its own.

    python -m benchmarks.reproduction.paper_experiments table_8 [--update docs/reproduction.md]

Experiments of the planner, on the layer times and with the options of `paper_tables`: `table_8`
(grouped layers, single layers and bitwidth transfer), `six_gpus` (section 6.7), `figure_8` (theta)
and `figure_9` (adaptive quantization alone). Experiments on a model (`paper_quality`): `table_1`
(which third of the layers is at 4 bit), `figure_4` (bitwidths mixed at random) and `perplexities`
(the bits of the plans of tables 4, 5 and 7). `--update` replaces what stands between the markers of
an experiment on a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.lab import PAPER_BITS, processor_name, update_page
from benchmarks.planning.planner import uneven_sensitivity
from benchmarks.quantization.models import MODELS
from benchmarks.reproduction import paper_quality
from benchmarks.reproduction.paper_report import (
    BASELINES,
    LLM_PQ,
    Case,
    bits_by_layers,
    markdown_table,
    number,
)
from benchmarks.reproduction.paper_tables import (
    DATA,
    Setting,
    cases,
    cluster_of,
    paper_options,
    plan_bits,
)
from benchmarks.reproduction.profiles_2023 import profile_rows
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec
from planner.profiles.rows import write_profiles
from planner.profiles.sensitivity import OmegaContent, save_omega
from planner.search.find import find_plan
from quant.common.errors import InfeasibleError

TURNS = 3  # of every search that is timed; the median counts
LIMIT_S = 600.0  # for a search, so that none is cut off; one integer programme has 60, as in 6.7
LESS_GIB = (0, 1, 2)
CALIBRATED_GIB = 1
"""Memory that each GPU lacks where the paper's ratios are met best (`paper_tables`)."""

GROUP_2, GROUP_1, HEURISTIC = "group = 2", "group = 1", "heuristic"
METHODS: Mapping[str, Mapping[str, Any]] = {
    GROUP_2: {"group": 2},
    GROUP_1: {"group": 1},
    HEURISTIC: {"method": "transfer"},
}
# Table 8: tokens/s and seconds with Gurobi, by cluster.
TABLE_8 = {
    3: {GROUP_2: (39.70, 1.07), GROUP_1: (39.70, 3.29), HEURISTIC: (35.17, 5.36)},
    6: {GROUP_2: (39.56, 2.70), GROUP_1: (44.93, 19.14), HEURISTIC: (28.45, 7.70)},
    4: {GROUP_2: (14.72, 12.29), GROUP_1: (13.93, 204.59), HEURISTIC: (14.94, 1.99)},
    10: {GROUP_2: (16.64, 59.27), GROUP_1: (17.57, 127.28), HEURISTIC: (17.97, 2.11)},
}

# Section 6.7 names neither the nodes' network nor theta: as in clusters 4 and 6, which have these
# GPUs, and for theta as in cluster 6, which serves the same model.
SIX_GPUS_S = 31.0
SIX_GPUS = {
    "name": "paper_six_gpus",
    "nodes": [
        {"accelerators": {"P100-PCIE-12GB": 2}},
        {"accelerators": {"V100-SXM2-32GB": 2}},
        {"accelerators": {"A100-SXM4-40GB": 2}},
    ],
    "network": {"internode_gbit_per_s": 100},
}

# The paper calls the first three 1x, 10x and 100x; its unit of sensitivity is not ours, so that
# larger ones are tried too.
THETA_FACTORS = (0.1, 1.0, 10.0, 100.0, 1000.0)
PAPER_FACTORS = 3
FIGURE_8_CLUSTERS = (9, 5)
FIGURE_9 = ((3, False), (5, False), (6, False), (9, False), (4, True))  # short prompts or not


@dataclass(frozen=True)
class Inputs:
    """The paper's cases, and the folder with the layer times that they are planned with."""

    cases: tuple[Case, ...]
    folder: Path

    @property
    def profiles(self) -> Path:
        """The CSV of layer times."""
        return self.folder / "profiles_2023.csv"

    def case(self, cluster: int, short: bool = False) -> Case:
        """The case of a cluster with the usual workload, or with short prompts."""
        found = (c for c in self.cases if c.cluster == cluster and (c.table == 7) == short)
        return next(found)

    def uneven(self, case: Case) -> Path:
        """An omega file with sensitivities that differ by layer, seeded by the cluster's number."""
        path = self.folder / f"omega_{case.cluster}.json"
        if not path.exists():
            shape = model_shape(case.model)
            matrix = uneven_sensitivity(shape, case.cluster)
            save_omega(path, OmegaContent(PAPER_BITS, shape.fingerprint(), matrix))
        return path

    def plan(self, case: Case, cluster: ClusterSpec, **changes: Any) -> PlanSpec | None:
        """The plan with `changes` to the options of `paper_tables`; None where nothing fits.

        Its seconds are CPU seconds.
        """
        options = replace(paper_options(case, self.profiles), search_time_limit=LIMIT_S, **changes)
        asked = cluster, model_shape(case.model), case.model, case.workload, options
        try:
            return find_plan(*asked, time.process_time).plan
        except InfeasibleError:
            return None

    def timed(
        self, case: Case, cluster: ClusterSpec, changes: Mapping[str, Any]
    ) -> tuple[PlanSpec, float]:
        """The plan of a search, and the median of its seconds over some turns."""
        plans = [self.plan(case, cluster, **changes) for _ in range(TURNS)]
        found = [plan for plan in plans if plan is not None]
        return found[0], median(plan.solver.seconds for plan in found)


def read_inputs(data: Path, folder: Path) -> Inputs:
    """The cases and layer times of the reference data, written to `folder`."""
    tables = json.loads((data / "paper_tables.json").read_text(encoding="utf-8"))
    inputs = Inputs(tuple(cases(tables)), folder)
    write_profiles(inputs.profiles, profile_rows(data / "llmpq_layer_latency_2023.csv"))
    return inputs


def table_8(inputs: Inputs) -> str:
    """Throughput, quality and seconds of planning with grouped layers and with the heuristic."""
    header = ["cluster", "method", "tokens/s, paper", "ours", "objective (s)", "sensitivity"]
    header += ["proven gap", "planning (s), paper", "ours", "ours, HiGHS", "solved"]
    rows = []
    for which, published in TABLE_8.items():
        case = inputs.case(which)
        for name, (tokens_per_s, seconds) in published.items():
            ours, others = _planning_cells(inputs, case, cluster_of(case), name)
            label = f"{which} {case.model}{case.extrapolated}"
            rows.append([label, name, f"{tokens_per_s:.2f}", *ours, f"{seconds:.2f}", *others])
    return markdown_table(header, rows)


def six_gpus(inputs: Inputs) -> str:
    """Figures of planning for two P100, two V100 and two A100 (section 6.7)."""
    case, cluster = inputs.case(6), ClusterSpec.from_dict(SIX_GPUS)
    header = ["method", "tokens/s", "objective (s)", "sensitivity", "proven gap"]
    header += ["planning (s), paper", "ours", "ours, HiGHS", "solved"]
    rows = []
    for name in METHODS:
        ours, others = _planning_cells(inputs, case, cluster, name)
        rows.append([name, *ours, f"{SIX_GPUS_S:.0f}" if name == HEURISTIC else "–", *others])
    return markdown_table(header, rows)


def _planning_cells(
    inputs: Inputs, case: Case, cluster: ClusterSpec, name: str
) -> tuple[list[str], list[str]]:
    """Cells of a plan by a method of table 8, and of how long finding it took."""
    changes = {"omega_file": inputs.uneven(case), **METHODS[name]}
    plan, seconds = inputs.timed(case, cluster, changes)
    programme_s = "–"
    if name != HEURISTIC:
        _, taken = inputs.timed(case, cluster, {**changes, "method": "ilp"})
        programme_s = f"{taken:.2f}"
    solver = plan.solver
    quality = [f"{solver.objective:.2f}", f"{solver.sensitivity:.5f}", f"{solver.gap:.0e}"]
    work = f"{solver.solved} of {solver.candidates}"
    ours = [f"{plan.predicted.tokens_per_s:.2f}", *quality]
    return ours, [f"{seconds:.2f}", programme_s, work]


def figure_8(inputs: Inputs) -> str:
    """Throughput and quality at a tenth of theta, at theta and at ten times theta."""
    header = ["cluster", "less memory a GPU", "theta", "paper calls it", "tokens/s"]
    header += ["sensitivity", "mean bits", "bits x layers"]
    rows = []
    for which in FIGURE_8_CLUSTERS:
        case = inputs.case(which)
        for less_gib in LESS_GIB:
            for place, factor in enumerate(THETA_FACTORS):
                theta = factor * case.theta
                plan = inputs.plan(case, cluster_of(case, less_gib), theta=theta)
                cells = [f"{which} {case.model}", f"{less_gib} GiB", f"{theta:g}"]
                called = f"{10 * factor:g}x" if place < PAPER_FACTORS else "–"
                rows.append([*cells, called, *_quality_cells(plan)])
    return markdown_table(header, rows)


def _quality_cells(plan: PlanSpec | None) -> list[str]:
    """Throughput, summed sensitivity, mean bits of a layer and layers of each bitwidth."""
    if plan is None:
        return ["–"] * 4
    bits = plan_bits(plan)
    return [
        f"{plan.predicted.tokens_per_s:.2f}",
        f"{plan.solver.sensitivity:.4f}",
        f"{sum(bits) / len(bits):.2f}",
        bits_by_layers(bits),
    ]


def figure_9(inputs: Inputs) -> str:
    """Throughput and quality of LLM-PQ and of adaptive quantization alone."""
    header = ["cluster", "less memory a GPU", "LLM-PQ, paper (tokens/s)", "LLM-PQ", "adabits"]
    header += ["adabits, batch / stages", "LLM-PQ / adabits", "/ with batch / stages"]
    header += ["LLM-PQ sensitivity", "adabits", "LLM-PQ bits", "adabits bits"]
    rows = []
    for which, short in FIGURE_9:
        case = inputs.case(which, short)
        for less_gib in LESS_GIB:
            label = f"{which} {case.model}{case.extrapolated}{', short' if short else ''}"
            rows.append([label, f"{less_gib} GiB", *_adabits_cells(inputs, case, less_gib)])
    return markdown_table(header, rows)


def _adabits_cells(inputs: Inputs, case: Case, less_gib: int) -> Iterator[str]:
    """Cells of LLM-PQ's plan beside those of least sensitivity, with free and fixed sizes."""
    cluster, batch = cluster_of(case, less_gib), case.workload.global_batch
    fixed = -(-batch // len(cluster.devices))
    sizes = {"prefill_micro_batch": fixed, "decode_micro_batch": fixed}
    plans = [
        inputs.plan(case, cluster),
        inputs.plan(case, cluster, method="adabits"),
        inputs.plan(case, cluster, method="adabits", **sizes),
    ]
    paper = case.paper[LLM_PQ]
    tokens = batch * case.workload.new_tokens
    yield number(None if paper is None else tokens / paper.latency_s, ".2f")
    rates = [None if plan is None else plan.predicted.tokens_per_s for plan in plans]
    yield from (number(rate, ".2f") for rate in rates)
    for rate in rates[1:]:
        yield number(rates[0] / rate if rates[0] and rate else None, ".2f")
    for plan in plans[:2]:
        yield number(None if plan is None else plan.solver.sensitivity, ".4f")
    for plan in plans[:2]:
        yield "–" if plan is None else bits_by_layers(plan_bits(plan))


def perplexities(inputs: Inputs, models: Sequence[str]) -> str:
    """Perplexities of the bits that LLM-PQ and the baselines have with the calibrated memory."""
    plans: dict[tuple[str, str], dict[str, paper_quality.Told]] = {}
    for case in inputs.cases:
        cluster, layers = cluster_of(case, CALIBRATED_GIB), model_shape(case.model).layers
        plan = inputs.plan(case, cluster)
        bits = {LLM_PQ: None if plan is None else plan_bits(plan)}
        setting = Setting(cluster, case.model, case.workload, inputs.profiles, PAPER_BITS)
        for name in BASELINES:
            found = setting.baseline(name.lower()).bitwidth
            bits[name] = None if found is None else [found] * layers
        told = {
            name: (each and each.perplexity, bits[name])
            for name, each in case.paper.items()
            if name in bits
        }
        plans[str(case.table), f"{case.cluster} {case.model}{case.extrapolated}"] = told
    return paper_quality.perplexities(plans, models)


PERPLEXITIES = "perplexities"
PLANNING: Mapping[str, Callable[[Inputs], str]] = {
    "table_8": table_8,
    "six_gpus": six_gpus,
    "figure_8": figure_8,
    "figure_9": figure_9,
}
QUALITY: Mapping[str, Callable[[], str]] = {
    "table_1": paper_quality.table_1,
    "figure_4": paper_quality.figure_4,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one experiment, print its table, and update a page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=(*PLANNING, *QUALITY, PERPLEXITIES))
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"of {PERPLEXITIES}")
    parser.add_argument("--update", type=Path, help="page whose section is replaced")
    chosen = parser.parse_args(arguments)
    began = time.process_time()
    if chosen.what not in QUALITY:
        with tempfile.TemporaryDirectory() as folder:
            inputs = read_inputs(chosen.data, Path(folder))
            planned = chosen.what in PLANNING
            text = PLANNING[chosen.what](inputs) if planned else perplexities(inputs, chosen.models)
        software = f"HiGHS {version('highspy')}"
    else:
        text = QUALITY[chosen.what]()
        software = f"torch {torch.__version__}"
    seconds = time.process_time() - began
    machine = f"{processor_name()}, 1 thread, {software}; {seconds:.0f} CPU seconds in all."
    lines = ["", text, "", machine, ""]
    sys.stdout.write("\n".join(lines) + "\n")
    if chosen.update is not None:
        update_page(chosen.update, chosen.what, lines)


if __name__ == "__main__":
    main()
