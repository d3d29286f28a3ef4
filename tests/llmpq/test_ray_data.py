"""A plan as a stage of Ray Data, against a run of the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmpq import Fleet, Plan, SpecError
from llmpq.ray_data import processor
from planner.fleet.fleet_spec import FleetRecord, FleetSpec
from planner.plan.file import PLAN_VERSION
from tests.llmpq.conftest import NEW_TOKENS, fleet_part
from tests.paths import DEMO_MODEL

FEED = {"type": "function", "function": {"name": "feed"}}
LIMITS = (1, 2, 3, 8, 5, 6, 10 * NEW_TOKENS, 7)
BAD, CALLS = 6, 3


def asked(row: dict[str, Any]) -> dict[str, Any]:
    """Chats and lists of token ids, one of the chats with a call that is forced."""
    sampling = {"max_tokens": row["limit"], "temperature": 1.0, "seed": 4}
    messages = json.dumps([{"role": "user", "content": row["topic"]}])
    chat = {"prompt": None, "messages": messages, "tools": None, "tool_choice": None}
    if row["limit"] == LIMITS[CALLS]:
        chat |= {"tools": json.dumps([FEED]), "tool_choice": FEED}
    ids = {**dict.fromkeys(chat), "prompt": [5 + row["limit"], 6]}
    return {**(chat if row["is_chat"] else ids), "sampling_params": sampling}


def test_a_dataset_gets_the_answers_of_a_run(local_ray: None, tmp_path: Path) -> None:
    """In its order and with its own columns, over several batches and pipelines; a bad row has its
    error.
    """
    from ray import data  # half a second, which processes without this test need not spend

    node = {"accelerators": {"T4": 1}, "usable_memory_gib": 0.1}
    parts = tuple(fleet_part(DEMO_MODEL, [{**node, "name": name}], 2).spec for name in "ab")
    fleet = Fleet(FleetSpec(PLAN_VERSION, "two", parts, (), 1.0, 1.0, FleetRecord(1.0, 2, 0, 1)))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}")
    given = [
        {"topic": f"def f{i}", "is_chat": i % 2 == 1, "limit": limit, "far": float("inf")}
        for i, limit in enumerate(LIMITS)
    ]

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "first": row["generated_tokens"][0]}

    stage = processor(fleet, asked, answered, batch_size=3, chat_template=template)
    made = stage(data.from_items(given, override_num_blocks=2)).take_all()
    rows = [{k: v for k, v in asked(row).items() if v is not None} for row in given]
    for row in rows:
        row |= {name: json.loads(row[name]) for name in ("messages", "tools") if name in row}
    wanted = {each.custom_id: each for each in fleet.run(rows, chat_template=template)}
    assert [row["topic"] for row in made] == [row["topic"] for row in given]
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
        assert [each["function"]["name"] for each in row.get("tool_calls") or ()] == (
            ["feed"] if i == CALLS else []
        )
    assert "max_new_tokens" in made[BAD]["error"]


def test_options_are_checked_before_anything_starts(one_stage: Plan) -> None:
    with pytest.raises(SpecError, match="'temprature'; nearest: temperature"):
        processor(one_stage, **{"temprature": 1})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="max_new_tokens is 5000"):
        processor(one_stage, max_new_tokens=5000)
    with pytest.raises(SpecError, match="batch_size is 0"):
        processor(one_stage, batch_size=0)
