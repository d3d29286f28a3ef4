"""Likelihoods of continuations against transformers' own log-probabilities, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from llmpq import Plan
from llmpq.quality.likelihood import Continuation, plan_likelihoods
from llmpq.quality.options import EvaluationOptions
from quant.common.errors import InputError, SpecError
from tests.actors.configs import VOCABULARY
from tests.llmpq.quality.losses import token_text


def by_transformers(model: Any, asked: Continuation) -> tuple[float, bool]:
    ids = [*asked.context, *asked.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    logits = logits[len(asked.context) - 1 :].double()
    wanted = torch.tensor(asked.token_ids)
    nats = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
    return float(nats), bool((logits.argmax(-1) == wanted).all())


def greedy(model: Any, context: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([context])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(context) :].tolist()


@pytest.mark.parametrize("held", [1 << 18, 32])
def test_likelihoods_are_those_of_transformers(
    tiny: tuple[Path, Any], plan: Plan, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Of any lengths, in any order, in one pass through the layers or in several."""
    monkeypatch.setattr("llmpq.quality.likelihood._TOKENS_HELD", held)
    text = token_text(60)
    cuts = [(0, 1, 2), (3, 20, 21), (5, 8, 40), (40, 41, 60), (0, 30, 34)]
    asked = [Continuation(text[a:b], text[b:c]) for a, b, c in cuts]
    asked.append(Continuation(text[:9], greedy(tiny[1], text[:9], 5)))
    expected = [by_transformers(tiny[1], each) for each in asked]

    found = plan_likelihoods(plan.spec, asked)

    assert [each.logprob for each in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
    assert [each.is_greedy for each in found] == [each[1] for each in expected]
    assert found[-1].is_greedy
    assert not found[3].is_greedy


def test_of_a_context_that_is_too_long_the_last_tokens_count(
    tiny: tuple[Path, Any], plan: Plan
) -> None:
    model = tiny[1]
    positions = model.config.max_position_embeddings
    text = token_text(positions + 20)
    cut = Continuation(text[-positions - 1 : -3], text[-3:])
    (found,) = plan_likelihoods(plan.spec, [Continuation(text[:-3], text[-3:])])
    assert found.logprob == pytest.approx(by_transformers(model, cut)[0], abs=1e-4)
    shorter = EvaluationOptions(sequence_length=9)
    (found,) = plan_likelihoods(plan.spec, [Continuation(text[:-3], text[-3:])], options=shorter)
    cut = Continuation(text[-10:-3], text[-3:])
    assert found.logprob == pytest.approx(by_transformers(model, cut)[0], abs=1e-4)
    with pytest.raises(InputError, match=f"{positions + 1} tokens, but {positions} are seen"):
        plan_likelihoods(plan.spec, [Continuation([3], text[: positions + 1])])


def test_nothing_to_score_is_certain_and_bad_input_is_refused(plan: Plan) -> None:
    assert plan_likelihoods(plan.spec, [Continuation([3], [])]) == [(0.0, True)]
    with pytest.raises(InputError, match="no token before it; begin with"):
        plan_likelihoods(plan.spec, [Continuation([], [3])])
    for context, tokens, error in ([3], [VOCABULARY], InputError), ([VOCABULARY], [3], SpecError):
        with pytest.raises(error, match=f"{VOCABULARY}.*another tokenizer"):
            plan_likelihoods(plan.spec, [Continuation(context, tokens)])
