"""Throughput over bounds as a picture: points stand where their figures belong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llmpq.report import write_latency_front
from llmpq.report.formatting import plain
from llmpq.report.pictures.bounds import BoundCurves
from quant.common.errors import SpecError
from tests.llmpq.bounded_plans import FRONTS, forecast

SVG = "{http://www.w3.org/2000/svg}"


def test_each_kind_has_a_line_of_its_points(tmp_path: Path) -> None:
    write_latency_front(tmp_path / "front.svg", FRONTS)
    picture = ElementTree.parse(tmp_path / "front.svg").getroot()
    lines = picture.findall(f"{SVG}polyline")
    assert [len((line.get("points") or "").split()) for line in lines] == [3, 3]
    assert len({line.get("stroke-dasharray") for line in lines}) == 2
    titles = [plain(each[0].text or "") for each in picture.findall(f"{SVG}circle")]
    assert titles[0] == "RRA within 4.00 s: 2.2 requests/s, 3.60 s"
    assert titles[-1] == "WAA-C within 23.00 s: 4.2 requests/s, 20.70 s"


def test_higher_is_more_and_further_right_is_looser() -> None:
    curves = BoundCurves(FRONTS)
    spots = [spot for line in curves.lines for spot in line.spots]
    for one, other in itertools.combinations(spots, 2):
        faster = one.point.requests_per_s - other.point.requests_per_s
        assert (one.y - other.y) * faster <= 0
    for line in curves.lines:
        pixels = [spot.x for spot in line.spots]
        assert pixels == sorted(set(pixels))
        assert all(0 <= pixel <= curves.width for pixel in pixels)
    labels = sorted(line.label_y for line in curves.lines)
    assert all(b - a >= 16 for a, b in itertools.pairwise(labels))
    assert [text for _, text in curves.ticks] == ["2", "4", "20", "60"]


@pytest.mark.parametrize("bound_s", [1.0, 20.0, 90.0, None])
def test_the_plan_of_the_page_has_a_ring_within_the_picture(bound_s: float | None) -> None:
    present = forecast(bound_s)
    curves = BoundCurves(FRONTS, present)
    assert curves.present_spot is not None
    x, y = curves.present_spot
    assert curves.bounds.first <= x <= curves.bounds.last
    assert y == curves.speed.at(present.requests_per_s)
    assert BoundCurves(FRONTS).present_spot is None


def test_figures_as_json_and_other_endings(tmp_path: Path) -> None:
    write_latency_front(tmp_path / "front.json", FRONTS)
    found = json.loads((tmp_path / "front.json").read_text())
    assert [each["bound_s"] for each in found["points"]] == [4.0, 20.0, 60.0, 2.0, 5.0, 23.0]
    assert found["points"][0]["schedule"]["kind"] == "rra"
    assert found["left_out"][0]["kind"] == "waa-m"
    with pytest.raises(SpecError, match=r"front\.png: the front is written as \.svg or \.json"):
        write_latency_front(tmp_path / "front.png", FRONTS)
