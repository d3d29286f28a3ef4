"""Jobs whose rows ask for log-probabilities of prompts and answers, against transformers: under
every policy, as stages die, and as over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmpq import Plan
from tests.llmpq.run.demo_runs import demo_plan, divided_demo_plan, kill_sampler
from tests.paths import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("local_ray")

TOKENS = 6
HEAD = "# Each of these begins alike, by more than 64 tokens, é.\n" * 4
ROWS: list[dict[str, Any]] = [
    {
        "custom_id": str(n),
        "prompt": f"{HEAD if n % 2 else ''}def f{n}(x):",
        "max_tokens": 1 if n == 5 else TOKENS,
        **({"prompt_logprobs": n % 3} if n % 4 != 1 else {}),
        **({"logprobs": n % 5} if n % 5 else {}),
    }
    for n in range(16)
]
MIXED: list[dict[str, Any]] = [
    {
        "custom_id": "n",
        "prompt": "def",
        "n": 3,
        "temperature": 1.0,
        "logprobs": 0,
        "prompt_logprobs": 1,
    },
    {"custom_id": "one", "prompt": [70], "sampling_params": {"prompt_logprobs": 2}},
    {"custom_id": "stop", "prompt": "def f(", "stop": ["x"], "logprobs": True, "top_logprobs": 2},
    {"custom_id": "long", "prompt": [70] * 999, "prompt_logprobs": 2, "logprobs": 2},
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return demo_plan(256, TOKENS)


@cache
def model_and_tokenizer() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(DEMO_MODEL)


def assert_are_the_models(row: dict[str, Any], result: dict[str, Any]) -> None:
    model, tokenizer = model_and_tokenizer()
    prompt = row["prompt"]
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    answer = list(result["token_ids"])
    with torch.inference_mode():
        rows = model(torch.tensor([[*ids, *answer]])).logits[0].log_softmax(-1)
    most = row.get("prompt_logprobs")
    assert ("prompt_logprobs" in result) == (most is not None)
    if most is not None:
        first, *others = result["prompt_logprobs"]
        assert first is None
        for token, expected, told in zip(ids[1:], rows[: len(ids) - 1], others, strict=True):
            best = expected.topk(most).indices.tolist()
            assert list(told) == list(map(str, dict.fromkeys((token, *best))))
            for other, one in told.items():
                value = expected[int(other)]
                assert one["logprob"] == pytest.approx(value.item(), abs=1e-4)
                assert one["rank"] == 1 + int((expected > value).sum())
        if isinstance(prompt, str):
            last = zip(map(str, ids[1:][-3:]), others[-3:], strict=True)
            assert prompt.endswith("".join(told[own]["decoded_token"] for own, told in last))
    most = row.get("logprobs")
    assert ("logprobs" in result) == (most is not None)
    if most is not None:
        told = result["logprobs"]
        expected = rows[len(ids) - 1 : -1]
        values = expected.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        assert told["token_logprobs"] == pytest.approx(values[: len(told["tokens"])], abs=1e-4)
        assert "".join(told["tokens"]) == result["text"]
        for one, row_of_model in zip(told["top_logprobs"], expected, strict=False):
            best = row_of_model.topk(most).values.tolist()
            assert list(one.values())[:most] == pytest.approx(best, abs=1e-4)


def results_of(
    plan: Plan, rows: list[dict[str, Any]], told: Callable[[Any, int], None], **options: Any
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with plan.session(generation_config="none", **options) as session:
        for result in session.run(rows):
            found[result.custom_id] = result.as_dict()
            told(session, len(found))
    assert len(found) == len(rows)
    return found


def check_rows(found: dict[str, dict[str, Any]]) -> None:
    assert {name: result["error"] for name, result in found.items()} == {
        row["custom_id"]: None for row in ROWS
    }
    for row in ROWS:
        assert_are_the_models(row, found[row["custom_id"]])


def test_they_are_those_of_the_model_after_a_fault(plan: Plan) -> None:
    """Prompts come in parts, next to others that share heads; what samples is killed."""
    killed: set[int] = set()

    def kill(session: Any, done: int) -> None:
        if done >= 4 and not killed:
            kill_sampler(session, plan, killed)

    check_rows(results_of(plan, ROWS, kill, policy="orca", prefill_chunk_tokens=30))
    assert killed


def test_they_are_those_of_the_model_where_stages_prefill_for_others() -> None:
    check_rows(results_of(divided_demo_plan(256, TOKENS), ROWS, lambda *_: None))


@pytest.mark.rare  # `test_rows_of_all_kinds` runs under it too
def test_they_are_those_of_the_model_in_batches(plan: Plan) -> None:
    check_rows(results_of(plan, ROWS, lambda *_: None, policy="static"))


def test_rows_of_all_kinds(plan: Plan) -> None:
    found = results_of(plan, MIXED, lambda *_: None)
    several = found["n"]["generations"]
    assert len(several) == 3
    assert all("prompt_logprobs" not in each for each in several)
    for each in several:
        assert_are_the_models(MIXED[0], {**each, "prompt_logprobs": found["n"]["prompt_logprobs"]})
    assert found["one"]["prompt_logprobs"] == [None]
    assert_are_the_models({**MIXED[2], "logprobs": 2}, found["stop"])
    assert found["stop"]["text"].count("x") == 0
    assert found["long"]["error"] is not None
    assert (found["long"]["prompt_logprobs"], found["long"]["logprobs"]) == (None, None)
