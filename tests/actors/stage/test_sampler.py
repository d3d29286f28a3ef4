"""Sampling against transformers' own logits warpers, and the endings of a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.messages import Admission, MicroBatch, Request, Sampling
from actors.stage.sampler import Sampler, choose_tokens, filtered_probabilities, uniform_draw
from quant.common.errors import SpecError
from quant.common.text import MOST_BEFORE
from tests.actors.batches import batch_in_ranges
from tests.llmpq.small_tokenizers import ids_of, piece_tokenizer, strip_decoder

VOCABULARY = 50


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def batch(slots: Sequence[int], admitted: Sequence[Admission] = ()) -> MicroBatch:
    ones = np.ones(len(slots), dtype=np.int64)
    return batch_in_ranges(slots, ones, ones, admitted)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (0.7, 12, 0.6, 0.0),
        (1.3, 1, 0.1, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.5, 0, 0.9, 0.3),
        (1.7, 9, 0.8, 0.05),
        (0.8, 0, 1.0, 1.0),
    ],
)
def test_probabilities_equal_transformers_warpers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """In the order in which transformers' `generate` lists them."""
    raw = logits(6)
    warped = TemperatureLogitsWarper(temperature)(None, raw)
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    warped = TopPLogitsWarper(top_p)(None, warped) if top_p < 1 else warped
    warped = MinPLogitsWarper(min_p)(None, warped)
    sampling = [Sampling(temperature, top_k, top_p, min_p=min_p)] * len(raw)
    probabilities, order = filtered_probabilities(raw, sampling)
    by_token = torch.zeros_like(probabilities).scatter(1, order, probabilities)
    torch.testing.assert_close(by_token.float(), warped.softmax(-1), atol=1e-6, rtol=1e-4)


def test_draws_follow_the_distribution() -> None:
    raw = logits(1)
    draws = 20_000
    sampling = [Sampling(temperature=1.0, top_k=5)] * draws
    positions = [uniform_draw(3, "a", i) for i in range(draws)]
    tokens = choose_tokens(raw.expand(draws, -1), sampling, positions)
    expected = TopKLogitsWarper(5)(None, raw).softmax(-1)[0].numpy()
    seen = np.bincount(tokens, minlength=VOCABULARY) / draws
    assert np.abs(seen - expected).max() < 4 * np.sqrt(0.25 / draws)


def test_rows_do_not_depend_on_each_other() -> None:
    raw = logits(4)
    sampling = [
        Sampling(),
        Sampling(temperature=0.9, top_p=0.9),
        Sampling(temperature=1.5, top_k=9),
        Sampling(temperature=0.2),
    ]
    draws = [0.0, 0.3, 0.99, 0.5]
    together = choose_tokens(raw, sampling, draws)
    alone = [
        choose_tokens(raw[i : i + 1], [sampling[i]], [draws[i]])[0] for i in range(len(sampling))
    ]
    assert together.tolist() == alone
    assert together[0] == raw[0].argmax()


def test_extreme_draws_stay_within_what_is_kept() -> None:
    raw = logits(2)
    sampling = [Sampling(temperature=1.0, top_k=3)] * 2
    tokens = choose_tokens(raw, sampling, [0.0, 1 - 2**-53])
    for row, token in zip(raw, tokens, strict=True):
        assert token in row.topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-310, 1e-8, 1e8])
def test_extreme_temperatures_and_top_k(temperature: float) -> None:
    raw = logits(3)
    sampling = [Sampling(temperature=temperature, top_k=2**53)] * 3
    tokens = choose_tokens(raw, sampling, [0.5] * 3)
    if temperature < 1:
        assert tokens.tolist() == raw.argmax(-1).tolist()
    assert all(0 <= token < VOCABULARY for token in tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_only_their_request(
    value: float, temperature: float
) -> None:
    raw = logits(2)
    raw[0, 7] = value
    admitted = [Admission(i, str(i), 9, Sampling(temperature=temperature)) for i in range(2)]
    sampled = Sampler([]).sample(batch([0, 1], admitted), raw)
    assert sampled.finish_reasons == ("error", None)


def test_draw_is_uniform_and_keyed_by_seed_id_and_position() -> None:
    draws = [uniform_draw(0, f"row-{i}", i % 7) for i in range(5000)]
    assert min(draws) >= 0
    assert max(draws) < 1
    assert abs(np.mean(draws) - 0.5) < 0.02
    keys = {uniform_draw(*k) for k in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]}
    assert len(keys) == 4
    assert uniform_draw(5, "a", 2) == uniform_draw(5, "a", 2)


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + t) for t in token_ids)


