"""A plan as a stage of Ray Data, against a run of the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from llmpq import Plan, SpecError
from llmpq.ray_data import processor
from tests.llmpq.conftest import NEW_TOKENS

ROWS = 8
BAD = 5


def test_a_dataset_gets_the_answers_of_a_run(one_stage: Plan, local_ray: None) -> None:
    """In its order and with its own columns, over several batches; a bad row has its error."""
    from ray import data  # half a second, which processes without this test need not spend

    limits = [1 + i % NEW_TOKENS for i in range(ROWS)]
    limits[BAD] = 10 * NEW_TOKENS
    given = [
        {"ids": [5 + i, 6, 7], "limit": limit, "far": float("inf")}
        for i, limit in enumerate(limits)
    ]

    def asked(row: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_tokens": row["limit"], "temperature": 1.0, "seed": 4}
        return {"prompt": row["ids"], "sampling_params": sampling}

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "first": row["generated_tokens"][0]}

    made = processor(one_stage, asked, answered, batch_size=3)(data.from_items(given)).take_all()
    wanted = {each.custom_id: each for each in one_stage.run([asked(row) for row in given])}
    assert [list(row["ids"]) for row in made] == [row["ids"] for row in given]
    assert all(row["far"] == float("inf") for row in made)
    for i, row in enumerate(made):
        result = wanted[f"row-{i}"]
        assert list(row["generated_tokens"]) == list(result.token_ids)
        assert row["num_generated_tokens"] == len(result.token_ids)
        assert row["generated_text"] == result.text
        assert row["finish_reason"] == result.finish_reason
        assert row["error"] == result.error
        assert row["num_input_tokens"] == result.prompt_tokens
        assert row["first"] == (None if i == BAD else result.token_ids[0])
    assert "max_new_tokens" in made[BAD]["error"]


def test_options_are_checked_before_anything_starts(one_stage: Plan) -> None:
    with pytest.raises(SpecError, match="'temprature'; nearest: temperature"):
        processor(one_stage, **{"temprature": 1})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="max_new_tokens is 5000"):
        processor(one_stage, max_new_tokens=5000)
    with pytest.raises(SpecError, match="batch_size is 0"):
        processor(one_stage, batch_size=0)
