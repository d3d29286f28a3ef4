"""A plan that was loaded from its file explains itself and is simulated as when it was made."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from llmpq import Cluster, Plan, Workload
from llmpq.errors import SpecError
from llmpq.report.page import report_page
from llmpq.run.replan import replan
from planner.cluster.spec import ClusterSpec
from planner.explanation.what_if import WhatIfOptions
from planner.lengths import Lengths
from planner.model.finding import model_shape
from planner.plan.simulate import FILLS_SHOWN, simulate_plan
from planner.profiles.sensitivity import OmegaContent, default_sensitivity, save_omega
from planner.simulation.simulation import Simulated
from planner.workload import Job
from quant.scheme import BITWIDTHS
from tests.planner.edits import change, content_of
from tests.planner.plan_alone import alone

MODEL = "opt-125m"
WORKLOAD = Workload(8, 64, 16)
ONE_QUESTION = WhatIfOptions(theta_factors=(), link_factor=4.0)
CLUSTER = {
    "name": "mixed",
    "nodes": [
        {"name": "a", "accelerators": {"T4": 1}, "usable_memory_gib": 0.9},
        {"name": "b", "accelerators": {"V100-32GB": 1}, "usable_memory_gib": 1.0},
    ],
    "network": {"internode_gbit_per_s": 25},
}
EMULATED = {**CLUSTER, "emulate": {"time_scale": 0.1, "stand_in": "small"}}
PROFILE = """device,model,h1,h2,prompt_length,context_length,phase,bits,batch_size,ms_per_layer
T4,opt-125m,768,3072,64,0,prefill,16,2,1.5
T4,opt-125m,768,3072,1,70,decode,16,2,0.5
"""
LINKS = "sender,receiver,place,way,payload_bytes,seconds,spread,repetitions\n"


def write_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a profile and an omega file in what is the present folder from then on."""
    (folder / "times.csv").write_text(PROFILE)
    shape = model_shape(MODEL)
    matrix = 3 * default_sensitivity(shape, BITWIDTHS)
    content = OmegaContent(tuple(BITWIDTHS), shape.fingerprint(), matrix)
    save_omega(folder / "omega.json", content)
    monkeypatch.chdir(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a profile and an omega file."""
    write_files(tmp_path, monkeypatch)
    return tmp_path


def made(cluster: object = CLUSTER, **options: object) -> Plan:
    spec = ClusterSpec.from_dict(cluster)  # type: ignore[arg-type]
    return Cluster(spec).plan(MODEL, WORKLOAD, keep_all_devices=True, **options)


@pytest.fixture(scope="module")
def made_of_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder, and the files that belong there: those of `folder`, and a plan made of them."""
    where = tmp_path_factory.mktemp("of_files")
    with pytest.MonkeyPatch.context() as patch, alone():
        write_files(where, patch)
        made(profiles="times.csv", omega_file="omega.json").save("plan.json")
    return where, {path.name: path.read_bytes() for path in where.iterdir()}


@pytest.fixture
def with_plan(
    made_of_files: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The present folder, with a profile, an omega file and a plan made of both."""
    where, files = made_of_files
    for path in where.iterdir():
        path.unlink()
    for name, content in files.items():
        (where / name).write_bytes(content)
    monkeypatch.chdir(where)
    return where


def loaded(plan: Plan) -> Plan:
    plan.save("plan.json")
    return Plan.load("plan.json")


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (CLUSTER, {}),
        (CLUSTER, {"profiles": "times.csv", "omega_file": Path("omega.json"), "theta": 1.0}),
        (CLUSTER, {"kv_bits": "auto", "group": 2, "head": "first", "theta": 0.1}),
        (CLUSTER, {"objective": "paper", "method": "transfer", "memory_margin": 0.0, "theta": 1.0}),
        (CLUSTER, {"method": "uniform"}),
        (CLUSTER, {"method": "pipeedge", "bits": [8]}),
        (CLUSTER, {"max_omega": 1e3}),
        (EMULATED, {"theta": 1.0}),
    ],
)
def test_it_says_the_same(
    cluster: object, options: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = made(cluster, **options)
    again = loaded(plan)
    monkeypatch.chdir(folder.parent)
    assert again.limits == plan.limits
    said, first = again.explain(ONE_QUESTION), plan.explain(ONE_QUESTION)
    assert said.layers == first.layers
    assert said.stages == first.stages
    assert said.answers == first.answers
    assert report_page(again.spec, said) == report_page(plan.spec, first)
    for suffix in ("svg", "json"):
        for name, each in (("made", plan), ("loaded", again)):
            each.trace(folder / f"{name}.{suffix}")
        traces = [(folder / f"{name}.{suffix}").read_text() for name in ("made", "loaded")]
        assert traces[0] == traces[1]


def test_so_does_one_of_a_job(folder: Path) -> None:
    """Also the answers are of the whole job, which takes far longer than one batch."""
    job = Job(600, Lengths((24, 64, 40), (5, 16, 11)))
    plan = Cluster(ClusterSpec.from_dict(CLUSTER)).plan(
        MODEL, job, theta=1.0, group=4, policy="static"
    )
    again = loaded(plan)
    assert again.spec == plan.spec
    assert again.limits == plan.limits
    said, first = again.explain(ONE_QUESTION), plan.explain(ONE_QUESTION)
    assert said.answers == first.answers
    assert said.layers == first.layers
    assert report_page(again.spec, said) == report_page(plan.spec, first)
    for name, each in (("made.json", plan), ("loaded.json", again)):
        each.trace(folder / name)
    assert (folder / "loaded.json").read_text() == (folder / "made.json").read_text()
    assert_first_fills(plan, first.simulated)
    unchanged = [a for a in first.answers.given if not a.layers_with_other_bits + a.layers_moved]
    assert unchanged
    for answer in unchanged:
        if answer.question.kind == "memory" and answer.sizes == plan.micro_batches:
            assert answer.predicted_s == pytest.approx(plan.spec.job.seconds)
    closest = min(abs(a.predicted_s / plan.spec.job.seconds - 1) for a in first.answers.given)
    assert closest < 0.1


def assert_first_fills(plan: Plan, simulated: Simulated) -> None:
    """As by the plan's own modelled times, with the job's lengths and not its longest ones."""
    rows = FILLS_SHOWN * plan.workload.global_batch
    assert rows < 600, "the case must fill slots again"
    prompts = [n for each in simulated.passes for n in each.prompts]
    assert sorted(set(prompts)) == [24, 40, 64]
    assert len(prompts) == rows
    by_file = simulate_plan(plan.spec)
    assert simulated.passes == by_file.passes
    assert simulated.latency_s == pytest.approx(by_file.latency_s, rel=0.02)


def test_so_does_one_that_was_planned_again(folder: Path) -> None:
    """For devices that are left, which the origin names."""
    with alone():
        first = Cluster.from_counts(["T4", "P100"], [2, 1]).plan(MODEL, WORKLOAD, theta=1.0)
    again = loaded(Plan(replan(first.spec, ["node0/T4-16GB:1"])))
    assert len(again.costs.cluster.devices) == 2
    again.report("page.html")
    assert "Why" in Path("page.html").read_text()


def test_costs_of_a_plan_that_was_just_made_are_not_computed_again(folder: Path) -> None:
    with alone():
        plan = made(profiles="times.csv", theta=1.0)
    (folder / "times.csv").unlink()
    assert plan.explain(ONE_QUESTION).stages == plan.limits


def edited(*path: str | int, to: object) -> Callable[[Path], None]:
    """A change of the plan file."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / "plan.json").read_text())
        change(*path, to=to)(content)
        (folder / "plan.json").write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "times.csv").unlink(), r"times\.csv is not what it was"),
        (
            lambda folder: (folder / "times.csv").write_text(PROFILE + "\n"),
            r"times\.csv is not what it was when the plan was made.*llmpq plan",
        ),
        (lambda folder: (folder / "omega.json").unlink(), r"omega\.json is not what it was"),
        (
            lambda folder: (folder / "times.links.csv").write_text(LINKS),
            r"times\.links\.csv is not what it was",
        ),
        (edited("model", "source", to="./gone"), "compute its costs again: model ./gone: no such"),
        (edited("model", "source", to="opt-1.3b"), "opt-1.3b is not the opt-125m of the plan"),
        (edited("predicted", "objective_latency_s", to=77.5), "latency in seconds is 77.5, comp"),
        (edited("solver", "sensitivity", to=1e6), "sensitivity is 1e[+]06, computed again"),
        (
            edited("cluster_fingerprint", to="0" * 16),
            r"another version of llmpq: the plan's cluster \(0+\) and",
        ),
        (edited("stages", 0, "device", to="a/gone"), r"the plan's devices \(.*'a/gone'"),
        (edited("origin", to=None), "does not say what it was made from.*llmpq plan"),
    ],
)
def test_what_is_gone_or_changed_is_named(
    harm: Callable[[Path], None], message: str, with_plan: Path
) -> None:
    harm(with_plan)
    plan = Plan.load("plan.json")
    for use in (plan.explain, lambda: plan.trace("t.svg")):
        with pytest.raises(SpecError, match=message):
            use()
    plan.report("p.html")
    page = unescape(Path("p.html").read_text())
    assert re.search(f"The reasons are not known: .*{message}", page)
    assert "Memory of each stage" in page


def test_files_that_were_only_moved_and_put_back_are_taken(with_plan: Path) -> None:
    plan = Plan.load("plan.json")
    shutil.copy("times.csv", "kept.csv")
    Path("times.csv").unlink()
    Path("kept.csv").rename("times.csv")
    assert plan.limits


def test_a_plan_file_of_before_is_read(folder: Path) -> None:
    """Its origin names no digests: figures alone are compared."""
    with alone():
        plan = made()
    assert plan.spec.origin is not None
    origin = replace(plan.spec.origin, files={})
    content = content_of(replace(plan.spec, origin=origin))
    assert content["origin"].pop("files") == {}
    Path("plan.json").write_text(json.dumps(content))
    assert Plan.load("plan.json").limits == plan.limits
