"""Bias and penalties against transformers' processor and closed forms, alone and in batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from actors.messages import Admission, MicroBatch, Request, Sampling
from actors.stage.sampler import NO_TOKENS, Sampler, TokenCounts, changed_logits
from tests.actors.batches import batch_in_ranges

VOCABULARY = 50
PROMPT = (7, 3, 7, 21, 40)
GENERATED = (3, 11, 11, 11, 49)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def request(sampling: Sampling, generated: tuple[int, ...] = GENERATED, name: str = "a") -> Request:
    return Request(name, PROMPT, 20, sampling, generated)


def counts_of(sampling: Sampling) -> TokenCounts:
    return TokenCounts.of(Admission.of(0, request(sampling)))


def changed(raw: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return changed_logits(raw, [sampling], [counts_of(sampling)])


@pytest.mark.parametrize("penalty", [0.01, 0.7, 1.3, 100.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    raw = logits(1)
    ids = torch.tensor([PROMPT + GENERATED])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, raw.clone())
    found = changed(raw, Sampling(repetition_penalty=penalty))
    torch.testing.assert_close(found.float(), expected)
    assert len(set(PROMPT + GENERATED)) == int((found.float() != raw).sum())


def by_hand(raw: torch.Tensor, sampling: Sampling) -> list[float]:
    """The definitions, token by token: OpenAI's mu[j] - c[j] * frequency - (c[j] > 0) * presence,
    after the bias and after transformers' division.
    """
    times = Counter(GENERATED)
    seen = set(PROMPT) | set(GENERATED)
    values = []
    for token, value in enumerate(raw[0].tolist()):
        value += sampling.logit_bias.get(token, 0.0)
        if token in seen and value < 0:
            value *= sampling.repetition_penalty
        elif token in seen:
            value /= sampling.repetition_penalty
        value -= times[token] * sampling.frequency_penalty
        value -= sampling.presence_penalty if times[token] > 0 else 0.0
        values.append(value)
    return values


SETTINGS = [
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-0.4),
    Sampling(presence_penalty=-2.0, frequency_penalty=2.0),
    Sampling(logit_bias={0: 100.0, 7: -3.5, 49: 0.25}),
    Sampling(
        logit_bias={7: -30.0, 11: 30.0, 20: 1.0},
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.7,
    ),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_all_of_them_are_their_closed_form(sampling: Sampling) -> None:
    raw = logits(1, seed=4)
    assert changed(raw, sampling)[0].tolist() == pytest.approx(by_hand(raw, sampling), abs=1e-12)


def test_rows_of_a_batch_are_changed_as_alone() -> None:
    raw = logits(len(SETTINGS))
    counts = [counts_of(sampling) if sampling.penalises else NO_TOKENS for sampling in SETTINGS]
    together = changed_logits(raw, SETTINGS, counts)
    for row, sampling in enumerate(SETTINGS):
        assert torch.equal(together[row : row + 1], changed(raw[row : row + 1], sampling))


def test_the_largest_logits_of_bfloat16_stay_finite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    for penalty in (0.01, 100.0):
        raw = torch.full((1, VOCABULARY), largest, dtype=torch.bfloat16)
        raw[0, ::2] *= -1
        assert changed(raw, Sampling(repetition_penalty=penalty)).isfinite().all()


def test_only_what_is_counted_is_told() -> None:
    """The prompt's distinct tokens, once, where a repetition penalty counts them."""
    told = {
        sampling: Admission.of(0, request(sampling)).prompt_tokens
        for sampling in (Sampling(), *SETTINGS)
    }
    assert [tokens for tokens in told.values() if tokens] == [(3, 7, 21, 40)]
    assert told[SETTINGS[-1]]


def batch(admitted: list[Admission], slots: list[int]) -> MicroBatch:
    ones = np.ones(len(slots), dtype=np.int64)
    return batch_in_ranges(slots, ones, ones, admitted)


def tokens_of(
    requests: list[Request], raw: torch.Tensor, together: bool = True
) -> list[tuple[int, ...]]:
    """Tokens of some steps over `raw` `[steps, requests, vocabulary]`, in one batch or by turns."""
    sampler = Sampler(())
    everyone = range(len(requests))
    groups = [list(everyone)] if together else [[slot] for slot in everyone]
    given: list[list[int]] = [[] for _ in everyone]
    for step, values in enumerate(raw):
        for slots in groups:
            admitted = [] if step else [Admission.of(slot, requests[slot]) for slot in slots]
            sampled = sampler.sample(batch(admitted, slots), values[slots])
            for slot, token in zip(slots, sampled.token_ids.tolist(), strict=True):
                given[slot].append(token)
    return [tuple(tokens) for tokens in given]


MIXED = [
    Sampling(),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.9, min_p=0.9, seed=3),
    Sampling(temperature=0.9, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.9),
    Sampling(temperature=1.2, seed=8),
    Sampling(logit_bias={5: 4.0, 6: 4.0}),
]


def flat_logits(steps: int, rows: int, seed: int = 1) -> torch.Tensor:
    """Of bfloat16 and close together, so that tokens are equally good and penalties decide."""
    generator = torch.Generator().manual_seed(seed)
    return (
        (torch.randn(steps, rows, VOCABULARY, generator=generator) / 4).bfloat16().round(decimals=1)
    )


def test_tokens_do_not_depend_on_who_else_is_in_the_batch() -> None:
    requests = [request(s, (), str(i)) for i, s in enumerate(MIXED)]
    raw = flat_logits(8, len(MIXED))
    assert tokens_of(requests, raw) == tokens_of(requests, raw, together=False)


def test_penalties_and_bias_matter_to_each_of_those() -> None:
    """Else the test above would say nothing of them."""
    requests = [request(s, (), str(i)) for i, s in enumerate(MIXED)]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    without = [
        replace(r, sampling=replace(r.sampling, logit_bias={}, min_p=0.0, **neutral))
        for r in requests
    ]
    raw = flat_logits(8, len(MIXED))
    found, plain = tokens_of(requests, raw), tokens_of(without, raw)
    differ = [a != b for a, b in zip(found, plain, strict=True)]
    assert differ == [s != replace(s, logit_bias={}, min_p=0.0, **neutral) for s in MIXED]


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_a_replayed_request_counts_what_it_generated_before(cut: int) -> None:
    """From prompt and tokens so far, in another slot: not as if they were the prompt's."""
    requests = [request(s, (), str(i)) for i, s in enumerate(MIXED)]
    raw = flat_logits(8, len(MIXED))
    whole = tokens_of(requests, raw)
    again = [replace(r, generated=t[:cut]) for r, t in zip(requests, whole, strict=True)][::-1]
    rest = tokens_of(again, raw[cut:].flip(1))[::-1]
    assert [t[:cut] + r for t, r in zip(whole, rest, strict=True)] == whole


def test_the_next_request_of_a_slot_begins_anew() -> None:
    sampler = Sampler(())
    sampling = Sampling(frequency_penalty=2.0)
    one = torch.nn.functional.one_hot(torch.tensor([9]), VOCABULARY).float()
    first = Admission(0, "a", 1, sampling)
    for admission in (first, replace(first, custom_id="b")):
        sampled = sampler.sample(batch([admission], [0]), one)
        assert (sampled.token_ids.tolist(), sampled.finish_reasons) == ([9], ("length",))