def run(sampler: Sampler, tokens: Sequence[int], sampling: Sampling, most: int) -> list[Any]:
    """Feed one request logits that make greedy sampling choose `tokens`."""
    admission = Admission(0, "x", most, sampling)
    reasons = []
    for i, token in enumerate(tokens):
        one_hot = torch.nn.functional.one_hot(torch.tensor([token]), 26).float()
        admitted = [admission] if i == 0 else []
        reasons.append(sampler.sample(batch([0], admitted), one_hot).finish_reasons[0])
        if reasons[-1]:
            break
    return reasons


def test_end_of_sequence_stops_unless_ignored() -> None:
    assert run(Sampler([4]), [1, 2, 4, 1], Sampling(), 9) == [None, None, "stop"]
    ignoring = Sampling(ignore_eos=True)
    assert run(Sampler([4]), [1, 2, 4, 1], ignoring, 4) == [None, None, None, "length"]


def test_stop_string_across_tokens() -> None:
    sampling = Sampling(stop=("bc", "zz"))
    assert run(Sampler([], Letters()), [1, 1, 2, 2], sampling, 9) == [None, None, "stop"]
    assert run(Sampler([], Letters()), [1, 0, 2], sampling, 3) == [None, None, "length"]


PIECES = piece_tokenizer(strip_decoder())


def ids(*pieces: str) -> tuple[int, ...]:
    return tuple(each for piece in pieces for each in ids_of(PIECES, piece))


def tokens_until_stop(
    stop: str, prompt: tuple[int, ...], answer: tuple[int, ...], given: int
) -> int:
    """Tokens after which a request ends that goes on after the first `given` of its answer."""
    request = Request("x", prompt, 99, Sampling(stop=(stop,)), answer[:given])
    sampler = Sampler([], PIECES)
    for number, token in enumerate(answer[given:]):
        one_hot = torch.nn.functional.one_hot(torch.tensor([token]), PIECES.vocab_size).float()
        admitted = [] if number else [Admission.of(0, request)]
        if sampler.sample(batch([0], admitted), one_hot).finish_reasons[0]:
            return given + number + 1
    return 0


@pytest.mark.parametrize(
    ("stop", "prompt", "answer"),
    [
        (" world", ids("<s>", "▁Hello"), ids("▁world", "▁the")),
        (" world", ids("<s>", "▁Hello", "</s>"), ids("▁world", "▁the")),
        (" world", ids("<s>"), ids("▁world", "▁the", "▁world")),
        ("world", ids("<s>"), ids("▁world", "▁the")),
        ("Hello world", ids("<s>", "▁Hello"), ids("▁world", "▁the")),
        (" world the", ids("<s>", "▁Hello"), ids("▁the", "▁world", "▁the")),
        ("文字", ids("<s>", "中"), ids("中" * 9, "文字", "▁the")),
        ("中", ids("<s>", "中")[:-1], ids("中")[-1:] + ids("▁the")),
    ],
)
@pytest.mark.parametrize("given", [0, 1])
def test_stop_strings_as_in_the_text_of_prompt_and_answer(
    stop: str, prompt: tuple[int, ...], answer: tuple[int, ...], given: int
) -> None:
    """The first token after which transformers' text of both has `stop` behind the prompt's whole
    characters; also of a request that is taken up again.
    """

    def text(tokens: tuple[int, ...]) -> str:
        return str(PIECES.decode(tokens, skip_special_tokens=True))

    begin = len(text(prompt).rstrip("\ufffd"))
    found = (n for n in range(1, len(answer) + 1) if stop in text(prompt + answer[:n])[begin:])
    wanted = next((n for n in found if n > given), 0)
    assert tokens_until_stop(stop, prompt, answer, given) == wanted


def test_prompts_are_told_where_stop_strings_follow_them() -> None:
    request = Request("x", tuple(range(99)), 9, Sampling())
    assert Admission.of(0, request).prompt_end == ()
    stopping = replace(request, sampling=Sampling(stop=("a",)))
    assert Admission.of(0, stopping).prompt_end == tuple(range(99 - MOST_BEFORE, 99))


def test_stop_tokens_end_a_request_whatever_is_ignored() -> None:
    stopping = Sampling(stop_token_ids=(2, 9), ignore_eos=True)
    assert run(Sampler([4]), [1, 4, 2], stopping, 9) == [None, None, "stop"]
    assert run(Sampler([4]), [1, 4, 3], stopping, 3) == [None, None, "length"]


PROMPT, EOS, STOP_TOKENS = (1, 2, 3), 4, (7, 11)


