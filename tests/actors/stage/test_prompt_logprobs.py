"""Log-probabilities of the tokens of prompts against transformers' own logits: each is told once,
whole prompts and parts of them, under every policy, with heads that others share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.logprobs import LogprobRows
from actors.messages import (
    Admission,
    Progress,
    Request,
    Sampling,
)
from actors.schedule.driver import Pipeline, PipelineDriver
from actors.schedule.heads import PromptHeads
from actors.schedule.live_run import Inbox, LiveRun
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from actors.stage import log_probabilities
from actors.stage.sampler import Sampler
from actors.stage.stage import Stage
from actors.transport import pipelines
from quant.scheme import Processor
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, VOCABULARY
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, save_tiny, specs_of, stages_of
from tests.actors.schedule.token_pipeline import sizes_of
from tests.actors.stage.test_logprobs import BATCH, LONGEST, REQUESTS, pipeline_of
from tests.actors.stage.test_mixed_batches import PretendRay
from tests.actors.stage.test_prompt_heads import KV_TOKENS, PROMPTS, SIZES, SLOTS
from tests.actors.thread_ranks import divided

TOLERANCE = 2e-5
ASKED = (0, None, 20, 1, 3, None, 2, 5)
SCORED = [replace(r, prompt_logprobs=ASKED[i]) for i, r in enumerate(REQUESTS)]


def told_of(
    pipeline: Pipeline,
    sizes: QueueSizes,
    requests: Sequence[Request],
    told_every: int = 1,
    heads: PromptHeads | None = None,
) -> dict[str, list[Progress]]:
    driver = PipelineDriver(make_scheduler(sizes, pipeline.stages), pipeline, heads=heads)
    inbox = Inbox(1)
    inbox.put(requests)
    inbox.close()
    found: dict[str, list[Progress]] = {each.custom_id: [] for each in requests}
    for told in LiveRun(driver, inbox, sizes.slot_tokens, told_every).events():
        for each in told:
            found[each.custom_id].append(each)
    return found


def assert_scored(
    model: Any, requests: Sequence[Request], found: dict[str, list[Progress]]
) -> None:
    """By the logits that transformers' model has before each token of a prompt."""
    for request in requests:
        told = [each.prompt_logprobs for each in found[request.custom_id]]
        assert told[1:] == [None] * len(told[1:])
        if request.prompt_logprobs is None or len(request.prompt_ids) == 1:
            assert told[0] is None
            continue
        scores = told[0]
        assert isinstance(scores, LogprobRows)
        assert scores.rows.tolist() == list(range(1, len(request.prompt_ids)))
        expected = logprobs_by(model, request.prompt_ids)
        for token, row, one in zip(
            request.prompt_ids[1:], expected, scores.by_row().values(), strict=True
        ):
            assert one.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
            assert one.rank == 1 + int((row > row[token]).sum())
            values = [value for _, value in one.top]
            assert values == pytest.approx([row[i].item() for i, _ in one.top], abs=TOLERANCE)
            best = row.topk(request.prompt_logprobs).values.tolist()
            assert values == pytest.approx(best, abs=TOLERANCE)


