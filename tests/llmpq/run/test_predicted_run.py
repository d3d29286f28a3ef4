"""Runs under the policy `s3` with predictors of every kind: tokens are those of `generate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.recovery.policy import RecoveryEvent
from llmpq import Plan
from llmpq.lengths.folder import save_predictor, tokenizer_digest
from llmpq.lengths.sources import PredictorProcess
from llmpq.run.engine import RunResources
from llmpq.run.options import RunOptions
from llmpq.run.run import Run
from planner.assumed_predictor import predictor_file
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH
from tests.llmpq.lengths.learnable import by_prompt_length
from tests.llmpq.processes import alive

pytestmark = pytest.mark.usefixtures("local_ray")

PROMPTS = random_prompts(tuple(1 + 5 * i % PROMPT_LENGTH for i in range(40)))
ROWS = [
    {"custom_id": str(i), "prompt": list(prompt), "max_new_tokens": 1 + i % NEW_TOKENS}
    for i, prompt in enumerate(PROMPTS)
]


@pytest.fixture
def predictor(tmp_path: Path, tiny: tuple[Path, Any]) -> Path:
    """One that is trained for the tiny model's ids, which has no tokenizer."""
    digest = tokenizer_digest(tiny[0], tiny[1].config.vocab_size)
    save_predictor(tmp_path / "p", by_prompt_length(digest), np.diag([1, 1, 1]))
    return tmp_path / "p"


def check(found: dict[str, tuple[int, ...]], model: Any) -> None:
    """Each row has the tokens of `generate`."""
    assert len(found) == len(ROWS)
    limits = [1 + i % NEW_TOKENS for i in range(len(PROMPTS))]
    for i, expected in enumerate(references(model, PROMPTS, limits)):
        assert list(found[str(i)]) == expected


def run_all(
    plan: Plan, told: Callable[[int], None] = lambda done: None, **options: Any
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Tokens by row, and what was said of the predictor."""
    events: list[RecoveryEvent] = []
    rows = plan.run(ROWS, policy="s3", on_event=events.append, **options)
    found: dict[str, tuple[int, ...]] = {}
    for result in rows:
        assert result.error is None
        found[result.custom_id] = result.token_ids
        told(len(found))
    return found, [event.text for event in events if event.kind == "predictor"]


def test_without_a_predictor_the_longest_is_expected_and_said_once(
    tiny: tuple[Path, Any], one_stage: Plan
) -> None:
    found, said = run_all(one_stage)
    check(found, tiny[1])
    assert len(said) == 1
    assert said[0].startswith("s3 without a predictor (--predictor)")


def test_wrong_predictions_of_a_file_change_no_token(
    tiny: tuple[Path, Any], plan: Plan, tmp_path: Path
) -> None:
    """Every answer is expected to be of one token; some rows are not in the file."""
    lines = "".join(f"{row['custom_id']},1\n" for row in ROWS[::2])
    (tmp_path / "t.csv").write_text(f"custom_id,expected_tokens\n{lines}")
    found, said = run_all(plan, predictor=f"trace:{tmp_path / 't.csv'}")
    check(found, tiny[1])
    assert said == []


def test_a_trained_predictor_tells_in_the_end_how_it_did(
    tiny: tuple[Path, Any], one_stage: Plan, predictor: Path, tmp_path: Path
) -> None:
    learnt = tmp_path / "learnt"
    found, said = run_all(one_stage, predictor=predictor, save_predictor=learnt)
    check(found, tiny[1])
    assert len(said) == 2
    assert "40 of 40 answers had the length that was predicted" in said[0]
    assert predictor_file(learnt).buckets == predictor_file(predictor).buckets


def test_a_predictor_that_dies_stops_no_run(
    tiny: tuple[Path, Any], one_stage: Plan, predictor: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when the first row is done, and again at the end nothing is written."""
    started: list[PredictorProcess] = []
    wait = PredictorProcess.wait
    monkeypatch.setattr(PredictorProcess, "wait", lambda self: started.append(self) or wait(self))

    def kill(done: int) -> None:
        if done == 1:
            os.kill(started[0].pid, signal.SIGKILL)

    found, said = run_all(one_stage, kill, predictor=predictor)
    check(found, tiny[1])
    assert [text.partition(":")[0] for text in said] == ["the predictor of lengths is given up"]


def test_a_run_that_is_not_begun_leaves_no_process(one_stage: Plan, predictor: Path) -> None:
    run = Run(RunResources(one_stage.spec, RunOptions(policy="s3", predictor=predictor)))
    assert run._expected is not None
    source = run._expected.source
    assert isinstance(source, PredictorProcess)
    run.close()
    assert not alive({source.pid})
