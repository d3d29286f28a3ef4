"""Keys and values in 8 bits: the error of the codes, of attention with them, and of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from actors.attention.addresses import Scoring
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache, joined_moves
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.attention.stored import Stored, quantized
from actors.messages import MicroBatch, Move, TokenRange
from actors.stage.layer_cache import make_cache
from actors.stage.spec import stage_spec
from actors.stage.stage import Stage, run_decoder
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.search.find import find_plan
from planner.workload import Workload
from quant.scheme import Processor
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, save_tiny, stages_of
from tests.paths import EXAMPLES

CPU = torch.device("cpu")
IN_CODES = CacheForm(torch.float32, CPU, kv_bits=8)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEMO_LAYERS = 12
DEMO_PROMPTS = 32


def everything(stored: Tensor) -> Tensor:
    return stored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-5, 1.0, 3e4])
def test_no_number_is_off_by_more_than_half_a_step(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    numbers = (torch.randn(50, 3, 40).clamp(-2, 2) * size).to(dtype)
    numbers[0, 0], numbers[0, 1, 1:] = 0, 0
    codes, scales = quantized(numbers)
    steps = scales.double()
    restored = Stored(codes, scales).read(everything, torch.float64)
    off = (restored - numbers.double()).abs()
    assert (off <= (0.5 + 1e-5) * steps[..., None]).all()
    assert restored[0, 0].eq(0).all()
    largest = numbers.double().abs().amax(-1)
    live = largest > 0
    torch.testing.assert_close(steps[live], largest[live] / 127, rtol=2**-8, atol=0)
    assert codes.abs().max() == 127


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_spoil_their_own_row_alone(
    bad: float, dtype: torch.dtype
) -> None:
    numbers = torch.ones(2, 4, dtype=dtype)
    numbers[1, 2] = bad
    restored = Stored(*quantized(numbers)).read(everything, dtype)
    torch.testing.assert_close(restored[0], numbers[0], rtol=0.01, atol=0)
    assert not restored[1].isfinite().any()


def test_a_cleared_slot_holds_nothing_of_what_was_not_finite() -> None:
    cache = KVCache(range(1), CacheShape(8, 2, 8), IN_CODES)
    batch = batch_in_ranges([0, 1], [0, 0], [3, 3], slot_tokens=4)
    key = torch.full((6, 2, 8), torch.nan)
    keys, values = cache.append(0, cache.addresses(batch), key, torch.ones_like(key))
    cache.clear([TokenRange(0, 4)])
    assert keys.read(everything, torch.float32)[:, :4].eq(0).all()
    assert values.read(everything, torch.float32)[:, :4].eq(0).all()
    assert keys.read(everything, torch.float32)[:, 4:7].isnan().all()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(
    "moves",
    [[(0, 9, 5)], [(4, 2, 6)], [(2, 4, 6)], [(4, 0, 3), (0, 4, 8)], [(3, 3, 2)], [(0, 3, 4)] * 3],
)
def test_moves_take_keys_and_values_of_every_layer(
    moves: list[tuple[int, int, int]], kv_bits: int, together: bool
) -> None:
    """In order, and as if all tokens were read first, whichever way they overlap."""
    torch.manual_seed(0)
    cache = KVCache(range(2), CacheShape(16, 2, 8), CacheForm(torch.float32, CPU, kv_bits))
    batch = batch_in_ranges([0], [0], [16])
    held = [
        each
        for layer in range(2)
        for each in cache.append(layer, cache.addresses(batch), *torch.randn(2, 16, 2, 8))
    ]
    before = [each.read(everything, torch.float32).clone() for each in held]
    for expected in before:
        for begin, to, tokens in moves:
            expected[:, to : to + tokens] = expected[:, begin : begin + tokens].clone()
    if together:
        taken, put = map(torch.from_numpy, joined_moves([Move(*each) for each in moves]))
        for stored in held:
            stored.rearrange(taken, put)
    else:
        cache.move([Move(*each) for each in moves])
    for stored, expected in zip(held, before, strict=True):
        assert torch.equal(stored.read(everything, torch.float32), expected)


def test_rooms_side_by_side_are_cleared_together_and_known_apart() -> None:
    cache = KVCache(range(1), CacheShape(16, 1, 8), CacheForm(torch.float32, CPU))
    keys, _ = cache.append(
        0, cache.addresses(batch_in_ranges([0], [0], [16])), *torch.ones(2, 16, 1, 8)
    )
    cache.clear([TokenRange(12, 2), TokenRange(0, 4), TokenRange(4, 3), TokenRange(9, 0)])
    kept = [slot for slot, token in enumerate(keys.numbers[0]) if token.any()]
    assert kept == [7, 8, 9, 10, 11, 14, 15]
    where = cache.addresses(MicroBatch(*np.array([[0, 1], [3, 2], [1, 1], [0, 4]])))
    assert where.in_place is None, "the shorter one has no room for a fourth token"


@pytest.mark.parametrize("compiled", [True, False])
def test_errors_of_attention_are_those_of_its_steps(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers rounded to a step are off by its twelfth root, evenly; a key's error moves its score,
    and with it the share of its value. The output must be off by just that, all terms counted.
    """
    if not compiled:
        monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
    torch.manual_seed(0)
    requests, heads, kv_heads, width, length, scale = 6, 4, 2, 64, 90, 0.125
    key, value = torch.randn(2, requests, length, kv_heads, width)
    query = torch.randn(requests, heads, width)
    cache = KVCache(range(1), CacheShape(requests * length, kv_heads, width), IN_CODES)

    def batch(start: int, count: int) -> RaggedContext:
        starts, counts = np.full(requests, start), np.full(requests, count)
        made = batch_in_ranges(np.arange(requests), starts, counts, slot_tokens=length)
        return RaggedContext.of(cache, made)

    before = batch(0, length - 1)
    cache.append(0, before.where, *(x[:, :-1].flatten(0, 1) for x in (key, value)))
    new = NewTokens(query, key[:, -1], value[:, -1])
    out = attend(batch(length - 1, 1), 0, new, Scoring(scale))

    def by_head(x: Tensor) -> Tensor:
        return x.double().transpose(1, 2).repeat_interleave(heads // kv_heads, 1)

    keys, values, asked = by_head(key), by_head(value), query.double()[:, :, None]
    steps = [x.abs().amax(-1) / 127 for x in (keys, values)]
    shares = (scale * asked @ keys.mT).softmax(-1)[:, :, 0]
    exact = shares[:, :, None] @ values
    score_variance = (steps[0] * scale * asked.norm(dim=-1)) ** 2 / 12
    variance = torch.einsum("rht,rhtd->rhd", shares**2 * score_variance, (values - exact) ** 2)
    variance += torch.einsum("rht,rht->rh", shares**2, steps[1] ** 2 / 12)[:, :, None]
    in_deviations = (out.double() - exact[:, :, 0]) / variance.sqrt()
    assert 0.9 < in_deviations.square().mean().sqrt() < 1.1
    assert in_deviations.abs().max() < 6


RARE = [pytest.param(name, marks=pytest.mark.rare) for name in ("llama", "qwen3")]


@pytest.mark.parametrize("name", ["bloom", "mistral-sliding", *RARE])
def test_batching_and_replay_do_not_change_tokens(name: str, tmp_path: Path) -> None:
    """Micro-batches of any size, stages anywhere, and a request that goes on from its prompt and
    its first tokens, as after a fault.
    """
    save_tiny(tmp_path, CONFIGS[name])
    prompts, most = random_prompts((5, 11, 1, 8, 8, 8)), 14
    whole = stages_of(tmp_path, (0, LAYERS), len(prompts), 25, kv_bits=8)
    tokens = generate(whole, prompts, most, prefill=1, decode=6)
    split = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), 25, kv_bits=8)
    assert generate(split, prompts, most, prefill=3, decode=2) == tokens
    replayed = [p + tuple(t[:5]) for p, t in zip(prompts, tokens, strict=True) if len(t) > 5]
    rest = [t[5:] for t in tokens if len(t) > 5]
    assert rest
    assert generate(split, replayed, most - 5, prefill=2, decode=3) == rest


