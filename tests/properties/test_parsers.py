"""Every parser of outside input against spoiled input: taken, or refused in llmpq's own words.

The long run over the same parsers is `python -m benchmarks.stress.fuzz`.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError
from tests.properties.mutation import HOSTILE, dumps, nested, places_in
from tests.properties.parsers import parsers
from tests.properties.seeds import plan_seeds

NAMES = (
    "cluster YAML", "plan JSON", "prompt line", "prompt file", "prompt Parquet", "text lines",
    "profile CSV", "omega file", "config.json", "generation_config.json", "quantize_config.json",
    "model folder",
    "safetensors", "shard index", "packed layer", "job manifest", "result line",
    "prompt CSV", "packed prompts", "result CSV",
    "chat templates", "tokenizer files",
)  # fmt: skip
_SHARES = (len(HOSTILE), pytest.param(4, marks=pytest.mark.rare))
"""One in so many of the hostile values for each field of a plan: all of them take a minute."""

_EXAMPLES = (15, pytest.param(150, marks=pytest.mark.rare))
"""Examples of each parser."""

DEPTHS = (50, *(pytest.param(n, marks=pytest.mark.rare) for n in (200, 900)), 990, 3000, 100_000)
"""Around Python's limit of 1,000, and far beyond."""


def repeatable(examples: int) -> settings:
    """Settings for the same `examples` every time."""
    return settings(
        max_examples=examples,
        deadline=5000,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


TEXT = st.characters(exclude_categories=["Cs"])
"""All that UTF-8 encodes, which is the usual alphabet, without trying each of a million."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(TEXT, max_size=20)
    | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(TEXT, max_size=9), inner),
    max_leaves=8,
)  # fmt: skip


def test_every_parser_is_listed() -> None:
    assert set(NAMES) == set(parsers())


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_accepted(name: str, tmp_path: Path) -> None:
    parser = parsers()[name]
    assert all(parser.check(seed, tmp_path) for seed in parser.seeds())


@pytest.mark.parametrize("examples", _EXAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_mutations(name: str, examples: int, tmp_path: Path) -> None:
    """Changed by `mutation`, as in the benchmark."""
    parser = parsers()[name]

    @repeatable(examples)
    @given(st.sampled_from(parser.seeds()), st.integers(0, 2**32))
    def holds(seed: bytes, number: int) -> None:
        parser.check(parser.mutate(seed, random.Random(number)), tmp_path)

    holds()


@pytest.mark.parametrize("examples", _EXAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_bytes_of_hypothesis(name: str, examples: int, tmp_path: Path) -> None:
    """One value of a JSON seed replaced by any other, or a stretch of bytes."""
    parser = parsers()[name]

    @repeatable(examples)
    @given(st.sampled_from(parser.seeds()), st.data())
    def holds(seed: bytes, data: st.DataObject) -> None:
        content = _json(seed)
        if content is None or data.draw(st.integers(0, 3)) == 0:
            start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(seed))] * 2)))
            spoiled = seed[:start] + data.draw(st.binary(max_size=40)) + seed[end:]
        else:
            container, key = data.draw(st.sampled_from(places_in(content)))
            container[key] = data.draw(JSON)
            spoiled = dumps(content) or b""
        parser.check(spoiled, tmp_path)

    holds()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xff" * 9, b"null", b"[]", b"{}", b'""', b"1e999"]
)
def test_nothing_and_next_to_nothing(name: str, data: bytes, tmp_path: Path) -> None:
    taken = {("text lines", b""), ("generation_config.json", b"{}")}
    assert not parsers()[name].check(data, tmp_path) or (name, data) in taken


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_deep_nesting(name: str, depth: int, tmp_path: Path) -> None:
    """Alone, and as the value of every top-level key of a seed."""
    parser = parsers()[name]
    parser.check(b"[" * depth + b"]" * depth, tmp_path)
    parser.check(b'{"a":' * depth + b"1" + b"}" * depth, tmp_path)
    content = _json(parser.seeds()[0])
    if isinstance(content, dict) and not (name == "cluster YAML" and depth > 50):  # 0.5 s each
        for key in content:
            marked = json.dumps({**content, key: "@"}).encode()
            parser.check(marked.replace(b'"@"', b"[" * depth + b"]" * depth), tmp_path)


@pytest.mark.parametrize("share", _SHARES)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.rare, id="real"),
        pytest.param(1, marks=pytest.mark.rare, id="emulated"),
        pytest.param(2, id="job"),
    ],
)
def test_every_field_of_a_plan(seed: int, share: int, tmp_path: Path) -> None:
    """Removed, and replaced by every hostile value: the place is named, or the plan round-trips."""
    parser = parsers()["plan JSON"]
    plan = _two_of_each(json.loads(plan_seeds()[seed]))
    # the plan of long rows has the fields of the plan around it, so that some of them are enough
    inner = {id(holder) for holder, _ in places_in(plan.get("long_rows"))}
    holders = [id(holder) for holder, _ in places_in(plan)]
    numbers = [n for n, holder in enumerate(holders) if n % 4 == 0 or holder not in inner]
    assert len(numbers) > 80
    for number in numbers:
        spoiled = deepcopy(plan)
        holder, key = places_in(spoiled)[number]
        del holder[key]
        parser.check(dumps(spoiled) or b"", tmp_path)
        for value in HOSTILE[number % share :: share]:
            spoiled = deepcopy(plan)
            holder, key = places_in(spoiled)[number]
            holder[key] = value
            parser.check(dumps(spoiled) or b"", tmp_path)


def test_a_wrong_field_of_a_plan_is_named() -> None:
    """What the assertions of `Parser.check` do not ask for: the field, by its path."""
    for path in (("stages", 0, "prefill_s"), ("workload", "new_tokens"), ("predicted", "latency_s"),
                 ("solver", "gap"), ("micro_batches", "decode"), ("model", "layers")):  # fmt: skip
        for value in (None, "x", [], {}, -1, float("nan"), float("inf"), 10**400):
            plan = json.loads(plan_seeds()[0])
            holder: Any = plan
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = value
            if path == ("solver", "gap") and value == -1:
                continue
            with pytest.raises(SpecError) as caught:
                PlanSpec.from_json(json.dumps(plan), "p.json")
            assert "p.json" in str(caught.value)
            assert str(path[-1]) in str(caught.value) or str(path[0]) in str(caught.value)


def test_nested_values_reach_every_parser() -> None:
    """The helper does what the tests above rely on."""
    assert dumps(nested(50)) == b"[" * 51 + b"]" * 51


def _two_of_each(content: Any) -> Any:
    """Lists of objects with two of them, as they are all alike; others as they are."""
    if isinstance(content, dict):
        return {key: _two_of_each(value) for key, value in content.items()}
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        return [_two_of_each(each) for each in content[:2]]
    return content


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