def least_tokens(sampling: Sampling, raw: torch.Tensor) -> list[int]:
    """Tokens of one request by transformers' own processor; `raw`: `[steps, vocabulary]`."""
    ends = [EOS, *sampling.stop_token_ids]
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_tokens, ends)
    tokens: list[int] = []
    for step, values in enumerate(raw):
        seen = torch.tensor([[*PROMPT, *tokens]])
        allowed = processor(seen, values[None].clone())
        draw = uniform_draw(sampling.seed, "a", step)
        tokens += choose_tokens(allowed, [sampling], [draw]).tolist()
        if tokens[-1] in ends:
            break
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("least", [0, 1, 4, 12])
@pytest.mark.parametrize("cut", [0, 3])
def test_least_tokens_are_those_of_transformers(temperature: float, least: int, cut: int) -> None:
    """Beside a greedy request in the batch, and from the tokens that there were before a fault."""
    raw = logits(12, seed=least)
    raw[:, [EOS, *STOP_TOKENS]] += torch.tensor([6.0, 5.0, 5.5])
    sampling = Sampling(temperature, min_tokens=least, stop_token_ids=STOP_TOKENS)
    expected = least_tokens(sampling, raw)
    assert len(expected) > least or least == len(raw)
    had = min(cut, len(expected) - 1)
    sampler, tokens = Sampler([EOS]), expected[:had]
    admitted = [Admission(1, "a", 99, sampling, tuple(tokens)), Admission(0, "b", 99, Sampling())]
    reason = None
    for values in raw[had:]:
        sampled = sampler.sample(batch([0, 1], admitted), torch.stack([logits(1)[0], values]))
        tokens.append(int(sampled.token_ids[1]))
        reason, admitted = sampled.finish_reasons[1], []
        if reason is not None:
            break
    assert tokens == expected
    assert reason == ("stop" if tokens[-1] in (EOS, *STOP_TOKENS) else None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_of_ends_alone_stops_no_stage(temperature: float) -> None:
    everything = Sampling(temperature, min_tokens=2, stop_token_ids=range(26))  # type: ignore[arg-type]
    assert run(Sampler([99]), [3, 3, 3], everything, 9) == [None, None, "stop"]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_no_stop_string_counts_that_ends_within_the_least_tokens(
    tokens: list[int], stops: list[str], least: int
) -> None:
    """Against the definition, over texts of one letter a token."""
    text = Letters().decode(tokens)
    ends = (
        end
        for end in range(least + 1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops)
    )
    first = next(ends, None)
    found = run(Sampler([], Letters()), tokens, Sampling(stop=tuple(stops), min_tokens=least), 99)
    assert (len(found) if found[-1] == "stop" else None) == first


def test_a_tokenizer_is_loaded_whatever_the_type_is_called_beside_it(tmp_path: Path) -> None:
    """Transformers refuses `torch.bfloat16` when it loads a tokenizer from there."""
    config = {"model_type": "llama", "torch_dtype": "torch.bfloat16", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocabulary = {chr(ord("a") + number): number for number in range(26)}
    Tokenizer(WordLevel(vocabulary, "a")).save(str(tmp_path / "tokenizer.json"))
    assert run(Sampler([], folder=tmp_path), [1, 2], Sampling(stop=("c",)), 3) == [None, "stop"]


class Panics:
    """A tokenizer whose native code gives up, which is no `Exception`."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        raise BaseException("PanicException")


def test_text_that_cannot_be_made_ends_no_stage() -> None:
    sampling = Sampling(stop=("b",))
    assert run(Sampler([], Panics()), [1, 1, 1], sampling, 3) == [None, None, "length"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_tokens": -1},
        {"stop_token_ids": (3, -1)},
        {"stop_token_ids": (True,)},
        {"stop_token_ids": ("3",)},
        {"stop_token_ids": (10**18,)},
        {"stop_token_ids": range(1025)},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"stop": ("a", "b" * 1001)},
        {"stop": ("a",) * 1001},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 101.0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {3: 100.5}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: True}},
        {"logit_bias": {3: "1"}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {10**18: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {"03": 1.0}},
        {"logit_bias": {"³": 1.0}},
        {"logit_bias": {"9" * 5000: 1.0}},
        {"logit_bias": {1.0: 1.0}},
        {"logit_bias": [3]},
    ],
)
def test_sampling_refuses_values_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_bias_by_text_and_by_number_is_the_same() -> None:
    assert Sampling(logit_bias={"12": -1, "3": 2.5}) == Sampling(logit_bias={3: 2.5, 12: -1.0})
    assert list(Sampling(logit_bias={12: 1.0, 3: 1.0}).logit_bias) == [3, 12]