def test_planned_stages_hold_the_planned_bytes() -> None:
    """From the options to the tensors: uneven layers on three devices."""
    folder = EXAMPLES / "demo_model"
    cluster = ClusterSpec.from_yaml(EXAMPLES.parent / "cluster_specs" / "demo_mixed_cpu.yaml")
    options = PlanOptions(kv_bits=8, theta=1.0, keep_all_devices=True)
    workload = Workload(32, 100, 48)
    plan = find_plan(cluster, model_shape(folder), str(folder), workload, options).plan
    assert len(plan.stages) > 1
    for planned in plan.stages:
        stage = Stage(stage_spec(plan, planned), folder, CPU, Processor())
        assert stage.stats().kv_cache_bytes == planned.memory.kv_cache


@torch.inference_mode()
def log_probabilities(stage: Stage, prompts: Sequence[Tensor], kv_bits: int) -> Tensor:
    """Of every next token of the prompts, `[tokens, vocabulary]`, in one pass."""
    model = stage._model
    form = CacheForm(stage.dtype, CPU, kv_bits)
    cache = make_cache(model.config, stage.spec.layers, len(prompts) * 128, form)
    counts = np.array([len(prompt) for prompt in prompts])
    slots = np.arange(len(prompts))
    batch = batch_in_ranges(slots, np.zeros_like(counts), counts, slot_tokens=128)
    hidden = run_decoder(model, RaggedContext.of(cache, batch), torch.cat(list(prompts)))
    scores: Tensor = model.get_output_embeddings()(hidden)
    return scores.double().log_softmax(-1)


