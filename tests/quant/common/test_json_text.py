"""JSON is read as Python's own reader does it, but for depths that would fill the stack."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quant.common.json_text import MAX_LEVELS, check_depth, loads

LEVELS = 3
MARKS = st.text('[]{}"\\,: a\n', max_size=6)
VALUES = st.recursive(
    st.integers() | MARKS | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(MARKS, inner, max_size=3),
    max_leaves=12,
)


def levels_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(levels_of, inner), default=0) if isinstance(value, dict | list) else 0


@given(VALUES, st.sampled_from([None, 1]), st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
def test_values_are_read_up_to_a_depth(value: Any, indent: int | None, encoding: str) -> None:
    text = json.dumps(value, indent=indent)
    for given_text in (text, text.encode(encoding)):
        if levels_of(value) > LEVELS:
            with pytest.raises(ValueError, match="nests too deeply"):
                loads(given_text, LEVELS)
        else:
            assert loads(given_text, LEVELS) == value


@given(VALUES, MARKS)
def test_what_comes_before_and_after_a_value_does_not_count(value: Any, other: str) -> None:
    text = json.dumps([value])
    deep = "[" * 9
    if levels_of([value]) <= LEVELS:
        check_depth(deep + text + other + deep, len(deep), LEVELS)


@pytest.mark.parametrize("opening", ["[", '{"a": ', '[{"\\"]": ', "[ \n"])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_hostile_depth_is_refused_before_it_is_read(
    opening: str, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)
    text = opening * 100_000 + "]" * 100_000 * is_closed
    with pytest.raises(ValueError, match=f"{MAX_LEVELS} levels at most"):
        loads(text)


def test_errors_are_those_of_json() -> None:
    for text, why in (("[1,", "Expecting value"), (b"[\xff]", "utf-8"), ('"a', "Unterminated")):
        with pytest.raises(ValueError, match=why):
            loads(text)
    with pytest.raises(ValueError, match="none"):
        loads("[NaN]", parse_constant=lambda name: (_ for _ in ()).throw(ValueError("none")))
