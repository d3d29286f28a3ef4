"""What a row carries beside the known fields: kept as it is, or refused by its name."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpq.jobs.python_rows import rows_of
from llmpq.rows.fields import KNOWN_FIELDS, nearest_field
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Occurrences, Row, row_from_line, row_from_mapping
from tests.llmpq.fake_jobs import read_rows, write_prompts

VALUES: dict[str, Any] = {
    "topic": "maths é",
    "metadata": {"source": "wiki", "pages": [1, 2], "checked": None},
    "score": 0.25,
    "year": 2**62,
    "good": False,
    "nothing": None,
    "tags": [],
    "name": "Ada",
    "user": "u-1",
    "model": "of the data set",
    "url": "https://example.org",
}

OWN_NAMES = """
top topic topics name seeds step steps shop text_id id tag tags note score label answer
question context source category language customer_id prompt_id prompt_2 seed2 templates
num_tokens n_tokens tokens new_tokens max_score temp stops meta metadata created_at
instruction input output response reference difficulty sample samples samplers message_id
penalty bias eos split file path row index 题目 in_tokens Tools Documents
details priority watermark grammar format thinking constraints regex
"""


def row_of(**content: Any) -> Row | BadRow:
    return row_from_mapping(content, "in.jsonl:3")


def columns_of(**content: Any) -> dict[str, Any]:
    row = row_of(prompt="p", **content)
    assert isinstance(row, Row), row
    return dict(row.columns)


def error_of(**content: Any) -> str:
    row = row_of(**content)
    assert isinstance(row, BadRow), row
    return row.error


def test_any_json_value_is_kept(tmp_path: Path) -> None:
    source = write_prompts(
        tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "p", "seed": 1, **VALUES}
    )
    assert read_rows(source) == (Row("a", "p", sampling={"seed": 1}, columns=VALUES),)


def test_results_have_them_after_the_known_fields() -> None:
    result = Result("a", "text", (1,), "stop", columns={"topic": "t", "tags": ["x"]})
    known = ["custom_id", "text", "token_ids", "finish_reason", "error"]
    assert list(result.as_dict()) == [*known, "topic", "tags"]
    assert json.loads(result.to_json()) == result.as_dict() | {"token_ids": [1]}
    assert hash(result) == hash(Result("a", "text", (1,), "stop"))


def test_beside_the_body_of_a_batch_line_every_name_is_the_users() -> None:
    envelope = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    body = {"model": "m", "prompt": "p", "max_tokens": 3, "metadata": {"of": "the request"}}
    beside = {"topic": "t", "metadata": {"k": 1}, "seed": 4, "max_token": 5}
    assert row_of(**envelope, **beside, body=body) == Row(
        "a", "p", sampling={"max_new_tokens": 3}, columns=beside
    )
    assert "unknown field 'topic'" in error_of(**envelope, body={**body, "topic": "t"})


def test_a_body_that_is_no_request_is_a_column() -> None:
    assert columns_of(body="of a letter") == {"body": "of a letter"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("max_token", "max_tokens"), ("max_new_token", "max_new_tokens"), ("promt", "prompt")),
        *(("temprature", "temperature"), ("Temperature", "temperature"), ("prompts", "prompt")),
        *(("maxTokens", "max_tokens"), ("top-p", "top_p"), ("topK", "top_k"), ("Stop", "stop")),
        *(("tempreature", "temperature"), ("presense_penalty", "presence_penalty")),
        *(("repetition penalty", "repetition_penalty"), ("max_tokesn", "max_tokens")),
        *(("costom_id", "custom_id"), ("logitbias", "logit_bias"), ("samplings", "sampling")),
        *(("Min-Tokens", "min_tokens"), ("stop_token_id", "stop_token_ids")),
        *(("ignore-eos", "ignore_eos"), ("Prompt", "prompt")),
        ("chat_template_kwarg", "chat_template_kwargs"),
    ],
)
def test_a_near_miss_is_an_error_that_names_the_field(name: str, meant: str) -> None:
    error = error_of(custom_id="a", prompt="p", **{name: 5})
    assert error.startswith(f"unknown field {name!r}, is {meant} meant?")


@pytest.mark.parametrize(
    "name",
    OWN_NAMES.split(),
)
def test_names_of_ones_own_are_no_near_misses(name: str) -> None:
    assert nearest_field(name) is None
    assert columns_of(**{name: "x"}) == {name: "x"}


def test_no_known_field_is_a_near_miss_of_another() -> None:
    for name in KNOWN_FIELDS:
        assert nearest_field(name) in (None, name)


def test_a_message_beside_a_prompt_is_a_column() -> None:
    assert columns_of(message="fix the build") == {"message": "fix the build"}
    assert "is messages meant?" in error_of(message=[{"role": "user", "content": "x"}])


def test_an_error_row_keeps_its_columns() -> None:
    for content in (
        {"temprature": 1},
        {"prompt": 3},
        {"custom_id": 7, "prompt": "p"},
        {"prompt": "p", "seed": "x"},
        {"prompt": "p", "n": 0},
    ):
        bad = row_of(topic="t", **content)
        assert isinstance(bad, BadRow)
        assert bad.columns["topic"] == "t"
    assert row_from_line(b"{", "p:1").columns == {}


def test_names_of_a_results_own_fields_get_a_prefix() -> None:
    given = {"text": "reference", "error": 0.5, "token_ids": [1], "fingerprint": "f"}
    expected = {f"input_{name}": value for name, value in given.items()}
    assert columns_of(**given, finish_reason="stop") == expected | {"input_finish_reason": "stop"}
    for content in ({"text": 1, "input_text": 2}, {"input_text": 2, "text": 1}):
        error = error_of(prompt="p", **content)
        assert "its column 'text' would come out as 'input_text'" in error
        assert "rename one of them" in error


def test_values_of_tables_become_json() -> None:
    moment = datetime(2024, 5, 1, 12, tzinfo=UTC)
    found = columns_of(
        at=moment,
        day=date(2024, 5, 1),
        price=Decimal("1.10"),
        raw=b"\x00\xff",
        missing=math.nan,
        number=np.int64(7),
        share=np.float32(0.5),
        vector=np.array([[1.0, math.nan]]),
        pair=(1, "x"),
    )
    assert found == {
        "at": "2024-05-01T12:00:00+00:00",
        "day": "2024-05-01",
        "price": "1.10",
        "raw": "AP8=",
        "missing": None,
        "number": 7,
        "share": 0.5,
        "vector": [[1.0, None]],
        "pair": [1, "x"],
    }


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"x": math.inf}, "its column 'x' is inf, which JSON cannot write"),
        ({"x": {"y": [object()]}}, "its column 'x' is of type object, which JSON has not"),
        ({"x": {1: 2}}, "its column 'x' has an object with a name that is no text"),
        ({"x": "\ud800"}, "its column 'x' holds half a surrogate pair"),
        ({"x\ud800": 1}, "is no text; give it one"),
        ({"": 1}, "the name of its column '' is no text"),
        ({"x": 10**5000}, "is a number of thousands of digits"),
    ],
)
def test_what_a_result_cannot_carry_is_an_error(content: dict[str, Any], error: str) -> None:
    assert error in error_of(prompt="p", **content)
    deep: Any = "x"
    for _ in range(101):
        deep = [deep]
    assert "nests deeper than 100 levels" in error_of(prompt="p", x=deep)
    assert isinstance(row_of(prompt="p", x=deep[0]), Row)
    assert "is no text" in row_from_mapping({"prompt": "p", 3: 4}, "p").error  # type: ignore


def test_columns_are_part_of_an_id_that_is_made_of_content_alone() -> None:
    contents: list[dict[str, Any]] = [
        {"prompt": "p", "topic": "a"},
        {"prompt": "p", "topic": "b"},
        {"prompt": "p"},
        {"topic": "a", "prompt": "p"},
    ]
    made = Occurrences()
    one, other, plain, again = (made.custom_id(row_of(**each).named_by) for each in contents)
    assert again == f"{one}-2"
    assert len({one, other, plain}) == 3
    assert [row.custom_id for row in rows_of([{"prompt": "p", "topic": "a"}])] == ["row-0"]
