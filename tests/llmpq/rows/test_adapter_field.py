"""The field by which a row chooses an adapter."""

from __future__ import annotations

import pytest

from actors.messages import Request, Sampling
from llmpq.jobs.store import JobIdentity
from llmpq.rows.row import BadRow, Row, row_from_mapping
from llmpq.tokenizing.requests import RequestMaker
from planner.workload import Workload

PROMPT = {"custom_id": "a", "prompt": [5, 6]}
MAKER = RequestMaker(Workload(1, 8, 8), 100, Sampling(), None, adapters=("one", "two"))


@pytest.mark.parametrize(("given", "name"), [("one", "one"), (None, ""), ("", "")])
def test_a_request_has_the_adapter_of_its_row(given: str | None, name: str) -> None:
    row = row_from_mapping({**PROMPT, "adapter": given}, "line 1")
    assert isinstance(row, Row)
    assert not row.columns
    (made,) = MAKER.requests([row])
    assert isinstance(made, Request)
    assert made.adapter == name


@pytest.mark.parametrize(
    ("given", "known", "error"),
    [
        ("three", ("two", "one"), "adapter is 'three'; those of the run are one, two"),
        ("one", (), "adapter is 'one'; the run has none; give --adapters"),
    ],
)
def test_one_that_the_run_has_not_is_an_error_row(
    given: str, known: tuple[str, ...], error: str
) -> None:
    row = row_from_mapping({**PROMPT, "adapter": given}, "line 1")
    maker = RequestMaker(Workload(1, 8, 8), 100, Sampling(), None, adapters=known)
    (made,) = maker.requests([row])
    assert isinstance(made, BadRow)
    assert error in made.error


def test_what_is_no_name_is_an_error_row() -> None:
    row = row_from_mapping({**PROMPT, "adapter": 3}, "line 1")
    assert isinstance(row, BadRow)
    assert "adapter is 3; it must be the name of one" in row.error


def test_rows_of_two_adapters_and_of_another_state_of_one_are_told_apart() -> None:
    rows = [row_from_mapping({**PROMPT, "adapter": n}, "line 1") for n in (None, "one", "two")]
    before, after = (
        JobIdentity("m", "m", Sampling(), adapters={"one": state, "two": "x"}) for state in "ab"
    )
    found = [before.fingerprint(row) for row in rows]
    assert len(set(found)) == 3
    changed = [after.fingerprint(row) for row in rows]
    assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True]