def test_the_demo_model_hardly_notices() -> None:
    """On held-out text. A pass over a prompt sees the codes that decoding would see."""
    folder = EXAMPLES / "demo_model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (EXAMPLES / "demo_prompts.jsonl").read_text().splitlines()[:DEMO_PROMPTS]
    prompts = [torch.tensor(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]
    (stage,) = stages_of(folder, (0, DEMO_LAYERS), 1, 8)
    full, coded = (log_probabilities(stage, prompts, bits) for bits in (16, 8))
    agreement = (full.argmax(-1) == coded.argmax(-1)).double().mean()
    divergence = (full.exp() * (full - coded)).sum(-1).mean()
    assert agreement > 0.97
    assert 0 < divergence < 1e-3


def test_layers_of_other_sizes_and_of_none() -> None:
    """What is written in one layer lies there alone, whatever the others hold."""
    shape = CacheShape(8, 2, 8, others={1: (1, 16), 2: None})
    cache = KVCache(range(4), shape, CacheForm(torch.float32, CPU))
    assert cache.holding_layers == (0, 1, 3)
    assert cache.nbytes == 2 * 4 * 8 * (2 * 8 + 16 + 2 * 8)
    where = cache.addresses(batch_in_ranges([0], [0], [3], slot_tokens=8))
    new = {0: torch.randn(2, 3, 2, 8), 1: torch.randn(2, 3, 1, 16), 3: torch.randn(2, 3, 2, 8)}
    for layer, (key, value) in new.items():
        cache.append(layer, where, key, value)
    small = cache.like(range(1, 3), 2)
    assert [part.shape for part in small.of_tokens(0, 2)] == [(1, 2, 16)] * 2
    parts = cache.of_tokens(0, 3)
    for place, (key, value) in enumerate(new.values()):
        assert torch.equal(parts[place], key.transpose(0, 1))
        assert torch.equal(parts[place + 3], value.transpose(0, 1))
