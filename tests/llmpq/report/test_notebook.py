"""What notebooks show of plans, clusters, results: their figures, escaped, and nothing to load."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import llmpq.report.notebook
from llmpq import Cluster, Plan, Result, RunSummary, Workload
from planner.cluster.spec import ClusterSpec

HOSTILE = '<script>alert("x")</script>'
CLUSTER = """
name: two
nodes: [{name: a, accelerators: {T4: 1}}, {name: b, accelerators: {V100-SXM2-32GB: 1}}]
network: {internode_gbit_per_s: 100}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER)
    return Cluster.from_yaml(path)


@pytest.fixture(scope="module")
def planned(cluster: Cluster) -> Plan:
    return cluster.plan("opt-1.3b", Workload(8, 64, 16), bits=[8, 16], keep_all_devices=True)


def cells_of(html: str) -> list[list[str]]:
    """The rows of the tables of a view, which must be well-formed and load nothing."""
    assert not re.search(r"<(script|link|img|iframe)\b|src=|href=|@import|url\(", html)
    tree = ElementTree.fromstring(html.strip())
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def test_a_plan_shows_its_stages_and_its_schedule(planned: Plan) -> None:
    html = planned._repr_html_()
    heads, *rows = cells_of(html)
    assert heads[:4] == ["stage", "device", "layers", "layers × bits"]
    assert [row[1] for row in rows] == [stage.device for stage in planned.stages]
    shown = [sum(int(n) for n in re.findall(r"(\d+) ×", row[3])) for row in rows]
    assert shown == [len(stage.layers) for stage in planned.stages]
    (svg,) = [e for e in ElementTree.fromstring(html.strip()).iter() if e.tag.endswith("svg")]
    texts = ["".join(e.itertext()) for e in svg.iter() if e.tag.endswith("text")]
    assert [any(stage.device in text for text in texts) for stage in planned.stages] == [True, True]
    assert "opt-1.3b on two" in repr(planned)
    assert len(repr(planned)) < 400
    assert all(stage.device in repr(planned) for stage in planned.stages)


def test_it_takes_the_notebooks_colours(planned: Plan) -> None:
    """Light or dark: text has the colour around it, and the picture's background is none."""
    style = planned._repr_html_().partition("<style>")[2].partition("</style>")[0]
    assert 'svg > rect[fill="white"] { fill: transparent' in style
    assert "svg text:not([fill]) { fill: currentColor" in style
    assert all(line.startswith(".llmpq-view") for line in style.strip().splitlines())


def test_a_loaded_plan_whose_costs_are_gone_still_shows_its_table(
    planned: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    replace(planned.spec, origin=None).save(path)
    loaded = Plan.load(path)
    html = loaded._repr_html_()
    assert cells_of(html) == cells_of(planned._repr_html_())
    assert "<svg" not in html
    assert "No schedule is shown" in html


def test_a_picture_too_large_for_a_notebook_is_left_out(
    planned: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmpq.report.notebook, "PICTURE_CHARACTERS", 1000)
    html = planned._repr_html_()
    assert "<svg" not in html
    assert "plan.trace(" in html


def test_a_cluster_shows_its_devices(cluster: Cluster) -> None:
    rows = cells_of(cluster._repr_html_())[1:]
    assert [row[:3] for row in rows] == [
        ["a/T4-16GB:0", "a", "T4-16GB"],
        ["b/V100-SXM2-32GB:0", "b", "V100-SXM2-32GB"],
    ]
    assert repr(cluster) == "<Cluster two: 1 × T4-16GB, 1 × V100-SXM2-32GB>"


def test_what_others_wrote_is_escaped(cluster: Cluster, planned: Plan) -> None:
    renamed: ClusterSpec = replace(cluster.spec, name=HOSTILE)
    model = replace(planned.model, name=HOSTILE)
    for shown in (
        Cluster(renamed),
        Plan(replace(planned.spec, model=model, cluster=HOSTILE), planned.costs),
        Result(HOSTILE, HOSTILE, (1,), "stop"),
    ):
        html = shown._repr_html_()
        assert "<script" not in html
        assert "&lt;script&gt;" in html
        cells_of(html)


def test_a_result_is_short_in_a_list_and_whole_by_itself() -> None:
    long = "word " * 100
    result = Result("a", long, tuple(range(500)), "length")
    assert len(repr(result)) < 120
    assert "500 tokens" in repr(result)
    assert ["text", long] in cells_of(result._repr_html_())
    bad = Result("b", None, (), None, "the prompt has no tokens")
    assert repr(bad) == "Result('b', error='the prompt has no tokens')"
    assert ["error", "the prompt has no tokens"] in cells_of(bad._repr_html_())


def test_figures_of_a_run_are_a_table(planned: Plan) -> None:
    summary = RunSummary(12, 1, 480, 3.0, 4.0, (), planned_tokens_per_s=100.0)
    assert repr(summary).startswith("<RunSummary: 12 rows, 1 with errors: 480 tokens in 4.0 s (120")
    heads, row = cells_of(summary._repr_html_())
    figures: dict[str, Any] = dict(zip(heads, row, strict=True))
    assert (figures["rows"], figures["tokens/s"], figures["planned"]) == ("12", "120.0", "100.0")


def test_explanations_and_fronts_are_short_in_a_list(cluster: Cluster, planned: Plan) -> None:
    assert len(repr(planned.explanation)) < 400
    front = cluster.pareto("opt-1.3b", Workload(8, 64, 16), most_points=2, bits=[8, 16])
    assert all(len(repr(point)) < 120 for point in front)
