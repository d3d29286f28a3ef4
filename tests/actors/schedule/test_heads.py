"""Heads that prompts share: which are found, and that random runs with them give the tokens of runs
without, whatever comes, goes and is forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from zlib import crc32

import numpy as np
import pytest

from actors.messages import FinishReason, MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.heads import PromptHeads
from actors.schedule.live_run import LiveRun
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from tests.actors.schedule.random_inbox import RandomInbox
from tests.actors.schedule.token_pipeline import sizes_of
from tests.seeds import seeds

KV_TOKENS, LONGEST = 2000, 300


def request(name: str, *parts: range, adapter: str = "") -> Request:
    ids = tuple(token for part in parts for token in part)
    return Request(name, ids, 3, Sampling(), adapter=adapter)


def shared_of(heads: PromptHeads, requests: list[Request]) -> dict[str, int]:
    """The tokens of the head that each request is given, or waits for."""
    heads.place(requests)
    return {name: head.tokens for name, head in heads._used.items()}


def test_the_head_is_the_one_that_saves_most_for_those_that_share_it() -> None:
    heads = PromptHeads(1000)
    rows = [request(f"row {i}", range(100), range(1000 * i, 1000 * i + 50)) for i in range(5)]
    longer = [request(f"more {i}", range(300), range(9000 + i, 9010 + i)) for i in range(3)]
    others = [request("alone", range(500, 700)), request("same", range(100), adapter="other")]
    found = shared_of(heads, [*rows, *longer, *others])
    own = {each.custom_id for each in (*rows, *longer)}
    assert {name for name in found if not name.startswith("head ")} == own
    assert {found[each.custom_id] for each in rows} == {96}
    assert {found[each.custom_id] for each in longer} == {288}
    assert heads.waiting == 8 + 1, "the long head begins with the short one"


def test_the_last_token_of_a_prompt_and_short_heads_are_not_shared() -> None:
    heads = PromptHeads(1000)
    assert not shared_of(heads, [request(f"{i}", range(64)) for i in range(9)])
    assert not shared_of(heads, [request(f"{i}", range(63), range(i, i + 9)) for i in range(99)])
    assert shared_of(PromptHeads(1000), [request(f"{i}", range(65)) for i in range(2)])
    assert not shared_of(PromptHeads(63), [request(f"{i}", range(99)) for i in range(2)])


class HashingPipeline:
    """Stages whose next token depends on all tokens of a request in a store of token slots."""

    def __init__(self, stages: int, most_kept: int) -> None:
        self.stages, self._most_kept = stages, most_kept
        self._store = np.full(KV_TOKENS, -1)
        self._kept: dict[int, TokenIds] = {}
        self._left: dict[int, int] = {}  # tokens until the end, by slot

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        for key in batch.drops:
            del self._kept[key]
        for move in batch.moves:
            taken = self._store[move.begin : move.begin + move.tokens].copy()
            self._store[move.to : move.to + move.tokens] = taken
        for each in batch.admitted:
            self._store[each.room.begin : each.room.end] = -1
            self._left[each.slot] = each.max_new_tokens - len(each.generated)
        for back in batch.restores:
            assert len(self._kept[back.key]) == back.tokens
            self._store[back.begin : back.begin + back.tokens] = self._kept[back.key]
        tokens: list[int] = []
        reasons: list[FinishReason | None] = []
        for row, new in enumerate(np.split(token_ids, batch.counts.cumsum()[:-1])):
            begin, start = int(batch.begins[row]), int(batch.starts[row])
            text = self._store[begin : begin + start + len(new)]
            text[start:] = new
            assert (text >= 0).all()
            if row in batch.sampled_rows:
                slot = int(batch.slots[row])
                self._left[slot] -= 1
                tokens.append(crc32(text.tobytes()))
                ends = self._left[slot] == 0 or tokens[-1] % 5 == 0
                reasons.append("stop" if ends else None)
        for keep in batch.keeps:
            self._kept[keep.key] = self._store[keep.begin : keep.begin + keep.tokens].copy()
        assert sum(map(len, self._kept.values())) <= self._most_kept
        return Sampled(np.array(tokens, dtype=np.int64), tuple(reasons))

    def result(self, handle: Sampled) -> Sampled:
        return handle


def random_requests(random: Random) -> list[Request]:
    templates = [[random.randrange(99) for _ in range(n)] for n in (70, 130, 200)]
    templates.append(templates[0] + templates[1])
    made = []
    for i in range(random.randint(5, 30)):
        head = random.choice(templates)[: random.choice([64, 100, 300])]
        tail = [random.randrange(99) for _ in range(random.randint(1, 20))]
        generated = tuple(random.randrange(1, 99) for _ in range(random.randint(0, 1)))
        made.append(Request(str(i), (*head, *tail), random.randint(2, 9), Sampling(), generated))
    return made


def tokens_of(seed: int, most_tokens: int) -> tuple[dict[str, list[int]], set[str]]:
    """New tokens by request of a random run, and the requests that were cancelled."""
    random = Random(seed)
    requests, stages = random_requests(random), random.randint(1, 3)
    sizes = QueueSizes(6, 2, 3, LONGEST)
    if seed % 2:
        sizes = sizes_of(stages, random.randint(1, 4), KV_TOKENS, random.choice([0, 50]))
    pipeline, heads = HashingPipeline(stages, most_tokens), PromptHeads(most_tokens)
    driver = PipelineDriver(make_scheduler(sizes, stages), pipeline, heads=heads)
    inbox, found = RandomInbox(random, requests), defaultdict[str, list[int]](list)
    for told in LiveRun(driver, inbox, LONGEST).events():
        for each in told:
            has_told = bool(found[each.custom_id])
            assert not each.shared_tokens or (most_tokens and not has_told)
            found[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                inbox.ended.add(each.custom_id)
    assert inbox.ended | inbox.cancelled == {each.custom_id for each in requests}
    assert not {**heads._used, **driver.slot_tokens()}
    return found, inbox.cancelled


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_random_runs_give_the_tokens_of_runs_without(seed: int) -> None:
    expected, gone = tokens_of(seed, 0)
    for most_tokens in (100, 500):
        found, others = tokens_of(seed, most_tokens)
        for name, tokens in found.items():
            if name not in gone | others:
                assert tokens == expected[name]
