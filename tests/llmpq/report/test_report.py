"""The report as a browser would take it apart: well-formed, self-contained, escaped, complete."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from llmpq import Cluster, Plan, Workload
from llmpq.cli import plan as plan_cli
from llmpq.report.formatting import change, layer_span, listed, seconds, shortened, size
from llmpq.report.page import report_page
from llmpq.report.plan_charts import write_front
from planner.explanation.explain import Explanation
from planner.explanation.what_if import WhatIfOptions
from planner.model.finding import model_shape
from planner.plan.spec import PlanSpec
from planner.profiles.sensitivity import (
    OmegaContent,
    default_sensitivity,
    save_omega,
)
from planner.search.find import FrontPoint
from quant.common.errors import SpecError
from tests.llmpq.report.pages import Page

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(1)>&amp;"
WORKLOAD = Workload(8, 128, 32)


NO_QUESTIONS = WhatIfOptions(budget_s=0.0)  # they take seconds


def reasons_of(plan: Plan, options: WhatIfOptions = NO_QUESTIONS) -> Explanation:
    return plan.explain(options)


def make_cluster(name: str = "two-kinds", node: str = "old") -> Cluster:
    from planner.cluster.spec import ClusterSpec

    values = {
        "name": name,
        "nodes": [
            {"name": node, "accelerators": {"T4": 1}, "usable_memory_gib": 1.1},
            {"name": "new", "accelerators": {"V100": 1}, "usable_memory_gib": 1.6},
        ],
        "network": {"internode_gbit_per_s": 25},
    }
    return Cluster(ClusterSpec.from_dict(values))


@cache
def made() -> Plan:
    """OPT-1.3B on two devices, which hold it only with mixed bits."""
    return make_cluster().plan("opt-1.3b", WORKLOAD, theta=1.0, keep_all_devices=True)


@cache
def page() -> Page:
    return Page(report_page(made().spec, made().explanation))


def test_the_page_loads_nothing() -> None:
    text = report_page(made().spec, made().explanation)
    assert text.startswith("<!DOCTYPE html>")
    for name in ("script", "link", "img", "iframe", "object", "base"):
        assert page().all_of(name) == [], name
    outside = [each for each in re.findall(r"[a-z]+://[^\s\"'<>)]*", text)]
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "@import" not in text


def test_every_section_is_labelled_and_every_table_even() -> None:
    identifiers = {attributes["id"] for _, attributes in page().elements if "id" in attributes}
    sections = page().all_of("section")
    assert len(sections) == 13
    assert {each["aria-labelledby"] for each in sections} <= identifiers
    heads = cells = 0
    for name, attributes in page().elements:
        if name == "table":
            assert cells in (0, heads)
            heads = cells = 0
        elif name == "th":
            heads += 1
            assert attributes["scope"] == "col"
        elif name == "tr":
            assert cells in (0, heads)
            cells = 0
        elif name == "td":
            cells += 1
    pictures = [each for _, each in page().elements if each.get("role") == "img"]
    assert pictures
    assert all(each.get("aria-label") for each in pictures)


def test_headings_go_down_step_by_step_and_regions_take_the_focus() -> None:
    levels = [int(name[1]) for name, _ in page().elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
    for _, attributes in page().elements:
        if "scroll" in (attributes.get("class") or "").split():
            assert attributes["tabindex"] == "0"
            assert attributes["role"] == "region"
            assert attributes["aria-label"]
    names = [name for name, _ in page().elements]
    assert names.count("details") == names.count("summary") > 0
    (skip,) = page().all_of("a", "skip")
    assert skip["href"] == "#content"
    assert page().all_of("main")[0]["id"] == "content"
    assert [name for name in names if name in ("header", "main", "footer")] == [
        "header",
        "main",
        "footer",
    ]


def test_every_reason_is_text_and_not_only_a_title() -> None:
    for box in page().all_of("li", "box"):
        _, _, reason = (box["title"] or "").partition(": ")
        assert " ".join(reason.split()) in page().text


def test_every_layer_has_a_box_with_its_reason() -> None:
    plan = made().spec
    boxes = page().all_of("li", "box")
    bits = [each for stage in plan.stages for each in stage.bitwidths]
    assert len(bits) == 24
    assert len(set(bits)) > 1
    assert [box["aria-label"] for box in boxes] == [
        f"layer {layer}: {each} bit" for layer, each in enumerate(bits)
    ]
    allowed = {3, 4, 8, 16}
    for layer, (box, each) in enumerate(zip(boxes, bits, strict=True)):
        title = box["title"] or ""
        assert title.startswith(f"Layer {layer}: {each} bit on stage ")
        for other in allowed - {each}:
            assert re.search(rf"\b{other} bit (fits|needs)", title), title
    short = [box["title"] or "" for box in boxes if " more, but " in (box["title"] or "")]
    assert short


def test_memory_bars_say_what_fills_the_devices() -> None:
    plan = made().spec
    most = max(stage.memory_limit_bytes for stage in plan.stages)
    tracks = [
        each for each in page().all_of("div", "track") if "left" in (each["aria-label"] or "")
    ]
    assert len(tracks) == len(plan.stages)
    for stage, track in zip(plan.stages, tracks, strict=True):
        assert percent_of(track) == pytest.approx(100 * stage.memory_limit_bytes / most, abs=1e-3)
    for part in ("weights", "kv_cache", "embedding", "final", "temporary", "runtime"):
        pieces = page().all_of("span", f"part-{part}")
        shares = [percent_of(piece) for piece in pieces if piece.get("style")]
        expected = [
            100 * getattr(stage.memory, part) / stage.memory_limit_bytes
            for stage in plan.stages
            if getattr(stage.memory, part)
        ]
        assert shares == pytest.approx(expected, abs=1e-3), part


def percent_of(element: dict[str, str | None]) -> float:
    found = re.fullmatch(r"width:([\d.]+)%", element["style"] or "")
    assert found is not None
    return float(found[1])


def test_figures_are_the_plans() -> None:
    plan, text = made().spec, page().text
    for stage in plan.stages:
        for figure in (seconds(stage.prefill_s), seconds(stage.decode_s), stage.provenance):
            assert " ".join(figure.split()) in text
        assert stage.device in text
    for figure in (plan.model.fingerprint, plan.cluster_fingerprint, plan.sensitivity_source):
        assert figure in text
    for baseline in plan.baselines:
        assert baseline.name in text
    slowest = page().all_of("div", "slowest")
    assert [each["aria-label"] for each in slowest] == [
        f"stage {plan.predicted.prefill_bottleneck} prefill: "
        f"{seconds(plan.stages[plan.predicted.prefill_bottleneck].prefill_s)}, the bottleneck",
        f"stage {plan.predicted.decode_bottleneck} decode: "
        f"{seconds(plan.stages[plan.predicted.decode_bottleneck].decode_s)}, the bottleneck",
    ]


def hostile_plan() -> Plan:
    cluster = make_cluster(HOSTILE, f"n{HOSTILE}")
    made_plan = cluster.plan("opt-1.3b", Workload(4, 64, 12), theta=1.0)
    model = replace(made_plan.spec.model, name=HOSTILE, source=HOSTILE)
    data = replace(
        made_plan.spec,
        model=model,
        sensitivity_source=HOSTILE,
        unused_devices=(HOSTILE,),
        baselines=tuple(replace(b, name=HOSTILE) for b in made_plan.spec.baselines),
        stages=tuple(replace(s, provenance=HOSTILE) for s in made_plan.spec.stages),
    )
    return Plan(data, made_plan.costs)


def test_hostile_names_stay_text() -> None:
    plan = hostile_plan()
    parsed = Page(report_page(plan.spec, reasons_of(plan, WhatIfOptions(theta_factors=()))))
    for name in ("script", "img"):
        assert parsed.all_of(name) == []
    for name, attributes in parsed.elements:
        assert not [key for key in attributes if key.startswith("on")], name
    assert HOSTILE in "".join(parsed.words)


def test_measured_sensitivities_and_groups(tmp_path: Path) -> None:
    """Layers that differ give ranges, exchanges and spans of layers."""
    shape, bits = model_shape("opt-1.3b"), (3, 4, 8, 16)
    factors = np.random.default_rng(1).uniform(0.1, 3.0, shape.layers)
    omega = default_sensitivity(shape, bits) * factors[:, np.newaxis]
    save_omega(tmp_path / "omega.json", OmegaContent(bits, shape.fingerprint(), omega))
    for group in (1, 2):
        plan = make_cluster().plan(
            "opt-1.3b",
            WORKLOAD,
            omega_file=tmp_path / "omega.json",
            group=group,
            theta=20.0,
            keep_all_devices=True,
        )
        text = Page(report_page(plan.spec, reasons_of(plan))).text
        assert "Exchanging bits with layer" in text
        assert str(tmp_path / "omega.json") in text
        assert ("layers 2 to 3: " in text.lower()) == (group == 2)


def test_given_front_is_drawn_without_dominated_points() -> None:
    latency_s = made().spec.predicted.objective_latency_s
    sensitivity = made().spec.solver.sensitivity
    front = (
        FrontPoint(9.0, 1.0, latency_s * 2, 1.0, 8, sensitivity / 2, 8.0),
        FrontPoint(7.0, 1.0, latency_s * 3, 1.0, 8, sensitivity, 8.0),
    )
    parsed = Page(report_page(made().spec, None, front))
    assert len(parsed.all_of("circle", "spot")) == 2
    assert len(parsed.all_of("circle", "present")) == 1


def test_a_front_that_only_this_plan_is_left_of_is_a_sentence() -> None:
    spec = made().spec
    worse = FrontPoint(9.0, spec.predicted.latency_s + 1, 1.0, 1.0, 8, spec.solver.sensitivity, 8.0)
    parsed = Page(report_page(spec, None, (worse,)))
    assert "Theta from 1 to 9 gives no plan that is better in one" in parsed.text
    assert parsed.all_of("svg", "chart") == []


def test_a_front_by_itself_is_the_same_picture(tmp_path: Path) -> None:
    points = tuple(FrontPoint(5.0 - n, 1.0 + n, 1.0, 1.0, 8, 2.0 - n, 8.0) for n in (0, 1))
    write_front(tmp_path / "front.svg", points)
    drawing = ElementTree.parse(tmp_path / "front.svg").getroot()
    spots = drawing.findall("{http://www.w3.org/2000/svg}circle")
    assert [each[0].text for each in spots] == [
        "theta 5: 1.00\N{NO-BREAK SPACE}s, sensitivity 2, 8.0 bits a layer",
        "theta 4: 2.00\N{NO-BREAK SPACE}s, sensitivity 1, 8.0 bits a layer",
    ]
    assert [float(each.get("cx", "")) for each in spots] == sorted(
        float(each.get("cx", "")) for each in spots
    )
    write_front(tmp_path / "front.json", points)
    assert [each["theta"] for each in json.loads((tmp_path / "front.json").read_text())] == [5, 4]
    with pytest.raises(SpecError, match="cannot write"):
        write_front(tmp_path / "no" / "front.svg", points)


def test_one_device_and_one_token(tmp_path: Path) -> None:
    """No link, no decode round, no neighbour."""
    plan = Cluster.from_counts(["T4"], [1]).plan("opt-125m", Workload(1, 8, 1), theta=1.0)
    plan.report(tmp_path / "page.html")
    assert "There is one stage" in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text


def test_command_line_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "opt-125m", "--device_names", "T4", "--device_numbers", "1"]
    small = ["--global_bz", "2", "--s", "16", "--n", "4", "--theta", "1", "--json"]
    target = tmp_path / "page.html"
    assert plan_cli.main([*arguments, *small, "--report", str(target)]) == 0
    printed = PlanSpec.from_json(capsys.readouterr().out)
    assert json.loads(printed.to_json())["model"]["name"] in Page(target.read_text()).text
    missing = tmp_path / "no" / "page.html"
    assert plan_cli.main([*arguments, *small, "--report", str(missing)]) == 2
    assert "name a file in a folder that exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (lambda: size(0), "0 bytes"),
        (lambda: size(-(2**30) * 1.5), "−1.50 GiB"),
        (lambda: size(1536), "1.50 KiB"),
        (lambda: seconds(0.0), "0 s"),
        (lambda: seconds(0.9999999999), "1.00 s"),
        (lambda: seconds(9.9999999999e-4), "1.00 ms"),
        (lambda: seconds(123.456), "123.5 s"),
        (lambda: seconds(2e-7), "0.20 µs"),
        (lambda: change(-0.25), "−250.0 ms"),
        (lambda: change(0.25, 0.3), "none"),
        (lambda: layer_span(range(3, 4)), "layer 3"),
        (lambda: layer_span(range(3, 6)), "layers 3 to 5"),
        (lambda: listed(["a", "b", "c"], "or"), "a, b or c"),
        (lambda: shortened("abcdefghij", 5), "ab…ij"),
        (lambda: shortened("abcde", 5), "abcde"),
    ],
)
def test_figures_read_well(written: Callable[[], str], expected: str) -> None:
    assert written().replace("\N{NO-BREAK SPACE}", " ") == expected


def test_latency_against_quality_is_in_predicted_seconds() -> None:
    """Eq. 4 counts much less than the simulation, by which the rest of the page goes."""
    options = {"theta": 1.0, "objective": "paper", "keep_all_devices": True}
    plan = make_cluster().plan("opt-1.3b", WORKLOAD, **options)
    predicted = plan.spec.predicted
    assert predicted.objective_latency_s < 0.9 * predicted.latency_s
    answered = reasons_of(plan, WhatIfOptions(theta_factors=(0.5, 100.0)))
    others = answered.answers.of("theta")
    assert all(answer.latency_s < 0.9 * answer.predicted_s for answer in others)
    section = report_page(plan.spec, answered).partition('<section id="pareto"')[2]
    shown = section.partition("</section>")[0]
    assert seconds(predicted.latency_s) in shown
    assert seconds(predicted.objective_latency_s) not in shown
