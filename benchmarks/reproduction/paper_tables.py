"""LLM-PQ's tables 4, 5 and 7 by simulation, beside the latencies that the paper measured.

    python -m benchmarks.reproduction.paper_tables [--update docs/reproduction.md]

Plans and their simulation are those of `llmpq plan`, baselines those of section 6.1. Layer times
are fitted on the authors' published latencies of 2023 (`profiles_2023`), theta is that of table 9.
`--update` replaces what stands between the markers of a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lab import PAPER_BITS
from benchmarks.reproduction.paper_report import (
    BASELINES,
    FLEXGEN,
    FLEXGEN_INT8,
    LLM_PQ,
    LLMPQ,
    OFFLOADING,
    PAPER_SCHEMES,
    Case,
    Outcome,
    PaperResult,
    Scheme,
    bits_by_layers,
    report,
)
from benchmarks.reproduction.profiles_2023 import profile_rows
from planner.cluster.spec import ClusterSpec
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.optimiser.names import Objective
from planner.options import PlanOptions
from planner.plan.spec import Baseline, PlanSpec
from planner.profiles.fit import FittedLatency
from planner.profiles.rows import read_profiles, write_profiles
from planner.profiles.sensitivity import default_sensitivity
from planner.search.baselines import baseline, offloading
from planner.search.find import find_plan
from planner.workload import Workload
from quant.common.errors import InfeasibleError
from quant.common.units import GIB


@dataclass(frozen=True)
class Setting:
    """A model on a cluster; `profiles` is a CSV of layer times, `bits` ascending."""

    cluster: ClusterSpec
    model: str
    workload: Workload
    profiles: Path
    bits: tuple[int, ...]

    def baseline(self, name: str) -> Baseline:
        """The baseline of this name (`planner.search.baselines`)."""
        return baseline(self._costs(), name)

    def streamed_bytes(self, name: str) -> float:
        """Bytes that the fullest GPU streams in a round of this offloading baseline."""
        return float(offloading(self._costs(), name).host_bytes.max())

    def at_bitwidth(self, bits: int) -> Setting:
        """The setting with one bitwidth to choose from."""
        return replace(self, bits=(bits,))

    def _costs(self) -> CostModel:
        shape = model_shape(self.model)
        latency = FittedLatency(read_profiles(self.profiles), RooflineLatency(shape))
        options = PlanOptions(dtype="float16", bits=self.bits, memory_margin=0.0)
        sensitivity = default_sensitivity(shape, options.bits)
        return CostModel(self.cluster, shape, self.workload, options, latency, sensitivity)


ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
OBJECTIVES: dict[str, Objective] = {LLM_PQ: "paper", LLMPQ: "pipeline"}
LESS_GIB = (0, 1, 2)  # what a GPU is supposed to lack, to see what memory decides
# Table 7's perplexities, seconds and tokens/s of FlexGen, which the file of the tables lacks.
SHORT_OFFLOADING = {
    "1": {FLEXGEN: (11.22, 119.24, 53.68), FLEXGEN_INT8: (11.23, 80.35, 79.65)},
    "4": {FLEXGEN: (10.70, 2147.03, 2.98), FLEXGEN_INT8: (10.70, 681.78, 9.39)},
    "6": {FLEXGEN: (10.33, 408.19, 15.68), FLEXGEN_INT8: (10.34, 376.69, 16.99)},
}
# Perplexities of tables 4, 5 and 7 by bitwidth: FlexGen's are of 16 and 8 bit, the next two steps
# down those of 4 and 3 bit.
BITS_OF_PERPLEXITY = {
    "opt-13b": {11.22: 16, 11.23: 8, 11.38: 4, 11.78: 3},
    "opt-30b": {10.70: 8, 10.78: 4, 10.80: 3},
    "opt-66b": {10.33: 8, 10.34: 8, 10.50: 4},
    "bloom-176b": {10.90: 8, 10.97: 4},
}
DEFAULT_TABLES = {cluster: 4 if cluster <= 8 else 5 for cluster in range(1, 12)}


def cases(tables: Mapping[str, Any]) -> Iterator[Case]:
    """Tables 4 and 5 with the default workload, then table 7 with short prompts."""
    for kind in ("default", "short"):
        for name, serving in tables[f"serving_{kind}_workload"].items():
            cluster = tables["clusters"][name]
            paper = serving if kind == "default" else SHORT_OFFLOADING[name] | serving
            yield Case(
                table=DEFAULT_TABLES[int(name)] if kind == "default" else 7,
                cluster=int(name),
                model=cluster["model"],
                workload=Workload(**tables[f"workload_{kind}"]),
                theta=float(tables["theta_and_solver"][name][0]),
                devices=tuple(device for device, _ in cluster["devices"]),
                paper={
                    scheme: _paper_result(cluster["model"], paper.get(scheme))
                    for scheme in (*PAPER_SCHEMES, *OFFLOADING)
                },
            )


def _paper_result(model: str, columns: Sequence[float] | None) -> PaperResult | None:
    """Perplexity, latency and throughput of the paper; None where it ran out of memory."""
    if columns is None:
        return None
    perplexity, latency_s, _ = columns
    return PaperResult(latency_s, perplexity, BITS_OF_PERPLEXITY[model].get(perplexity))


def outcome(case: Case, profiles: Path, less_gib: int) -> Outcome:
    """Plan one cluster under both objectives, and its baselines; memory less `less_gib` a GPU."""
    began = time.perf_counter()
    cluster = cluster_of(case, less_gib)
    schemes = {}
    for name, objective in OBJECTIVES.items():
        options = replace(paper_options(case, profiles), objective=objective)
        schemes[name] = _planned(case, cluster, options)
    setting = Setting(cluster, case.model, case.workload, profiles, PAPER_BITS)
    schemes |= {name: _scheme(setting.baseline(name.lower())) for name in BASELINES}
    schemes |= {name: _offloaded(setting, name.lower()) for name in OFFLOADING}
    at_paper_bits = {name: _at_paper_bits(setting, case.paper[name], name) for name in BASELINES}
    seconds = time.perf_counter() - began
    return Outcome(case, less_gib, schemes, at_paper_bits, seconds)


def paper_options(case: Case, profiles: Path) -> PlanOptions:
    """LLM-PQ's options: eq. 4 with the theta of table 9, all devices in use, no memory spared."""
    return PlanOptions(
        theta=case.theta,
        dtype="float16",
        profiles=profiles,
        objective="paper",
        head="last",
        keep_all_devices=True,
        memory_margin=0.0,
    )


