"""Stages under `s3-published` and `s3` with predictions that are wrong in every way: tokens are
those of `generate`, and of runs that nothing disturbs, whichever way preempted requests come back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import MistralConfig

from actors.logprobs import TokenLogprobs
from actors.messages import (
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.schedule.driver import PipelineDriver
from actors.schedule.live_run import Inbox, LiveRun, Mail
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from actors.stage.stage import Stage
from actors.stage_figures import Supervision
from planner.schedule import peak
from planner.scheduling import PolicyName
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, LATENT_CONFIGS, LAYERS, STATE_CONFIGS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of, stages_of
from tests.actors.thread_ranks import divided

LENGTHS = (5, 11, 1, 8, 17, 2, 11, 3, 6, 9, 4, 7)
NEW_TOKENS = 16
LONGEST = max(LENGTHS) + NEW_TOKENS
KV_TOKENS = 2 * LONGEST
MOST_IN_BATCH = 6
PROMPTS = random_prompts(LENGTHS)
SAMPLING = [
    Sampling(ignore_eos=True),
    Sampling(temperature=0.9, seed=3, ignore_eos=True),
    Sampling(temperature=1.2, top_p=0.8, seed=4, presence_penalty=0.5, ignore_eos=True),
    Sampling(repetition_penalty=1.7, frequency_penalty=0.2, ignore_eos=True),
    Sampling(temperature=1.1, seed=5, min_tokens=6, stop_token_ids=tuple(range(0, 190, 2))),
]
GUESSES: dict[str, Callable[[int], int | None]] = {
    "far too short": lambda i: 1,
    "none, or less": lambda i: -i,
    "far too long": lambda i: 1000,
    "random": lambda i: int(np.random.default_rng(i).integers(0, NEW_TOKENS)),
    "right": lambda i: NEW_TOKENS,
}
UNDISTURBED = ("far too long", "right")
"""Guesses by which nothing is preempted, so that no request comes back in any way."""

RARE = pytest.mark.rare
COMPUTED, PARKED, BOTH = (0, 0), (1, 10**6), (12, 30)
"""From how many tokens requests are parked, and how many tokens in all."""

USUAL = [("far too short", way) for way in (COMPUTED, PARKED, BOTH)]
USUAL += [(guess, BOTH) for guess in ("none, or less", "random", "right")]

Tiny = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of each family, and what `generate` adds to the prompts."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        config = (CONFIGS | STATE_CONFIGS | LATENT_CONFIGS)[name]
        if name == "mistral-sliding":  # small enough for rooms
            config = MistralConfig(**config.to_dict() | {"sliding_window": 2})
        model = save_tiny(folder, config)
        tokens = references(model, PROMPTS, NEW_TOKENS, ignore_eos=True)
        return folder, tokens

    return made


class CheckedPipeline(LocalPipeline):
    """Stages whose numbers outside of all ranges that were told of become NaN before each step."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.each = stages
        self.most_parked = 0

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        for stage in self.each:
            rooms = stage._cache._rooms
            free = np.ones(KV_TOKENS, dtype=np.bool_)
            for begin, size in zip(rooms._begins, rooms._sizes, strict=True):
                free[begin : begin + size] = False
            for stored in stage._cache._in_ranges():
                if stored.scales is None:
                    stored.numbers[:, torch.from_numpy(free)] = torch.nan
            states = stage._cache.states
            for slot in np.flatnonzero(rooms._sizes == 0) if states is not None else ():
                for state in states.of_slot(slot):
                    state.fill_(torch.nan)
        result = super().submit(batch, token_ids)
        self.most_parked = max(self.most_parked, *(s._cache.parked.tokens for s in self.each))
        return result


def stages_for(folder: Path, stages: int, kv_bits: int = 16) -> list[Stage]:
    bounds = (0, LAYERS) if stages == 1 else (0, 2, LAYERS)
    options = {"kv_bits": kv_bits, "parked_tokens": 10**6, "kv_tokens": KV_TOKENS}
    specs = specs_of(bounds, stages * MOST_IN_BATCH, LONGEST, **options)
    return [Stage(spec, folder, torch.device("cpu"), Processor()) for spec in specs]


