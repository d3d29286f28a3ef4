"""Prompts that some stages prefill, and others go on with: tokens are those of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.messages import HostKey, KvPart, Park, Request, Sampling
from actors.schedule.exegpt_waa import DecodeScheduler, PrefillScheduler
from actors.schedule.scheduler import QueueSizes
from actors.stage.handed_over import HeldKeysValues
from actors.stage.stage import Stage
from planner.scheduling import RequestSchedule
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, LATENT_CONFIGS, LAYERS, STATE_CONFIGS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline, metered
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of, stages_of
from tests.actors.thread_ranks import divided

LENGTHS = (5, 11, 1, 8, 17, 2, 11, 3)
NEW_TOKENS = 10
LONGEST = max(LENGTHS) + NEW_TOKENS
PROMPTS = random_prompts(LENGTHS)
SLOTS, GROUPS, MOST_PARKED = 5, 2, 10**4
PREFILL_SLOTS = 12
SCHEDULE = RequestSchedule("waa-c", 2, SLOTS, 1, GROUPS, 2, float(LONGEST))

Tiny = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of each family, and what `generate` adds to the prompts."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny(folder, (CONFIGS | STATE_CONFIGS | LATENT_CONFIGS)[name])
        return folder, references(model, PROMPTS, NEW_TOKENS, ignore_eos=True)

    return made


def prefilled(stages: Sequence[Stage], requests: Sequence[Request]) -> list[Request]:
    """The requests with their first tokens."""
    sizes = QueueSizes(
        PREFILL_SLOTS,
        2,
        2,
        LONGEST,
        "exegpt",
        kv_tokens=4 * LONGEST,
        parked_tokens=MOST_PARKED,
        schedule=SCHEDULE,
    )
    scheduler = PrefillScheduler(sizes, len(stages))
    scheduler.add([replace(each, max_new_tokens=1) for each in requests])
    ended = [each for some in drive(scheduler, LocalPipeline(stages)) for each in some]
    firsts = {each.custom_id: each.token_ids for each in ended}
    return [replace(each, generated=firsts[each.custom_id]) for each in requests]


def hand_over(prefill: Sequence[Stage], decode: Sequence[Stage], keys: Sequence[int]) -> set[int]:
    """Give each stage that decodes what is in its layers; returns what has come to all."""
    heads = prefill[0].keys_values._own.heads
    arrived = set(keys)
    for target in decode:
        messages = []
        for source in prefill:
            common = sorted(set(source.spec.layers) & set(target.spec.layers))
            if common:
                part = KvPart(range(common[0], common[-1] + 1), heads)
                messages.append(source.keys_values.hand_over(keys, part))
        if target.spec.layers:
            arrived &= set(target.keys_values.take_over(messages))
    return arrived


def decoded(stages: Sequence[Stage], requests: Sequence[Request]) -> dict[str, list[int]]:
    sizes = QueueSizes(
        SLOTS,
        2,
        -(-SLOTS // GROUPS),
        LONGEST,
        "exegpt",
        kv_tokens=SLOTS * LONGEST,
        parked_tokens=MOST_PARKED,
        schedule=SCHEDULE,
    )
    scheduler = DecodeScheduler(sizes, len(stages))
    scheduler.add(requests)
    ended = [each for some in drive(scheduler, LocalPipeline(stages)) for each in some]
    return {each.custom_id: list(each.token_ids) for each in ended}


def requests_for(sampling: Sequence[Sampling]) -> list[Request]:
    return [
        Request(str(i), prompt, NEW_TOKENS, sampling[i % len(sampling)], host_key=HostKey(i))
        for i, prompt in enumerate(PROMPTS)
    ]


def generated(
    prefill: Sequence[Stage],
    decode: Sequence[Stage],
    sampling: Sequence[Sampling] = (Sampling(ignore_eos=True),),
    lost: Sequence[int] = (),
) -> list[list[int]]:
    """Tokens of all prompts; keys and values of those that are `lost` are, on their way."""
    going_on = prefilled(prefill, requests_for(sampling))
    prefill[0].keys_values.forget(lost)
    arrived = hand_over(prefill, decode, range(len(PROMPTS)))
    assert arrived == set(range(len(PROMPTS))) - set(lost)
    for stage in decode:
        stage.keys_values.forget(lost)
    meters = [metered(stage) for stage in decode]
    found = decoded(
        decode, [replace(r, host_key=None) if int(r.custom_id) in lost else r for r in going_on]
    )
    again = sum(LENGTHS[i] + 1 for i in lost)  # with the first token
    assert {meter.tokens()["prefill"] for meter in meters} == {again}
    assert all(stage._cache.parked.tokens == 0 for stage in decode)
    return [found[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("opt", (0, LAYERS), (0, LAYERS), marks=pytest.mark.rare),
        ("opt", (0, LAYERS), (0, 3, LAYERS)),
        pytest.param("llama", (0, 2, LAYERS), (0, LAYERS), marks=pytest.mark.rare),
        ("llama", (0, 2, LAYERS), (0, 1, 4, LAYERS)),
        ("deepseek_v3", (0, 2, LAYERS), (0, 1, 4, LAYERS)),
        pytest.param("mistral", (0, 1, LAYERS), (0, LAYERS), marks=pytest.mark.rare),
        ("mistral-sliding", (0, 1, LAYERS), (0, 4, LAYERS)),
        pytest.param("bloom", (0, 2, LAYERS), (0, 3, LAYERS), marks=pytest.mark.rare),
        ("gpt_neox", (0, 3, 3, LAYERS), (0, 2, 2, LAYERS)),
        ("qwen3_next", (0, 1, 4, LAYERS), (0, 2, LAYERS)),
        pytest.param("qwen3_5", (0, 2, LAYERS), (0, 1, 4, LAYERS), marks=pytest.mark.rare),
    ],
)
def test_tokens_are_those_of_generate_whatever_layers_a_stage_has(
    tiny: Tiny, name: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """Two boundaries at one place: the stage between them has no layers. Of qwen3_next the first
    stage has no keys.
    """
    folder, greedy = tiny(name)
    prefill = stages_of(folder, before, PREFILL_SLOTS, LONGEST, parked_tokens=MOST_PARKED)
    decode = stages_of(folder, after, SLOTS, LONGEST, parked_tokens=MOST_PARKED)
    assert generated(prefill, decode) == greedy


@pytest.mark.rare
def test_every_rank_has_latents_whole_and_may_give_them(tiny: Tiny) -> None:
    folder, greedy = tiny("deepseek_v3")
    specs = specs_of((0, 2, LAYERS), PREFILL_SLOTS, LONGEST, parked_tokens=MOST_PARKED)
    decode = stages_of(folder, (0, 3, LAYERS), SLOTS, LONGEST, parked_tokens=MOST_PARKED)
    with divided(specs, (2, 2), folder) as prefill:
        assert generated(prefill, decode) == greedy


def test_what_is_lost_on_the_way_is_prefilled_again(tiny: Tiny) -> None:
    folder, greedy = tiny("llama")
    prefill = stages_of(folder, (0, 2, LAYERS), 4, LONGEST, parked_tokens=MOST_PARKED)
    decode = stages_of(folder, (0, 3, LAYERS), SLOTS, LONGEST, parked_tokens=MOST_PARKED)
    assert generated(prefill, decode, lost=(0, 3, 4)) == greedy


SAMPLED = [
    Sampling(temperature=0.9, seed=3, ignore_eos=True),
    Sampling(temperature=1.2, top_p=0.8, seed=4, presence_penalty=0.5, ignore_eos=True),
    Sampling(repetition_penalty=1.7, frequency_penalty=0.2, ignore_eos=True),
    Sampling(temperature=1.1, seed=5, min_tokens=6, stop_token_ids=tuple(range(0, 190, 2))),
]


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_tokens_are_those_of_stages_that_do_both(tiny: Tiny, kv_bits: int) -> None:
    """Random draws and penalties do not notice; codes at 8 bit are handed over as they are."""
    folder, _ = tiny("llama")
    both = stages_of(folder, (0, 2, LAYERS), SLOTS, LONGEST, kv_bits=kv_bits)
    sampling = [SAMPLED[i % len(SAMPLED)] for i in range(len(PROMPTS))]
    whole = generate(both, PROMPTS, NEW_TOKENS, 2, 3, sampling)
    options = {"kv_bits": kv_bits, "parked_tokens": MOST_PARKED}
    prefill = stages_of(folder, (0, 3, LAYERS), 4, LONGEST, **options)
    decode = stages_of(folder, (0, 1, LAYERS), SLOTS, LONGEST, **options)
    assert generated(prefill, decode, SAMPLED) == whole


def test_stages_with_other_compute_types_convert(tiny: Tiny) -> None:
    """In float32 with what came in bfloat16: nothing else differs from float32 before it."""
    folder, _ = tiny("opt")
    narrow = stages_of(folder, (0, LAYERS), 4, LONGEST, dtype="bfloat16", parked_tokens=99)
    wide = stages_of(folder, (0, LAYERS), 4, LONGEST, dtype="float32", parked_tokens=99)
    request = replace(requests_for([Sampling(ignore_eos=True)])[1], host_key=HostKey(7))
    (made,) = prefilled(narrow, [request])
    assert hand_over(narrow, wide, [7]) == {7}
    held, taken = narrow[0]._cache.parked.found(7), wide[0]._cache.parked.found(7)
    assert held is not None
    assert taken is not None
    assert {copy.dtype for copy in taken.copies} == {torch.float32}
    assert all(torch.equal(a.float(), b) for a, b in zip(held.copies, taken.copies, strict=True))
    assert len(decoded(wide, [made])["1"]) == NEW_TOKENS


def empty_cache(layers: range, kv_bits: int = 16, kv_heads: int = 4, parked: int = 20) -> KVCache:
    form = CacheForm(torch.float32, torch.device("cpu"), kv_bits)
    return KVCache(layers, CacheShape(20, kv_heads, 8), form, parked)


def held_cache(kv_bits: int = 16, parked: int = 20) -> tuple[KVCache, HeldKeysValues]:
    """A cache of three layers from number 2 on, with random numbers in it."""
    cache = empty_cache(range(2, 5), kv_bits, parked=parked)
    where = cache.addresses(batch_in_ranges([0], [0], [20], slot_tokens=20))
    for layer in range(2, 5):
        cache.append(layer, where, *torch.randn(2, 20, 4, 8))
    return cache, HeldKeysValues(cache, range(4))


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_parts_of_heads_and_layers_make_up_the_whole(kv_bits: int) -> None:
    """As where ranks share the heads: two of one stage, and another of a stage with one layer."""
    cache, source = held_cache(kv_bits)
    for key, (begin, tokens) in {5: (3, 6), 8: (11, 9)}.items():
        cache.parked.keep(Park(key, begin, tokens), cache.of_tokens(begin, tokens))
    parts = [
        KvPart(range(2, 4), range(3)),
        KvPart(range(4, 5), range(4)),
        KvPart(range(2, 4), range(3, 4)),
    ]
    messages = [source.hand_over([5, 6, 8], part) for part in parts]
    other, target = held_cache(kv_bits)
    assert target.take_over(messages[:2]) == ()
    assert target.take_over(messages) == (5, 8)
    for key in (5, 8):
        found, sent = other.parked.found(key), cache.parked.found(key)
        assert found is not None
        assert sent is not None
        assert all(map(torch.equal, found.copies, sent.copies))
    alone = HeldKeysValues(empty_cache(range(1), kv_bits), range(4))
    told = KvPart(range(1), range(4))
    assert alone.take_over([source.hand_over([8], parts[1], told)]) == (8,), "under another name"


def test_what_finds_no_room_is_left_out() -> None:
    """On both sides: copying never fails a micro-batch, and taking over keeps what there is."""
    cache, source = held_cache(parked=12)
    for key, tokens in ((1, 5), (2, 9), (3, 7)):
        cache.parked.keep(Park(key, 0, tokens), cache.of_tokens(0, tokens))
    part = KvPart(range(2, 5), range(4))
    message = source.hand_over([1, 2, 3], part)
    other, target = held_cache(parked=11)
    assert target.take_over([message]) == (1,)
    assert target.take_over([message]) == (), "which is there already, and the other too long"
    target.forget([1])
    assert other.parked.tokens == 0
    assert target.take_over([message]) == (1,)


def test_plain_numbers_in_the_place_of_codes_are_refused() -> None:
    held, source = held_cache()
    held.parked.keep(Park(1, 0, 5), held.of_tokens(0, 5))
    part = KvPart(range(2, 5), range(4))
    coded = HeldKeysValues(empty_cache(range(2, 5), kv_bits=8), range(4))
    with pytest.raises(ValueError, match="both plans must have the same kv_bits"):
        coded.take_over([source.hand_over([1], part)])