def cluster_of(case: Case, less_gib: int = 0) -> ClusterSpec:
    """The cluster of table 3, each GPU with `less_gib` less memory."""
    cluster = ClusterSpec.from_yaml(ROOT / f"cluster_specs/paper_{case.cluster:02d}.yaml")
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes - less_gib * GIB)
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def _planned(case: Case, cluster: ClusterSpec, options: PlanOptions) -> Scheme:
    try:
        plan = find_plan(cluster, model_shape(case.model), case.model, case.workload, options).plan
    except InfeasibleError:
        return Scheme(None, "")
    return Scheme(plan.predicted.latency_s, bits_by_layers(plan_bits(plan)))


def _scheme(found: Baseline) -> Scheme:
    return Scheme(found.latency_s, "" if found.bitwidth is None else str(found.bitwidth))


def _offloaded(setting: Setting, name: str) -> Scheme:
    found = _scheme(setting.baseline(name))
    if found.latency_s is None:
        return found
    return replace(found, streamed_bytes=setting.streamed_bytes(name))


def _at_paper_bits(setting: Setting, paper: PaperResult | None, name: str) -> Scheme:
    """A baseline at the paper's own bitwidth, whether or not more bits fit here."""
    if paper is None or paper.bits is None:
        return Scheme(None, "")
    found = setting.at_bitwidth(paper.bits).baseline(name.lower())
    return replace(_scheme(found), bits=str(paper.bits))


def plan_bits(plan: PlanSpec) -> list[int]:
    return [bits for stage in plan.stages for bits in stage.bitwidths]


def _update(page: Path, text: str) -> None:
    """Put `text` between the markers of `page`."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks {BEGIN} and {END}; add them where the tables belong")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all clusters, or those named, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")
    parser.add_argument("--update", type=Path, help="page to put the tables into")
    parser.add_argument("--clusters", type=int, nargs="+", help="only these of table 3")
    options = parser.parse_args(arguments)
    tables = json.loads((options.data / "paper_tables.json").read_text(encoding="utf-8"))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = Path(folder) / "profiles_2023.csv"
        write_profiles(profiles, profile_rows(options.data / "llmpq_layer_latency_2023.csv"))
        for case in cases(tables):
            if options.clusters is None or case.cluster in options.clusters:
                outcomes += [outcome(case, profiles, less_gib) for less_gib in LESS_GIB]
                seconds = sum(each.seconds for each in outcomes[-len(LESS_GIB) :])
                sys.stderr.write(f"table {case.table}, cluster {case.cluster}: {seconds:.1f} s\n")
    text = report(outcomes)
    if options.update:
        _update(options.update, text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