def logprobs_by(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0, :-1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", pytest.param("opt", marks=pytest.mark.rare), "granite"])
def test_they_are_those_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside answers' own; prompts come in parts of four, of which the head computes five rows."""
    monkeypatch.setattr(pipelines, "ray", PretendRay)
    monkeypatch.setattr(log_probabilities, "LOGITS_AT_ONCE", 5 * VOCABULARY)
    model = save_tiny(tmp_path, EVERY_CONFIG[name])
    for bounds, head_on_first, over, chunk in (
        ((0, LAYERS), False, "ray", 4),
        ((0, 2, LAYERS), False, "gloo", 1),
        ((0, 2, LAYERS), True, "gloo", 4),
        ((0, 2, LAYERS), True, "ray", 0),
    ):
        stages = stages_of(tmp_path, bounds, 2 * BATCH, LONGEST, head_on_first=head_on_first)
        sizes = sizes_of(len(stages), BATCH, BATCH * len(stages) * LONGEST, chunk)
        with pipeline_of(stages, over) as pipeline:
            found = told_of(pipeline, replace(sizes, slot_tokens=LONGEST), SCORED)
        assert_scored(model, SCORED, found)
        for request in SCORED:
            told = found[request.custom_id]
            tokens = 0 if request.top_logprobs is None else sum(len(e.token_ids) for e in told)
            assert sum(len(each.logprobs) for each in told) == tokens


Tiny = tuple[Path, Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_tiny(folder, CONFIGS["llama"])


def asking(policy: str) -> list[Request]:
    """Every third request asks, of prompts that begin as those of its neighbours."""
    new, expected = (1 if policy == "prefill" else 6), 1 if policy == "s3" else None
    return [
        Request(
            str(i),
            prompt,
            new,
            Sampling(ignore_eos=True),
            expected_tokens=expected,
            prompt_logprobs=None if i % 3 else i % 4,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("told_every", [0, 1])
@pytest.mark.parametrize("policy", SIZES)
def test_neighbours_share_heads(policy: str, told_every: int, tiny: Tiny) -> None:
    folder, model = tiny
    requests, heads = asking(policy), PromptHeads(KV_TOKENS)
    stages = stages_of(folder, (0, 2, LAYERS), SLOTS, 128, parked_tokens=2 * KV_TOKENS)
    found = told_of(LocalPipeline(stages), SIZES[policy], requests, told_every, heads)
    assert_scored(model, requests, found)
    assert heads.counts.shared_tokens
    alone = [replace(each, prompt_logprobs=None) for each in requests]
    plain = told_of(LocalPipeline(stages), SIZES[policy], alone, told_every, PromptHeads(KV_TOKENS))
    tokens = {name: [t for e in told for t in e.token_ids] for name, told in found.items()}
    assert tokens == {name: [t for e in told for t in e.token_ids] for name, told in plain.items()}


def test_what_was_told_before_a_fault_is_not_told_again(tiny: Tiny) -> None:
    folder, _ = tiny
    requests = [replace(each, generated=(5,)) for each in asking("orca")]
    stages = stages_of(folder, (0, 2, LAYERS), SLOTS, 128)
    found = told_of(LocalPipeline(stages), SIZES["orca"], requests)
    assert {each.prompt_logprobs for told in found.values() for each in told} == {None}


def test_ranks_gather_what_each_computes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tiny
    monkeypatch.setattr(log_probabilities, "LOGITS_AT_ONCE", 50 * VOCABULARY)
    requests = asking("orca")
    with divided(specs_of((0, 2, LAYERS), SLOTS, 128), (1, 2), folder) as stages:
        found = told_of(LocalPipeline(stages), SIZES["orca"], requests)
    assert_scored(model, requests, found)


@cache
def prompts_alone() -> tuple[Request, ...]:
    return tuple(
        Request(str(i), prompt, 1, Sampling(), prompt_logprobs=2)
        for i, prompt in enumerate(random_prompts((40, 3, 17, 33)))
    )


def test_deterministic_stages_tell_the_same_in_any_company(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    specs = specs_of((0, LAYERS), SLOTS, 128, deterministic=True)
    stages = [Stage(each, tmp_path, torch.device("cpu"), Processor()) for each in specs]

    def rows(requests: Sequence[Request], policy: str) -> dict[str, list[float]]:
        found = told_of(LocalPipeline(stages), SIZES[policy], requests)
        return {
            name: told[0].prompt_logprobs.chosen.tolist()
            for name, told in found.items()
            if told[0].prompt_logprobs is not None
        }

    together = rows(prompts_alone(), "orca")
    for each in prompts_alone():
        assert rows([each], "static")[each.custom_id] == together[each.custom_id]


def test_a_prompt_whose_logits_are_not_finite_ends_in_an_error() -> None:
    """Also where those of the last token are; what is in the same micro-batch goes on."""
    admitted = [
        Admission(slot, str(slot), 9, Sampling(), prompt_ids=(3, 4, 5), prompt_logprobs=1)
        for slot in range(2)
    ]
    batch = replace(batch_in_ranges([0, 1], [0, 0], [3, 3], admitted), scored=np.array([2, 2]))
    scored = torch.randn(4, 9)
    scored[1, 3] = torch.inf
    sampled = Sampler([]).sample(batch, torch.randn(2, 9), [scored[:3], scored[3:]])
    assert sampled.finish_reasons == ("error", None)
    assert sampled.logprobs is not None
    assert sampled.logprobs.rows.tolist() == [2, 3, 4, 5]
    expected = scored.double().log_softmax(-1)
    assert sampled.logprobs.chosen[2] == pytest.approx(expected[2, 4].item(), abs=1e-6)
    assert np.isfinite(sampled.logprobs.chosen).all()
