"""Log-probabilities against transformers' own logits: from the sampler, and through pipelines of
one and two stages over both kinds of links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from actors.logprobs import NO_TOKEN, LogprobRows, TokenLogprobs
from actors.messages import Admission, Request, Sampling, TokenIds
from actors.schedule.driver import Pipeline, PipelineDriver
from actors.schedule.live_run import Inbox, LiveRun
from actors.schedule.table import make_scheduler
from actors.stage.log_probabilities import logprob_rows, most_probable
from actors.stage.sampler import Sampler
from actors.stage.stage import Stage
from actors.transport import pipelines
from actors.transport.message_format import Codec
from actors.transport.pipelines import GlooPipeline, RayPipeline, serve
from quant.common.errors import StageLostError
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, VOCABULARY
from tests.actors.linking import meet
from tests.actors.models import random_prompts, save_tiny, stages_of
from tests.actors.schedule.token_pipeline import sizes_of
from tests.actors.stage.test_mixed_batches import Computing, PretendRay, Relaying

LENGTHS = (5, 11, 1, 8, 17, 2, 11, 3)
NEW_TOKENS = 7
LONGEST = max(LENGTHS) + NEW_TOKENS
BATCH = 3
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.4, seed=3),
    Sampling(repetition_penalty=3.0, logit_bias={7: 5.0}),
    Sampling(temperature=0.8, top_k=3, frequency_penalty=1.0),
)
ASKED = (0, 4, 20, None, 1, 20, None, 5)
REQUESTS = [
    Request(str(i), prompt, NEW_TOKENS, SAMPLINGS[i % len(SAMPLINGS)], top_logprobs=ASKED[i])
    for i, prompt in enumerate(random_prompts(LENGTHS))
]
CODEC = Codec(sizes_of(2, BATCH, 2 * BATCH * LONGEST).limits(LONGEST, 2 * BATCH * LONGEST, 64))

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


def live_answers(pipeline: Pipeline, requests: Sequence[Request]) -> Answers:
    """Tokens and log-probabilities that a live run tells of; prompts come in parts."""
    kv_tokens = BATCH * pipeline.stages * LONGEST
    sizes = sizes_of(pipeline.stages, BATCH, kv_tokens, chunk=4)
    driver = PipelineDriver(make_scheduler(sizes, pipeline.stages), pipeline)
    inbox = Inbox(1)
    inbox.put(requests)
    inbox.close()
    found: Answers = defaultdict(lambda: ([], []))
    for told in LiveRun(driver, inbox, LONGEST).events():
        for each in told:
            tokens, logprobs = found[each.custom_id]
            tokens += each.token_ids
            logprobs += each.logprobs
    return found


@contextmanager
def pipeline_of(stages: Sequence[Stage], over: str) -> Iterator[Pipeline]:
    if over == "ray":
        yield RayPipeline(Computing(stages[0]), [Relaying(s, CODEC) for s in stages[1:]], CODEC)
        return
    here, there = meet(2)

    def serve_second() -> None:
        with pytest.raises(StageLostError, match="broke the run off"):
            serve(Computing(stages[1]), there, CODEC)

    serving = Thread(target=serve_second)
    serving.start()
    try:
        yield GlooPipeline(Computing(stages[0]), here, CODEC)
    finally:
        here.stop()
        serving.join()


def assert_are_of_the_model(model: Any, answers: Answers, tolerance: float) -> None:
    """By the logits that transformers' model has after each token."""
    for request in REQUESTS:
        tokens, logprobs = answers[request.custom_id]
        assert tokens
        if request.top_logprobs is None:
            assert not logprobs
            continue
        text = torch.tensor([request.prompt_ids + tuple(tokens)])
        with torch.inference_mode():
            logits = model(text).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        for token, told, row in zip(tokens, logprobs, expected, strict=True):
            assert told.logprob == pytest.approx(row[token].item(), abs=tolerance)
            assert_are_best(told, row, request.top_logprobs, tolerance)
            if request.sampling == Sampling() and told.top:
                assert told.top[0] == (token, told.logprob)
            assert dict(told.top).get(token, told.logprob) == told.logprob


