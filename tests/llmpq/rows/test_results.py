"""A result as a line of JSON."""

from __future__ import annotations

import json

from llmpq.rows.results import Result


def test_a_result_is_one_line_of_json() -> None:
    result = Result("a", "text \u2028 ünïcode", (1, 2), "stop")
    line = result.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "custom_id": "a",
        "text": result.text,
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "error": None,
    }
