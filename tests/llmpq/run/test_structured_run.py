"""Jobs whose rows ask for forms, on the demo model: under every policy, and as stages die."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from llmpq import Plan
from llmpq.cli.run_options import run_options, run_parser
from llmpq.run.options import RunOptions
from planner.scheduling import PolicyOptions, RequestSchedule
from quant.common.errors import SpecError
from tests.llmpq.run.demo_runs import demo_plan, divided_demo_plan, kill_sampler

pytestmark = pytest.mark.usefixtures("local_ray")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}, "is": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
    "required": ["n", "is"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"guided_choice": ["class", "def", "import os"]},
    {"structured_outputs": {"regex": "[0-9]{2}:[0-9]{2}"}},
    {"response_format": {"type": "text"}},
    {},  # of the job
    {"guided_grammar": 'start: "(" (NUMBER | start) ")"\nNUMBER: /[0-9][0-9]?/'},
]
PARENTHESES = regex.compile(r"(\((?:[0-9]+|(?1))\))")
TOKENS = 60
ROWS = [
    {
        "custom_id": str(n),
        "prompt": f"def f{n}(x):",
        "temperature": (0, 1.0, 1.5)[n % 3],
        "seed": n,
        **FORMS[n // 4],
    }
    for n in range(24)
]
BAD = [
    {"custom_id": "type", "prompt": "a", "guided_json": {"type": "blurb"}},
    {"custom_id": "empty", "prompt": [1], "guided_regex": "a[^\\s\\S]"},
]


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FITS: list[Callable[[str], Any]] = [
    is_json,
    lambda text: text in ("class", "def", "import os"),
    regex.compile("[0-9]{2}:[0-9]{2}").fullmatch,
    lambda text: True,
    is_json,
    PARENTHESES.fullmatch,
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return demo_plan(16, TOKENS)


@pytest.fixture(scope="module")
def expected(plan: Plan) -> dict[str, str]:
    return answers(plan, nothing, policy="static")


def nothing(session: Any, done: int) -> None: ...


@pytest.fixture
def kill(plan: Plan) -> Iterator[Callable[[Any, int], None]]:
    """Kills what samples, and again once it is another process."""
    killed: set[int] = set()

    def kill(session: Any, done: int) -> None:
        if done in (6, 12):
            kill_sampler(session, plan, killed)

    yield kill
    assert killed


def answers(plan: Plan, told: Callable[[Any, int], None], **options: Any) -> dict[str, str]:
    """Texts of the rows, which have their forms where they are not cut."""
    found, errors, whole = {}, {}, 0
    with plan.session(json_schema=SCHEMA, **options) as session:
        for result in session.run([*ROWS[:5], *BAD, *ROWS[5:]]):
            if result.error is not None:
                errors[result.custom_id] = result.error
                continue
            found[result.custom_id] = result.text
            told(session, len(found))
            if result.finish_reason == "stop":
                assert FITS[int(result.custom_id) // 4](result.text), result.text
                whole += 1
    assert "structured_outputs" in errors["type"]
    assert "Invalid type: blurb" in errors["type"]
    assert "no text has this form" in errors["empty"]
    assert len(errors) == 2
    assert len(found) == len(ROWS)
    assert whole >= 16
    return found


def test_a_jobs_form_that_cannot_be_kept_is_told_before_anything_runs(
    plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    for text, words in (
        ('{"type": "string", "minLength": 5, "maxLength": 4}', "cannot be kept: Unsatisfiable"),
        ("[", "schema.json.*give a JSON schema"),
    ):
        file.write_text(text)
        with pytest.raises(SpecError, match=words):
            plan.run(ROWS, json_schema=file)
    file.write_text(json.dumps(SCHEMA))
    parser = run_parser()
    given = parser.parse_args(
        ["--plan", "p", "--input", "i", "--output", "o", "--json_schema", str(file)]
    )
    assert run_options(given).sampling == {
        "structured_outputs": json.dumps({"json": SCHEMA}, separators=(",", ":"))
    }
    with pytest.raises(SpecError, match="json_schema has no effect beside structured_outputs"):
        RunOptions.of({"json_schema": file, "structured_outputs": {"regex": "a"}})


def test_answers_have_their_forms_after_faults(
    plan: Plan, kill: Callable[[Any, int], None], expected: dict[str, str]
) -> None:
    assert answers(plan, kill, policy="orca", prefill_chunk_tokens=3) == expected


def test_stages_that_prefill_for_others_choose_the_first_token(expected: dict[str, str]) -> None:
    assert answers(divided_demo_plan(16, TOKENS), nothing) == expected


@pytest.mark.rare
def test_answers_have_their_forms_when_they_are_preempted(
    plan: Plan, kill: Callable[[Any, int], None], expected: dict[str, str], tmp_path: Path
) -> None:
    """Under s3, where all are expected to be short."""
    trace = tmp_path / "short.csv"
    trace.write_text("custom_id,expected_tokens\n" + "".join(f"{n},2\n" for n in range(24)))
    assert answers(plan, kill, policy="s3", predictor=f"trace:{trace}") == expected


@pytest.mark.rare
def test_answers_have_their_forms_by_turns(plan: Plan, expected: dict[str, str]) -> None:
    turns = PolicyOptions("exegpt", schedule=RequestSchedule("rra", 4, 9, 3, 3, 2, 8.0))
    assert answers(Plan(replace(plan.spec, policy=turns)), nothing) == expected