def assert_are_best(told: TokenLogprobs, row: torch.Tensor, most: int, tolerance: float) -> None:
    ids, values = [token for token, _ in told.top], [value for _, value in told.top]
    assert len(set(ids)) == most
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(row[ids].tolist(), abs=tolerance)
    assert values == pytest.approx(row.topk(most).values.tolist(), abs=tolerance)


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.rare) for n in ("opt", "bloom", "granite"))],
)
def test_they_are_those_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "ray", PretendRay)
    model = save_tiny(tmp_path, EVERY_CONFIG[name])
    for bounds, head_on_first, over in (
        ((0, LAYERS), False, "ray"),
        ((0, 2, LAYERS), False, "ray"),
        ((0, 2, LAYERS), False, "gloo"),
        ((0, 2, LAYERS), True, "gloo"),
    ):
        stages = stages_of(tmp_path, bounds, 2 * BATCH, LONGEST, head_on_first=head_on_first)
        with pipeline_of(stages, over) as pipeline:
            answers = live_answers(pipeline, REQUESTS)
        assert_are_of_the_model(model, answers, 2e-5)


def test_they_are_those_of_a_model_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits have 8 bits, so that some are equal and all are rounded."""
    monkeypatch.setattr(pipelines, "ray", PretendRay)
    model = save_tiny(tmp_path, CONFIGS["llama"])
    stages = stages_of(tmp_path, (0, 2, LAYERS), 2 * BATCH, LONGEST, dtype="bfloat16")
    with pipeline_of(stages, "ray") as pipeline:
        answers = live_answers(pipeline, REQUESTS)
    assert_are_of_the_model(model.bfloat16(), answers, 0.06)


def test_asking_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ray", PretendRay)
    save_tiny(tmp_path, CONFIGS["llama"])
    stages = stages_of(tmp_path, (0, LAYERS), 2 * BATCH, LONGEST)
    plain = [Request(r.custom_id, r.prompt_ids, r.max_new_tokens, r.sampling) for r in REQUESTS]
    with pipeline_of(stages, "ray") as pipeline:
        asking, silent = live_answers(pipeline, REQUESTS), live_answers(pipeline, plain)
    assert {name: tokens for name, (tokens, _) in asking.items()} == {
        name: tokens for name, (tokens, _) in silent.items()
    }
    assert not any(logprobs for _, logprobs in silent.values())


def rows_of(logits: torch.Tensor, tokens: TokenIds, wanted: list[int | None]) -> LogprobRows | None:
    found = most_probable(logits, torch.from_numpy(tokens), wanted)
    return logprob_rows(tokens, wanted, *(each.numpy() for each in found)) if found else None


def test_rows_that_do_not_ask_are_not_looked_at() -> None:
    logits = torch.randn(4, VOCABULARY)
    logits[[0, 2]] = torch.nan
    tokens = np.array([5, 6, 7, 8])
    assert rows_of(logits, tokens, [None] * 4) is None
    found = rows_of(logits, tokens, [None, 2, None, 0])
    assert found is not None
    assert found.rows.tolist() == [1, 3]
    assert found.top_ids[1].tolist() == [NO_TOKEN] * 2
    by_row = found.by_row()
    expected = logits.double().log_softmax(-1)
    assert by_row[3].logprob == pytest.approx(expected[3, 8].item(), abs=1e-6)
    assert by_row[3].top == ()
    assert [token for token, _ in by_row[1].top] == logits[1].topk(2).indices.tolist()


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_of_equal_tokens_the_chosen_one_is_first(most: int) -> None:
    """Also where it is not among those that `topk` happens to find."""
    logits = torch.zeros(1, 60)
    logits[0, 50:] = 3.0
    for token in (50, 54, 59):
        found = rows_of(logits, np.array([token]), [most])
        assert found is not None
        ids = found.top_ids[0].tolist()
        assert ids[0] == token
        assert len(set(ids)) == most
        assert ids[1:] == sorted(ids[1:])
        assert min(ids) >= 50
        assert set(found.top[0].tolist()) == {found.chosen[0]}


def test_small_vocabularies_and_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    admission = Admission(0, "a", 9, Sampling(logit_bias={0: 50.0}), top_logprobs=20)
    sampled = Sampler([]).sample(batch_in_ranges([0], [0], [4], [admission]), logits)
    assert sampled.token_ids.tolist() == [0]
    assert sampled.logprobs is not None
    told = sampled.logprobs.by_row()[0]
    assert told.logprob == pytest.approx(-np.log1p(np.e))
    assert [token for token, _ in told.top] == [2, 0, 1]
    assert told.top[2][1] == -np.inf
