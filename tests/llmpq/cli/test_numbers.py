"""No option means anything with nan, and hardly one with inf: all are refused in one place."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from llmpq.run.options import RunOptions
from llmpq.serve.options import BatchOptions, ServeOptions
from planner.cluster.spec import ClusterSpec
from planner.options import PlanOptions
from planner.profiles.design import ProfileOptions
from quant.common.errors import SpecError
from tests.llmpq.cli.test_help import PARSERS, options_of

NO_NUMBERS = ("nan", "inf", "-inf", "Infinity", "1e999", "NaN")
UNLIMITED = {"max_request_latency_s"}
"""Options for which inf means that there is no limit."""
OPTIONS = (PlanOptions, RunOptions, ServeOptions, ProfileOptions)


def is_number(action: argparse.Action) -> bool:
    """Whether an option takes numbers and no words."""
    if not callable(action.type):
        return False
    try:
        if type(action.type("8")) not in (int, float):
            return False
        return not isinstance(action.type("x"), str)
    except argparse.ArgumentTypeError as error:
        return "number" in str(error)


NUMBERS = [
    pytest.param(prog, action, id=f"{prog} {action.dest}")
    for prog, parser in PARSERS.items()
    for action in options_of(parser)
    if is_number(action)
]


def test_the_options_are_found() -> None:
    found = {each.values[1].dest for each in NUMBERS}  # type: ignore[union-attr]
    assert {"file_limit_mib", "theta", "shard_s", "watch", "prompts", "damping"} <= found
    assert len(NUMBERS) > 60


@pytest.mark.parametrize(("prog", "action"), NUMBERS)
def test_no_option_takes_what_is_no_number(
    prog: str, action: argparse.Action, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in NO_NUMBERS:
        if action.dest in UNLIMITED and float(text) == math.inf:
            assert callable(action.type)
            assert action.type(text) == math.inf
            continue
        name, count = action.option_strings[0], action.nargs
        words = [name, *[text] * count] if isinstance(count, int) else [f"{name}={text}"]
        if len(words) > 1 and text.startswith("-"):
            continue
        with pytest.raises(SystemExit) as left:
            PARSERS[prog].parse_known_args(words)
        assert left.value.code == 2
        told = capsys.readouterr().err
        assert f"argument {'/'.join(action.option_strings)}: " in told
        assert text in told
        assert "; give" in told or "is not within" in told


def floats_of(options: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(options) if "float" in str(each.type)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_python_refuses_the_same(options: Any, value: float) -> None:
    assert floats_of(options)
    for name in floats_of(options):
        if name in UNLIMITED and value == math.inf:
            assert options(**{name: value}).request_bound_s == math.inf
            continue
        with pytest.raises(SpecError, match=f"{name} is .*; .*(give|must be)"):
            options(**{name: value})


def test_limits_of_batches_are_numbers() -> None:
    for name in floats_of(BatchOptions):
        for value in (math.nan, math.inf):
            with pytest.raises(SpecError, match=f"{name} is .*; give"):
                BatchOptions(Path("batches"), **{name: value})


@pytest.mark.parametrize(
    "line",
    [
        "memory_gib: {}",
        "usable_memory_gib: {}",
        "usable_memory_gib: {{T4: {}}}",
        "host_memory_gib: {}",
        "link_gbyte_per_s: {}",
        "host_link_gbyte_per_s: {}",
        "price_per_hour: {}",
        "threads: {}",
    ],
)
def test_a_cluster_file_has_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for value in (".nan", ".inf", "-.inf"):
        path.write_text(
            f"name: c\nnodes:\n- accelerators: {{T4: 1}}\n  {line.format(value)}\n"
            f"network: {{internode_gbit_per_s: 10}}\n"
        )
        with pytest.raises(SpecError, match=r"cluster.yaml:4: nodes.0"):
            ClusterSpec.from_yaml(path)
