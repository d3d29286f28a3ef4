"""Answers that keep to a form, against JSON's own reader, `jsonschema`, and all tokens tried."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch
from transformers import AutoTokenizer

from actors.logprobs import TokenLogprobs
from actors.messages import Admission, FinishReason, Sampling
from actors.stage.grammar import Grammars, behind_reasoning, compiled, leaves_room, vocabulary_of
from actors.stage.sampler import Sampler
from tests.actors.batches import batch_in_ranges
from tests.llmpq.small_tokenizers import piece_tokenizer, strip_decoder
from tests.paths import DEMO_MODEL

TOKENIZER = AutoTokenizer.from_pretrained(DEMO_MODEL)
VOCABULARY, END = len(TOKENIZER), TOKENIZER.eos_token_id
COLUMNS = VOCABULARY + 5  # of logits, as models have tokens that no tokenizer has
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA}
LETTERS = {"regex": "[ab]{2,4}c?"}

Answers = list[tuple[list[int], FinishReason | None]]


def admitted(slot: int, sampling: Sampling, most: int = 200, **given: Any) -> Admission:
    return Admission(slot, f"row {slot}", most, sampling, **given)


def drawn(
    admissions: Sequence[Admission],
    steps: int = 200,
    favoured: int | None = None,
    tokenizer: Any = TOKENIZER,
) -> Answers:
    """Answers of a sampler to logits that depend on slot and position alone."""
    sampler = Sampler([END], tokenizer)
    answers: Answers = [(list(each.generated), None) for each in admissions]
    for step in range(steps):
        live = [n for n, (_, reason) in enumerate(answers) if reason is None]
        if not live:
            break
        slots = [admissions[n].slot for n in live]
        rows = torch.stack([logits(admissions[n].slot, len(answers[n][0])) for n in live])
        if favoured is not None:
            rows[:, favoured] = 100.0
        ones = np.ones(len(slots), dtype=np.int64)
        batch = batch_in_ranges(slots, ones, ones, () if step else admissions)
        sampled = sampler.sample(batch, rows)
        for n, token, reason in zip(live, sampled.token_ids, sampled.finish_reasons, strict=True):
            answers[n] = ([*answers[n][0], int(token)], reason)
    return answers


def logits(slot: int, position: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * slot + position)
    return torch.randn(COLUMNS, generator=draw) * 2


def text(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True))


def test_every_answer_that_is_not_cut_is_json_of_the_schema() -> None:
    """Greedy and drawn, with penalties, bias and limits; one that is cut is the begin of one."""
    kinds = (
        {},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3},
        {"presence_penalty": 2.0, "logit_bias": {END: 100.0}},
        {"temperature": 0.8, "min_p": 0.2, "min_tokens": 30, "ignore_eos": True},
    )
    sampling = [Sampling(structured_outputs=JSON, **kinds[n % 6]) for n in range(24)]
    answers = drawn([admitted(n, each, 90) for n, each in enumerate(sampling)])
    whole = [text(tokens) for tokens, reason in answers if reason == "stop"]
    for each in whole:
        jsonschema.validate(json.loads(each), SCHEMA)
    assert len(whole) > 12
    assert {reason for _, reason in answers} == {"stop", "length"}
    assert all(len(tokens) == 90 for tokens, reason in answers if reason == "length")


def test_the_tokens_that_may_come_are_all_that_some_choice_goes_on_with() -> None:
    choices = ["yes", "yellow", "no", "nothing at all"]
    vocabulary = vocabulary_of(TOKENIZER, [END])
    grammars = Grammars(lambda: vocabulary)
    form = Sampling(structured_outputs={"choice": choices}).structured_outputs
    texts = [TOKENIZER.decode([token]) for token in range(VOCABULARY)]
    seen = 0
    for begin in ("", "y", "no"):  # where only one text is left, its usual tokens are the ones
        before = TOKENIZER.encode(begin, add_special_tokens=False)
        answer = grammars.begin(form, before)
        allowed = grammars.masked(torch.zeros(1, COLUMNS), [answer])[0].isfinite()
        expected = [
            bool(each) and any(choice.startswith(begin + each) for choice in choices)
            for each in texts
        ]
        expected[END] = begin in choices
        assert allowed[:VOCABULARY].tolist() == expected
        assert not allowed[VOCABULARY:].any()
        seen += sum(expected)
    assert seen > 8


def test_tokens_of_a_pattern_are_among_those_that_match() -> None:
    pattern = regex.compile(LETTERS["regex"])
    sampling = Sampling(temperature=3.0, structured_outputs=LETTERS)
    for tokens, reason in drawn([admitted(n, replace(sampling, seed=n)) for n in range(12)]):
        assert all(pattern.fullmatch(text(tokens[:n]), partial=True) for n in range(len(tokens)))
        assert reason == "stop"
        assert pattern.fullmatch(text(tokens))


def test_an_answer_goes_on_from_the_tokens_that_it_has() -> None:
    """As after a fault, a preemption, or on stages that decode for others."""
    sampling = Sampling(temperature=1.0, structured_outputs=JSON)
    whole = drawn([admitted(n, sampling) for n in range(4)])
    for cut in (1, 7):
        begun = [tuple(tokens[:cut]) for tokens, _ in whole]
        again = [admitted(n, sampling, generated=each) for n, each in enumerate(begun)]
        assert drawn(again) == whole


REASONING = AutoTokenizer.from_pretrained(DEMO_MODEL)
REASONING.add_tokens(["<think>", "</think>"])


@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("<", ">")])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_form_binds_once_the_answer_has_reasoned(
    markers: tuple[str, str], has_begun: bool
) -> None:
    """Between tokens or texts, begun by the prompt or the answer; replayed within it too."""
    ids = REASONING.convert_tokens_to_ids(markers)
    as_tokens = [f"<[{token}]>" if token >= VOCABULARY else json.dumps(text)
                 for token, text in zip(ids, markers, strict=True)]  # fmt: skip
    form = behind_reasoning(json.dumps(LETTERS), *as_tokens, has_begun)
    assert leaves_room(form)
    assert not leaves_room(json.dumps(LETTERS))
    sampling = Sampling(temperature=1.0, structured_outputs=form, logit_bias={ids[0]: 4, ids[1]: 8})
    admissions = [admitted(n, sampling) for n in range(12)]
    answers = drawn(admissions, tokenizer=REASONING)
    thoughts = []
    for tokens, reason in answers:
        before, closing, content = str(REASONING.decode(tokens)).partition(markers[1])
        if not has_begun and not before.startswith(markers[0]):
            before, content = "", before
        assert reason == "stop"
        assert regex.fullmatch(LETTERS["regex"], content.removesuffix("<|eos|>"))
        thoughts += [before] if closing else []
    assert max(map(len, thoughts)) > 20
    assert (len(thoughts) == 12) == has_begun
    kinds = (JSON, {"choice": ["aa"]}, {"grammar": 'start: "aa"'}, {"grammar": 'root ::= "aa"'})
    for kind in kinds:
        whole = behind_reasoning(json.dumps(kind), *as_tokens, has_begun)
        assert compiled(whole, vocabulary_of(REASONING)).is_accepting() is False
    for cut in (-1, 2):
        begun = [tuple(tokens[: min(cut, len(tokens) - 1)]) for tokens, _ in answers]
        again = [replace(each, generated=had) for each, had in zip(admissions, begun, strict=True)]
        assert drawn(again, tokenizer=REASONING) == answers


def test_rows_without_a_form_are_not_touched() -> None:
    free = Sampling(temperature=1.0, seed=5)
    alone = drawn([admitted(1, free, 12)])
    beside = drawn([admitted(0, Sampling(structured_outputs=JSON)), admitted(1, free, 12)])
    assert beside[1] == alone[0]


def test_an_answer_that_cannot_be_followed_ends_with_an_error() -> None:
    """As where its grammar becomes too complex; here its tokens are not those of the form."""
    begun = admitted(0, Sampling(structured_outputs=LETTERS), generated=(END + 1,))
    ((tokens, reason),) = drawn([begun])
    assert (len(tokens), reason) == (2, "error")


@pytest.mark.parametrize(
    ("options", "ending", "tokens"),
    [
        ({}, "stop", "aa"),  # the end token is the most probable, as soon as it may come
        ({"ignore_eos": True}, "stop", "aaaac"),  # where nothing else may come, it is complete
        ({"min_tokens": 4}, "stop", "aaaa"),
        ({"ignore_eos": True, "stop": ("aaa",)}, "stop", "aaa"),
        ({"ignore_eos": True, "max_new_tokens": 3}, "length", "aaa"),
    ],
)
def test_ends_of_answers(options: dict[str, Any], ending: str, tokens: str) -> None:
    """Of one letter a token: longer ones, and b, are forbidden by a bias."""
    a, c = TOKENIZER.convert_tokens_to_ids(["a", "c"])
    bias = {token: -100.0 for token in range(VOCABULARY) if token not in (a, c, END)}
    bias[a] = 50.0
    sampling = Sampling(structured_outputs=LETTERS, logit_bias=bias, **options)
    ((found, reason),) = drawn(
        [admitted(0, sampling, options.get("max_new_tokens", 50))], favoured=END
    )
    assert (text(found), reason) == (tokens, ending)


def test_log_probabilities_are_those_of_the_model() -> None:
    """Before the mask, as those of OpenAI and vLLM are: they tell what the form forbids."""
    sampler = Sampler([END], TOKENIZER)
    one = np.ones(1, dtype=np.int64)
    begin = admitted(0, Sampling(structured_outputs=JSON), top_logprobs=1)
    row = logits(0, 0)[None]
    sampled = sampler.sample(batch_in_ranges([0], one, one, [begin]), row)
    token, expected = int(sampled.token_ids[0]), row.log_softmax(-1)[0]
    assert token != int(row.argmax())
    assert sampled.logprobs is not None
    found: TokenLogprobs = sampled.logprobs.by_row()[0]
    assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert found.top[0] == (int(row.argmax()), pytest.approx(float(expected.max()), abs=1e-5))


def test_a_tokenizer_of_pieces_with_bytes() -> None:
    """LLaMA's kind, whose spaces are in its tokens, and which has bytes for what has no token."""
    tokenizer = piece_tokenizer(strip_decoder())
    matcher = compiled('{"choice":["é!",". world","é world"]}', vocabulary_of(tokenizer, [2]))
    ids = tokenizer.convert_tokens_to_ids(["é", "▁world"])
    assert matcher.consume_tokens(ids)
    assert matcher.is_stopped()
