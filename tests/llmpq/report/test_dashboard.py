"""The dashboard for Grafana: its queries name what runs and servers export, and its panels fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import ray.util.metrics

from actors.processes import meter
from llmpq.cli import jobs
from llmpq.run import metrics as run_metrics
from llmpq.serve.metrics import ServeMetrics
from tests.paths import ROOT

FILE = ROOT / "llmpq" / "report" / "templates" / "dashboard.json"

FUNCTIONS = {"sum", "max", "rate", "histogram_quantile"}
WORDS = {"by"}
VARIABLES = {"$run", "$model", "$__rate_interval"}
_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*")|(?P<range>\[[^\[\]]*\])|(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)|'
    r"(?P<number>\d+(?:\.\d+)?)|(?P<sign>=~|!=|[(){},=/*+-])|(?P<space>\s+)"
)


@cache
def dashboard() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


def queries() -> list[str]:
    return [each["expr"] for panel in dashboard()["panels"] for each in panel.get("targets", ())]


def tokens_of(query: str) -> list[tuple[str, str]]:
    """Kinds and texts of a query's tokens; fails for what PromQL has no token for."""
    found, at = [], 0
    while at < len(query):
        match = _TOKEN.match(query, at)
        assert match is not None, f"no token at {query[at:]!r}"
        at = match.end()
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
    return found


def metrics_in(query: str) -> dict[str, set[str]]:
    """The metrics that a query names, with the labels that it matches or groups each by."""
    tokens = tokens_of(query)
    texts = [text for _, text in tokens] + [""]
    named: dict[str, set[str]] = {}
    grouped: set[str] = set()
    inside = metric = ""
    for place, (kind, text) in enumerate(tokens):
        if text in ("(", "{"):
            inside = "by" if place and texts[place - 1] == "by" else text
        elif text in (")", "}"):
            inside = ""
        elif kind == "name" and inside == "by":
            grouped.add(text)
        elif kind == "name" and inside == "{":
            assert texts[place + 1] in ("=", "=~"), query
            named[metric].add(text)
        elif kind == "name" and text not in FUNCTIONS | WORDS:
            assert texts[place + 1] == "{", f"{text} has no matchers in {query}"
            metric = text
            named.setdefault(metric, set())
        elif kind == "name":
            assert texts[place + 1] in ("(", "by"), query
    return {name: labels | grouped for name, labels in named.items()}


class Registered:
    """Stands for Ray's kinds of metrics, and notes what is exported of each: names and labels."""

    found: dict[str, set[str]]

    def __init__(self, name: str, description: str, *more: Any, tag_keys: Any = None) -> None:
        labels = set(tag_keys if tag_keys is not None else more[-1])
        kind = type(self).__name__
        assert description
        if kind == "Histogram":
            Registered.found[f"ray_{name}_bucket"] = labels | {"le"}
        Registered.found[f"ray_{name}" + "_total" * (kind == "Counter")] = labels

    def set_default_tags(self, tags: dict[str, str]) -> Registered:
        assert set(tags) <= set.union(*Registered.found.values())
        return self


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What stages, runs and servers register with Ray, by the names that Prometheus sees."""
    Registered.found = {}
    for name in ("Counter", "Gauge", "Histogram"):
        kind = type(name, (Registered,), {})
        monkeypatch.setattr(ray.util.metrics, name, kind)
        monkeypatch.setattr(meter, name, kind)
    meter._Instruments({"stage": "0", "device": "a", "run": "b"})
    run_metrics._Instruments("b")
    ServeMetrics("model")
    return Registered.found


def test_every_query_names_metrics_and_labels_that_are_exported(
    exported: dict[str, set[str]],
) -> None:
    assert len(queries()) > 30
    for query in queries():
        named = metrics_in(query)
        assert named, query
        for metric, labels in named.items():
            assert metric in exported, query
            assert labels <= exported[metric], query


def test_nothing_that_is_exported_is_left_out(exported: dict[str, set[str]]) -> None:
    shown = {metric for query in queries() for metric in metrics_in(query)}
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    left_out = set(exported) - shown - histograms
    assert left_out == {"ray_llmpq_micro_batches_total", "ray_llmpq_recomputed_tokens_total"}


def test_every_query_is_whole() -> None:
    """Brackets close in their order, ranges are Grafana's, quantiles are of buckets."""
    closing = {"(": ")", "{": "}"}
    for query in queries():
        opened: list[str] = []
        for kind, text in tokens_of(query):
            if text in closing:
                opened.append(closing[text])
            elif text in closing.values():
                assert opened.pop() == text, query
            elif kind == "range":
                assert text == "[$__rate_interval]", query
        assert not opened, query
        assert set(re.findall(r"\$\w+", query)) <= VARIABLES
        for metric in metrics_in(query):
            assert ("rate(" in query) or not metric.endswith("_bucket"), query
            assert ("histogram_quantile(" in query) == metric.endswith("_bucket"), query


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            yield from leaves(each)
        yield str(key), each


def test_variables_choose_data_source_run_and_model(exported: dict[str, set[str]]) -> None:
    source, *others = dashboard()["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource", "datasource", "prometheus",
    )  # fmt: skip
    assert [each["name"] for each in others] == ["run", "model"]
    for each in others:
        metric, label = re.fullmatch(
            r"label_values\((\w+), (\w+)\)", each["query"]["query"]
        ).groups()  # type: ignore[union-attr]
        assert label == each["name"]
        assert label in exported[metric]
    sources = [value for key, value in leaves(dashboard()) if key == "datasource" and value]
    assert sources
    assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in sources)


def test_panels_have_names_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["description"].endswith(".")
        targets = [each["refId"] for each in panel.get("targets", ())]
        assert len(set(targets)) == len(targets)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard()
