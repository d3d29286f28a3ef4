"""Lengths that are expected of requests to the server, one by one."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Sampling
from llmpq.lengths.folder import tokenizer_digest
from llmpq.lengths.predictor import Prompt
from llmpq.lengths.process.predictor_process import PredictorProcess
from llmpq.run.options import RunOptions
from llmpq.serve.engine import GenerationError, GenerationRequest
from llmpq.serve.engines import expected_length
from llmpq.serve.engines.expected_length import OnlineLengths
from tests.llmpq.lengths.learnable import by_prompt_length, expected_by_hand, saved

VOCABULARY = 64


class NoTexts:
    """A tokenizer that has no texts."""

    async def decode(self, token_ids: object) -> str:
        raise GenerationError("no text")


def request(number: int) -> GenerationRequest:
    ids = tuple(range(1 + number % 12))
    return GenerationRequest(f"r{number}", ids, 15 + number, Sampling(), f"r{number}")


def lengths_of(**options: Any) -> OnlineLengths:
    given = RunOptions(policy="s3", **options)
    return OnlineLengths(given, Path("/nowhere"), VOCABULARY, NoTexts())  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A predictor of the ids of a model without a tokenizer."""
    digest = tokenizer_digest(Path("/nowhere"), VOCABULARY)
    return saved(tmp_path / "p", by_prompt_length(digest))


async def expected(lengths: OnlineLengths, count: int) -> list[int]:
    return list(await asyncio.gather(*(lengths.expect(request(n)) for n in range(count))))


def by_hand(number: int) -> int:
    made = request(number)
    return expected_by_hand(Prompt(made.id, made.max_new_tokens, made.prompt_ids))


def test_many_requests_at_once_get_what_the_predictor_says(folder: Path, tmp_path: Path) -> None:
    lengths = lengths_of(predictor=folder, save_predictor=tmp_path / "learnt")
    with closing(lengths):
        assert asyncio.run(expected(lengths, 40)) == [by_hand(n) for n in range(40)]
        lengths.note("r1", 4)
    assert (tmp_path / "learnt" / "predictor.json").is_file()


def test_a_predictor_that_dies_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(lengths_of(predictor=folder)) as lengths:
        source = lengths._source
        assert isinstance(source, PredictorProcess)
        os.kill(source.pid, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            found = asyncio.run(expected(lengths, 9))
    assert found == [request(n).max_new_tokens for n in range(9)]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert "exit code -9" in caplog.text


def test_without_a_predictor_the_longest_is_expected_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), closing(lengths_of()) as lengths:
        assert asyncio.run(expected(lengths, 3)) == [15, 16, 17]
    assert "s3 without a predictor" in caplog.text


def test_no_request_waits_long_for_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_length, "WAIT_S", 0.01)
    with closing(lengths_of(predictor="longest")) as lengths:
        monkeypatch.setattr(lengths._source, "submit", lambda prompts: Future())
        assert asyncio.run(expected(lengths, 2)) == [15, 16]


def test_a_prompt_without_text_is_expected_to_be_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(lengths_of(predictor="longest")) as lengths:
        monkeypatch.setattr(lengths._source, "reads_text", True, raising=False)
        assert asyncio.run(expected(lengths, 2)) == [15, 16]
