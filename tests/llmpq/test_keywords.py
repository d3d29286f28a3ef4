"""The typed options of `Cluster` and `Plan` are those of the dataclasses behind them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from actors.messages import Sampling
from llmpq import Cluster, Plan, Session
from llmpq.keywords import EvaluationKeywords, PlanKeywords, RunKeywords, SamplingKeywords
from llmpq.quality.options import KEPT_OPTIONS, EvaluationOptions
from llmpq.ray_data import processor
from llmpq.run.options import RunOptions
from planner.options import PlanOptions
from quant.common.errors import SpecError

WIDER: dict[str, Any] = {
    "adapters": Mapping[str, str | Path] | Iterable[str],
    "bits": Iterable[int],
    "head_bits": Iterable[int],
    "stop": str | Iterable[str],
    "stop_token_ids": Iterable[int],
    "structured_outputs": str | Mapping[str, Any],
}
"""Options that are given in more forms than the one that a dataclass keeps."""


def types_of(dataclass: Any) -> dict[str, Any]:
    return get_type_hints(dataclass) | {k: v for k, v in WIDER.items() if k in names(dataclass)}


def names(dataclass: Any) -> list[str]:
    return [field.name for field in fields(dataclass)]


def test_options_of_a_plan_are_its_dataclass() -> None:
    assert get_type_hints(PlanKeywords) == types_of(PlanOptions)


def test_options_of_a_run_are_its_dataclass_and_those_of_sampling() -> None:
    run = types_of(RunOptions)
    del run["sampling"]  # it comes after the rows
    own = get_type_hints(RunKeywords)
    sampling = get_type_hints(SamplingKeywords)
    assert {name: own[name] for name in own if name not in sampling} == run
    assert list(sampling) == names(Sampling)
    for name, type_ in types_of(Sampling).items():
        found = sampling[name]
        assert found == type_ | None, name


def test_options_of_an_evaluation_are_among_its_dataclass() -> None:
    kept = get_type_hints(EvaluationKeywords)
    assert kept == {name: types_of(EvaluationOptions)[name] for name in KEPT_OPTIONS}


@pytest.mark.parametrize(
    ("function", "dataclass"),
    [
        (Cluster.plan, PlanOptions),
        (Cluster.pareto, PlanOptions),
        (Plan.run, RunOptions),
        (Plan.session, RunOptions),
        (processor, RunOptions),
        (Session.run, Sampling),
        (Plan.evaluate, None),
    ],
)
def test_help_lists_every_option_with_its_default(function: Any, dataclass: Any) -> None:
    listed = inspect.signature(function).parameters
    assert not [p for p in listed.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for field in () if dataclass is None else fields(dataclass):
        assert field.name in listed
        if dataclass is not Sampling:
            assert listed[field.name].default == field.default
        elif field.name != "sampling":
            assert listed[field.name].default is None, "not set"
    assert ("temperature" in listed) == (dataclass in (RunOptions, Sampling))


def test_an_unknown_option_names_the_nearest(plan: Plan, cluster_file: Any) -> None:
    cluster = Cluster.from_yaml(cluster_file)
    unknown: dict[str, Any] = {"temprature": 0.5, "qualty": "high", "seqence_length": 5}
    for call, name, nearest in (
        (lambda o: plan.run([[3]], **o), "temprature", "temperature"),
        (lambda o: plan.session(**o), "temprature", "temperature"),
        (lambda o: processor(plan, **o), "temprature", "temperature"),
        (lambda o: cluster.plan("opt-125m", plan.workload, **o), "qualty", "quality"),
        (lambda o: cluster.pareto("opt-125m", plan.workload, **o), "qualty", "quality"),
    ):
        with pytest.raises(SpecError, match=f"'{name}'; nearest: {nearest}"):
            call({name: unknown[name]})
    with pytest.raises(SpecError, match="'cachedir'; nearest: cache_dir"):
        plan.evaluate("text", **{"cachedir": "x"})  # type: ignore[arg-type]