def sizes_for(
    stages: int, way: tuple[int, int], chunk: int = 0, policy: PolicyName = "s3-published"
) -> QueueSizes:
    return QueueSizes(
        stages * MOST_IN_BATCH,
        1,
        MOST_IN_BATCH,
        LONGEST,
        policy,
        kv_tokens=KV_TOKENS,
        max_batch_size=MOST_IN_BATCH,
        prefill_chunk_tokens=chunk,
        park_tokens_from=way[0],
        parked_tokens=way[1],
    )


def requests_for(guess: str, sampling: Sequence[Sampling] = SAMPLING[:1]) -> list[Request]:
    return [
        Request(
            str(i),
            prompt,
            NEW_TOKENS,
            sampling[i % len(sampling)],
            expected_tokens=GUESSES[guess](i),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def run(
    stages: Sequence[Stage], sizes: QueueSizes, requests: Sequence[Request]
) -> tuple[list[list[int]], Supervision]:
    scheduler = make_scheduler(sizes, len(stages))
    assert isinstance(scheduler, S3Scheduler)
    scheduler.add(requests)
    pipeline = CheckedPipeline(stages)
    found = {
        each.custom_id: list(each.token_ids) for some in drive(scheduler, pipeline) for each in some
    }
    assert all(stage._cache.parked.tokens == 0 for stage in stages)
    assert pipeline.most_parked <= sizes.parked_tokens
    return [found[each.custom_id] for each in requests], scheduler.supervision


def check_ways(counts: Supervision, guess: str, way: tuple[int, int]) -> None:
    """Predictions that are too short are met by what the case wants to try."""
    if guess in UNDISTURBED:
        assert counts == Supervision()
        return
    assert counts.grown
    assert counts.parked + counts.recomputed
    if way != BOTH or guess != "random":
        assert bool(counts.parked) == (way != COMPUTED)
        assert bool(counts.recomputed) == (way != PARKED)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=RARE), 2])
@pytest.mark.parametrize(
    ("guess", "way"),
    [
        case if case in USUAL else pytest.param(*case, marks=RARE)
        for case in product(GUESSES, (COMPUTED, PARKED, BOTH))
    ],
)
def test_tokens_are_those_of_generate(
    guess: str, way: tuple[int, int], stages: int, tiny: Tiny
) -> None:
    folder, expected = tiny("llama")
    sizes = sizes_for(stages, way, chunk=4 if stages == 2 else 0)
    tokens, counts = run(stages_for(folder, stages), sizes, requests_for(guess))
    assert tokens == expected
    check_ways(counts, guess, way)


