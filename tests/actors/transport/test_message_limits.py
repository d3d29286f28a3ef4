"""Sizes that a message states are checked against the plan before memory is taken for them."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.logprobs import MOST_TOP_LOGPROBS, LogprobRows
from actors.messages import (
    Admission,
    MicroBatch,
    Sampled,
    Sampling,
    TokenRange,
)
from actors.sampling_options import MOST_STOPS, STOP_CHARACTERS
from actors.transport import message_format
from actors.transport.message_format import Codec, decode, encode, message_bytes
from actors.transport.message_limits import Limits
from actors.transport.pipelines import GlooPipeline, serve
from llmpq.rows.row import MAX_ID_CHARACTERS
from quant.common.errors import SpecError, StageLostError
from tests.actors.batches import batch_in_ranges
from tests.actors.linking import meet
from tests.actors.transport.made_messages import LIMITS, ROOM, a_batch, a_message

FIELDS = {
    name: place
    for place, name in enumerate(
        ("message", "kind", "requests", "changes", "text", "dtype", "rows", "columns")
    )
}
HUGE = (2**31, 2**62, 2**63, 2**64 - 1)


def with_field(message: Tensor, field: str, value: int) -> Tensor:
    changed = message.clone()
    struct.pack_into("<Q", changed.numpy().data, 8 * FIELDS[field], value)
    return changed


def test_a_planned_message_is_within_the_limits() -> None:
    wanted = Limits(requests=6, rows=36, columns=6, slots=8, max_tokens=16, kv_tokens=128)
    assert wanted == LIMITS
    message = a_message()
    assert message_bytes(message, LIMITS) == len(message)
    found = decode(message, LIMITS)
    assert not isinstance(found, Sampled)
    assert found[1].shape == (6, 6)
    assert found[0].admitted == a_batch().admitted
    assert found[0].moves == a_batch().moves


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", HUGE)
def test_sizes_beyond_the_plan_take_no_memory(
    field: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = with_field(a_message(), field, value)
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(StageLostError, match=r"--transport ray"):
        message_bytes(message, LIMITS)
    with pytest.raises(StageLostError):
        decode(message, LIMITS)
    with pytest.raises(StageLostError):
        decode(message)


@pytest.mark.parametrize(
    ("field", "value"), [*((name, 2**40) for name in ("rows", "columns", "text")), ("changes", 129)]
)
def test_sizes_that_agree_with_each_other_are_held_against_the_plan_too(
    field: str, value: int
) -> None:
    message = with_field(a_message(), field, value)
    prefix = message_format._Prefix(*message_format._PREFIX.unpack_from(message.numpy().data))
    message = with_field(message, "message", prefix.planned_bytes)
    assert message_bytes(message) == prefix.planned_bytes
    with pytest.raises(StageLostError, match=rf"says {value} .*at most \d+ were planned"):
        message_bytes(message, LIMITS)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"slots": [5, 8]}, "none of 8"),
        ({"slots": [5, -1]}, "none of 8"),
        ({"slots": [5, 5]}, "one twice"),
        ({"starts": [0, -1]}, "positions"),
        ({"starts": [0, 14]}, "outside the 16"),
        ({"starts": [0, 2**63 - 1]}, "positions"),
        ({"counts": [3, 0]}, "positions"),
        ({"counts": [3, -(2**63)]}, "positions"),
        ({"counts": [3, 4]}, "6 rows for 7 tokens"),
        ({"begins": [80, -1]}, "outside the 128 token slots"),
        ({"begins": [80, -(2**63)]}, "outside the 128 token slots"),
        ({"begins": [80, 122]}, "outside the 128 token slots"),
        ({"begins": [80, 2**63 - 1]}, "outside the 128 token slots"),
        ({"begins": [80, 76]}, "share token slots"),
        ({"begins": [80, 95]}, "share token slots"),  # with the room of the other
        ({"begins": [81, 32]}, "lie from 81 up to 84 of 128"),
    ],
)
def test_requests_that_there_are_not(changed: dict[str, list[int]], said: str) -> None:
    arrays: Any = {name: np.array(values) for name, values in changed.items()}
    with pytest.raises(StageLostError, match=said):
        decode(a_message(replace(a_batch(), **arrays)), LIMITS)


@pytest.mark.parametrize("value", [-1, 2, 2**40])
def test_requests_of_which_it_is_not_said_whether_they_are_sampled(value: int) -> None:
    message, samples = a_message(), message_format._PREFIX.size + 8 * 2 * 4
    struct.pack_into("<q", message.numpy().data, samples, value)
    with pytest.raises(StageLostError, match="whether requests are sampled"):
        decode(message, LIMITS)


def test_a_micro_batch_without_requests() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    with pytest.raises(StageLostError, match="no requests"):
        decode(a_message(MicroBatch(*[nothing] * 4), rows=0), LIMITS)


@pytest.mark.parametrize("sampled", [[], [1], [0, 1]])
def test_the_last_stage_sends_rows_of_what_is_sampled(sampled: list[int]) -> None:
    """Or their tokens; both come out as they went in, also where there are none."""
    batch = replace(a_batch(), samples=np.isin(np.arange(2), sampled))
    found = decode(a_message(batch, rows=len(sampled)), LIMITS)
    assert not isinstance(found, Sampled)
    assert found[0].sampled_rows.tolist() == sampled
    assert found[1].shape == (len(sampled), 6)
    answer = decode(encode(batch, Sampled(np.array(sampled), (None,) * len(sampled))), LIMITS)
    assert isinstance(answer, Sampled)
    assert answer.token_ids.tolist() == sampled
    with pytest.raises(StageLostError, match="3 rows for 6 tokens"):
        decode(a_message(batch, rows=3), LIMITS)


ADMITTED = asdict(a_batch().admitted[0])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "7",
        "[7]",
        "[{}]",
        "[" * 100_000,
        json.dumps([ADMITTED] * 3),
        json.dumps([ADMITTED] * 2),
        *(
            json.dumps([ADMITTED | changed])
            for changed in (
                {"slot": 8},
                {"slot": 3},
                {"room": None},
                {"room": {"begin": 80.0, "size": 16}},
                {"room": {"begin": 80, "size": -1}},
                {"room": {"begin": 80}},
                {"slot": -1},
                {"slot": True},
                {"slot": "5"},
                {"custom_id": None},
                {"max_new_tokens": 1.5},
                {"generated": "ab"},
                {"generated": 3},
                {"prompt_tokens": [[]]},
                {"prompt_end": ["a"]},
                {"sampling": None},
                {"sampling": {"stop": ["x"], "temperature": "hot"}},
                {"top_logprobs": MOST_TOP_LOGPROBS + 1},
                {"top_logprobs": -1},
                {"top_logprobs": True},
                {"top_logprobs": "3"},
                {"prompt_logprobs": MOST_TOP_LOGPROBS + 1},
                {"prompt_ids": [-1]},
                {"__class__": "x"},
            )
        ),
    ],
)
def test_admissions_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_format.json, "dumps", lambda _: text)
    message = a_message()
    with pytest.raises(StageLostError, match="admits"):
        decode(message, LIMITS)


@pytest.mark.parametrize(("array", "value"), [(0, -1), (1, -1), (1, 4), (1, 2**62)])
def test_answers_that_are_none(array: int, value: int) -> None:
    message = encode(a_batch(), Sampled(np.array([1, 2]), (None, "stop")))
    struct.pack_into("<q", message.numpy().data, message_format._PREFIX.size + 16 * array, value)
    with pytest.raises(StageLostError, match="tokens or reasons"):
        decode(message, LIMITS)


@pytest.mark.parametrize("scored", [(-1, 1), (0, 4)])
def test_scores_of_tokens_that_there_are_not(scored: tuple[int, int]) -> None:
    message = a_message(replace(a_batch(), scored=np.array(scored)))
    with pytest.raises(StageLostError, match="scores tokens that there are not"):
        decode(message, LIMITS)


def with_logprobs(requests: int = 2, columns: int = 1 + MOST_TOP_LOGPROBS) -> Tensor:
    """Tokens, of which the second has log-probabilities, and the first where there is room."""
    rows = np.arange(max(requests - 2, 0), requests)
    values = -np.ones((len(rows), columns), dtype=np.float32)
    ids = np.ones((len(rows), columns - 1), dtype=np.int64)
    asked = LogprobRows(rows, values[:, 0], rows + 1, ids, values[:, 1:])
    return encode(a_batch(), Sampled(np.arange(requests), (None,) * requests, asked))


def test_log_probabilities_are_within_limits_of_their_own() -> None:
    """However narrow the hidden states are; of prompts there are as many as there are tokens."""
    for requests in (1, 2, LIMITS.requests):
        found = decode(with_logprobs(requests), LIMITS)
        assert isinstance(found, Sampled)
        assert found.logprobs is not None
        assert found.logprobs.top.shape == (min(requests, 2), MOST_TOP_LOGPROBS)
    with pytest.raises(StageLostError, match="7 requests, at most 6 were planned"):
        message_bytes(with_logprobs(LIMITS.requests + 1), LIMITS)
    with pytest.raises(StageLostError, match="2 rows of 22 log-probabilities for"):
        message_bytes(with_logprobs(columns=2 + MOST_TOP_LOGPROBS), LIMITS)


@pytest.mark.parametrize(
    ("field", "value"), [("rows", 3 + LIMITS.rows), ("rows", 0), ("columns", 0)]
)
def test_log_probabilities_of_sizes_that_there_are_not(field: str, value: int) -> None:
    message = with_field(with_logprobs(), field, value)
    prefix = message_format._Prefix(*message_format._PREFIX.unpack_from(message.numpy().data))
    message = with_field(message, "message", prefix.planned_bytes)
    with pytest.raises(StageLostError, match=f"log-probabilities for {2 + LIMITS.rows} tokens"):
        message_bytes(message, LIMITS)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, -1, "of tokens that there are not"),
        (0, 1, "of tokens that there are not"),
        (2 + MOST_TOP_LOGPROBS, 2 + LIMITS.rows, "of tokens that there are not"),
        (1, 0, "log-probabilities that are none"),
        (2, -2, "log-probabilities that are none"),
        (5, -(2**63), "log-probabilities that are none"),
    ],
)
def test_log_probabilities_of_what_there_is_not(place: int, value: int, said: str) -> None:
    message = with_logprobs()
    begin = message_format._PREFIX.size + 2 * 2 * 8
    struct.pack_into("<q", message.numpy().data, begin + 8 * place, value)
    with pytest.raises(StageLostError, match=said):
        decode(message, LIMITS)


def test_log_probabilities_that_are_no_numbers() -> None:
    message = with_logprobs()
    struct.pack_into("<f", message.numpy().data, len(message) - 4, float("nan"))
    with pytest.raises(StageLostError, match="log-probabilities that are none"):
        decode(message, LIMITS)


@pytest.mark.parametrize("length", [64, 100])
def test_a_message_that_ends_too_early(length: int) -> None:
    with pytest.raises(StageLostError):
        decode(a_message()[:length], LIMITS)


class Echo:
    """A stage that gives back what it gets."""

    def compute(self, batch: MicroBatch, inputs: Tensor) -> Tensor:
        return torch.ones(len(inputs), 6)

    def finish(self, batch: MicroBatch, last_hidden: Tensor) -> Sampled:
        raise AssertionError("nothing to sample")

    def sent(self) -> None: ...


def test_a_stage_refuses_what_no_stage_before_it_sends() -> None:
    """By the links themselves: without taking the memory, and by rows that do not fit."""
    for hostile, said in (
        (with_field(a_message(), "message", 2**62), r"says 4611686018427387904 bytes"),
        (with_field(a_message(), "rows", 2**40), "have a place"),
        (a_message(rows=2), "2 rows for 6 tokens"),
        (encode(a_batch(), Sampled(np.array([1, 2]), (None, None))), "sampled"),
    ):
        first, second = meet(2)
        first.sender(1).send(hostile)
        with pytest.raises(StageLostError, match=said):
            serve(Echo(), second, Codec(LIMITS))


def test_the_first_stage_refuses_answers_to_what_it_has_not_asked() -> None:
    for answer in (
        encode(a_batch(), torch.ones(6, 6)),
        encode(a_batch(), Sampled(np.array([1]), (None,))),
    ):
        first, second = meet(2)
        pipeline = GlooPipeline(Echo(), first, Codec(LIMITS))
        asked = pipeline.submit(a_batch(), np.arange(6))
        second.sender(0).send(answer)
        with pytest.raises(StageLostError, match=r"answered with \d rows, asked were 2"):
            pipeline.result(asked)


def test_the_most_that_a_request_may_ask_for_is_within_the_limits() -> None:
    """Every token of a large vocabulary in its prompt and biased, ids and stop strings in
    characters that JSON spells with twelve; what is longer is no sampling.
    """
    vocabulary = range(256_000)
    stop = ("\U0001f600" * STOP_CHARACTERS,) * MOST_STOPS
    bias = {token: -99.12345678901234 for token in vocabulary}
    sampling = Sampling(repetition_penalty=1.5, stop=stop, logit_bias=bias)
    name = "\U0001f600" * MAX_ID_CHARACTERS
    room = TokenRange(0, ROOM)
    asked = Admission(0, name, 9, sampling, tuple(range(128_000)), tuple(vocabulary), room)
    batch = batch_in_ranges([0], [0], [3], [asked])
    found = decode(encode(batch, torch.ones(3, 6)), replace(LIMITS, requests=1))
    assert not isinstance(found, Sampled)
    assert found[0].admitted == (asked,)
    with pytest.raises(SpecError, match=r"stop .{,200} at most 64 texts of 1 to 1000"):
        replace(sampling, stop=(*stop, "x"))
