"""Stages under the policy `exegpt`: tokens are those of `generate`, whoever ends early, comes late,
is cancelled, or is replayed.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from actors.messages import Request, Sampling
from actors.schedule.driver import PipelineDriver
from actors.schedule.exegpt import RraScheduler
from actors.schedule.live_run import Inbox, LiveRun, Mail
from actors.schedule.scheduler import QueueSizes
from actors.stage.stage import Stage
from planner.schedule.passes import TurnSizes
from planner.scheduling import RequestSchedule
from quant.scheme import Processor
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, references, save_tiny, specs_of, stages_of
from tests.actors.schedule.exegpt_cases import queue_sizes_of

LENGTHS = (5, 11, 1, 8, 17, 2, 11, 3, 6, 9, 4, 7) * 2
NEW_TOKENS = 14
LONGEST = max(LENGTHS) + NEW_TOKENS
SLOTS = 4
PROMPTS = random_prompts(LENGTHS)
LIMITS = [1 + 5 * i % NEW_TOKENS for i in range(len(PROMPTS))]
ENDS = list(range(2, 199, 11))
"""End-of-text tokens: so many that answers end early."""

RARE = pytest.mark.rare
SPLITS = (0, LAYERS), (0, 2, LAYERS), (0, 2, 3, LAYERS)
SCHEDULES = {
    "one group": RequestSchedule("rra", 3, 8, 3, 1, 2, 7.0),
    "two groups": RequestSchedule("rra", 5, 12, 2, 2, 3, 7.0, 0.3),
    "three groups": RequestSchedule("rra", 2, 6, 5, 3, 1, 7.0),
}

Tiny = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of each family whose answers end early, and what `generate` adds to prompts."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        config = copy.deepcopy(CONFIGS[name])
        config.eos_token_id = ENDS
        model = save_tiny(folder, config)
        tokens = references(model, PROMPTS, LIMITS, eos_token_id=ENDS)
        early = [len(each) < limit for each, limit in zip(tokens, LIMITS, strict=True)]
        assert any(early)
        assert not all(early)
        return folder, tokens

    return made


def sizes_for(schedule: RequestSchedule) -> QueueSizes:
    """Of memory for four of the longest."""
    return queue_sizes_of(TurnSizes.of(schedule, SLOTS * LONGEST - 5), SLOTS * LONGEST)


def requests() -> list[Request]:
    rows = enumerate(zip(PROMPTS, LIMITS, strict=True))
    return [Request(str(i), *row, Sampling()) for i, row in rows]


def run(stages: Sequence[Stage], schedule: RequestSchedule) -> list[list[int]]:
    scheduler = RraScheduler(sizes_for(schedule), len(stages))
    scheduler.add(requests())
    found = {
        each.custom_id: list(each.token_ids)
        for some in drive(scheduler, LocalPipeline(stages))
        for each in some
    }
    return [found[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        each if each[0] == "two groups" or each[1] == SPLITS[2] else pytest.param(*each, marks=RARE)
        for each in product(SCHEDULES, SPLITS)
    ],
)
def test_tokens_are_those_of_generate(name: str, bounds: tuple[int, ...], tiny: Tiny) -> None:
    folder, expected = tiny("llama")
    stages = stages_of(folder, bounds, SLOTS, LONGEST)
    assert run(stages, SCHEDULES[name]) == expected


@pytest.mark.parametrize("family", ["bloom", "mistral-sliding", pytest.param("opt", marks=RARE)])
def test_families_of_other_positions_and_masks(family: str, tiny: Tiny) -> None:
    folder, expected = tiny(family)
    specs = specs_of(SPLITS[1], len(PROMPTS), LONGEST, kv_tokens=SLOTS * LONGEST)
    stages = [Stage(each, folder, torch.device("cpu"), Processor()) for each in specs]
    assert run(stages, SCHEDULES["two groups"]) == expected


class ChanceInbox(Inbox):
    """Requests come by chance; one is given up when it has some tokens."""

    def __init__(self, coming: Sequence[Request], cancelled: str) -> None:
        super().__init__(1)
        self._random, self._coming, self.cancelled = Random(5), deque(coming), cancelled
        self.begun: dict[str, int] = defaultdict(int)

    def take(self, wait: bool) -> Mail:
        while self._coming and (wait or self._random.random() < 0.3):
            self.put([self._coming.popleft()])
            wait = False
        if self.begun[self.cancelled] > 2:
            self.cancel([self.cancelled])
        if not self._coming:
            self.close()
        return super().take(wait)


@pytest.mark.parametrize("bounds", SPLITS)
def test_a_live_run_tells_every_token_once(bounds: tuple[int, ...], tiny: Tiny) -> None:
    """Some come back with tokens that they had before a fault."""
    folder, expected = tiny("llama")
    replayed = [
        replace(each, generated=tuple(tokens[: len(tokens) // 2]))
        for each, tokens in zip(requests(), expected, strict=True)
    ]
    longest = max(range(len(PROMPTS)), key=lambda i: len(expected[i]))
    scheduler = RraScheduler(sizes_for(SCHEDULES["two groups"]), len(bounds) - 1)
    driver = PipelineDriver(scheduler, LocalPipeline(stages_of(folder, bounds, SLOTS, LONGEST)))
    inbox = ChanceInbox([*replayed[:9], *requests()[9:]], str(longest))
    tokens = defaultdict(list, {each.custom_id: list(each.generated) for each in replayed[:9]})
    for told in LiveRun(driver, inbox, LONGEST).events():
        for each in told:
            inbox.begun[each.custom_id] += 1
            tokens[each.custom_id] += each.token_ids
    begun = tokens.pop(str(longest))
    assert begun == expected[longest][: len(begun)] != expected[longest]
    assert tokens == {str(i): e for i, e in enumerate(expected) if i != longest}
    assert scheduler.waiting == scheduler.in_slots == 0