@pytest.mark.parametrize("way", [COMPUTED, PARKED])
@pytest.mark.parametrize("guess", ["far too short", pytest.param("random", marks=RARE), "right"])
def test_ranges_that_grow_lose_no_token(
    guess: str, way: tuple[int, int], tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `s3` all ranges grow, so that they move; too little is expected of a few then."""
    monkeypatch.setattr(peak, "GROWTH", 3)
    folder, expected = tiny("llama")
    sizes = sizes_for(2, way, 4, "s3")
    tokens, counts = run(stages_for(folder, 2), sizes, requests_for(guess))
    assert tokens == expected
    assert counts.grown > len(PROMPTS)
    assert bool(counts.parked + counts.recomputed) == (guess != "right")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("bloom", COMPUTED), ("mistral-sliding", PARKED), ("deepseek_v3", PARKED)),
        *(("qwen3_next", way) for way in (COMPUTED, PARKED)),
        *(pytest.param(n, COMPUTED, marks=RARE) for n in ("mistral-sliding", "deepseek_v3")),
        *(pytest.param(n, PARKED, marks=RARE) for n in ("bloom", "qwen3_5")),
        pytest.param("qwen3_5", COMPUTED, marks=RARE),
    ],
)
def test_families_of_other_positions_and_states(
    name: str, way: tuple[int, int], tiny: Tiny
) -> None:
    folder, expected = tiny(name)
    stages = stages_for(folder, 2)
    assert [bool(stage._cache._windows) for stage in stages] == [name == "mistral-sliding"] * 2
    tokens, counts = run(stages, sizes_for(2, way, chunk=3), requests_for("far too short"))
    assert tokens == expected
    check_ways(counts, "far too short", way)


@RARE
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "deepseek_v3", "qwen3_next"])
def test_ranks_park_what_they_hold_of_each_request(name: str, tiny: Tiny) -> None:
    folder, expected = tiny(name)
    options = {"parked_tokens": 10**6, "kv_tokens": KV_TOKENS}
    specs = specs_of((0, 2, LAYERS), 2 * MOST_IN_BATCH, LONGEST, **options)
    with divided(specs, (2, 2), folder) as stages:
        tokens, counts = run(stages, sizes_for(2, PARKED, 3), requests_for("far too short"))
    assert tokens == expected
    assert counts.parked


@pytest.mark.parametrize(
    ("name", "kv_bits", "way"),
    [
        case if case[2] == BOTH else pytest.param(*case, marks=RARE)
        for case in product(["llama"], [16, 8], [COMPUTED, PARKED, BOTH])
    ]
    + [pytest.param("deepseek_v3", 8, way, marks=RARE) for way in (COMPUTED, PARKED, BOTH)],
)
def test_draws_and_penalties_are_those_of_undisturbed_runs(
    name: str, kv_bits: int, way: tuple[int, int], tiny: Tiny
) -> None:
    folder, _ = tiny(name)
    sampling = [SAMPLING[i % len(SAMPLING)] for i in range(len(PROMPTS))]
    undisturbed = stages_of(folder, (0, 2, LAYERS), 12, LONGEST, kv_bits=kv_bits)
    expected = generate(undisturbed, PROMPTS, NEW_TOKENS, 2, 6, sampling)
    stages = stages_for(folder, 2, kv_bits)
    tokens, counts = run(stages, sizes_for(2, way, 4), requests_for("random", SAMPLING))
    assert tokens == expected
    check_ways(counts, "random", way)


class CancellingInbox(Inbox):
    """Requests come by chance, and some are cancelled whatever their state."""

    def __init__(self, requests: Sequence[Request], cancelled: set[str]) -> None:
        super().__init__(1)
        self._random, self._coming = Random(5), deque(requests)
        self._left = set(cancelled)
        self.told = 0

    def take(self, wait: bool) -> Mail:
        while self._coming and (wait or self._random.random() < 0.5):
            self.put([self._coming.popleft()])
            wait = False
        if not self._coming:
            for name in sorted(self._left) if self.told > 60 else ():
                self._left.discard(name)
                self.cancel([name])
            self.close()
        return super().take(wait)


@pytest.mark.parametrize("way", [COMPUTED, PARKED])
def test_a_live_run_tells_every_token_once(way: tuple[int, int], tiny: Tiny) -> None:
    """With their log-probabilities, to which a preemption makes no difference either."""
    folder, expected = tiny("llama")
    requests = [replace(r, top_logprobs=2) for r in requests_for("far too short")]
    stages, cancelled = stages_for(folder, 2), {"1", "4", "7", "8"}

    def live(sizes: QueueSizes, some: Sequence[Request], given_up: set[str]) -> Told:
        scheduler = S3Scheduler(sizes, 2)
        driver = PipelineDriver(scheduler, LocalPipeline(stages))
        inbox = CancellingInbox(some, given_up)
        tokens: dict[str, list[int]] = defaultdict(list)
        logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        for told in LiveRun(driver, inbox, LONGEST).events():
            for each in told:
                inbox.told += 1
                tokens[each.custom_id] += each.token_ids
                logprobs[each.custom_id] += each.logprobs
        assert scheduler.waiting == scheduler.in_slots == scheduler.supervision.parked_now == 0
        counts = scheduler.supervision
        assert bool(counts.parked + counts.recomputed) == bool(given_up)
        return tokens, logprobs

    tokens, logprobs = live(sizes_for(2, way, 4), requests, cancelled)
    right = [replace(each, expected_tokens=None) for each in requests]
    _, undisturbed = live(sizes_for(2, COMPUTED, 4), right, set())
    for i, all_tokens in enumerate(expected):
        found = tokens[str(i)]
        assert found == all_tokens[: len(found)]
        assert str(i) in cancelled or found == all_tokens
        for one, other in zip(logprobs[str(i)], undisturbed[str(i)], strict=False):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert any(len(tokens[name]) < NEW_TOKENS for name in cancelled)
    # What an earlier run left is dropped by the first micro-batch of the next one.
    run(stages, sizes_for(2, PARKED), requests_for("right"))


Told = tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]
