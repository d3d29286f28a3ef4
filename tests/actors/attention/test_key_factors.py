"""8-bit keys with a few large channels: exact factors, and attention against float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.attention.addresses import Scoring
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.attention.stored import asked_of_latents, key_factors, quantized, quantized_latents
from actors.importance import measure_stage
from actors.stage.layer_cache import make_cache, rotary_width
from actors.stage.partial_model import architecture_of
from actors.stage.stage import Stage, run_decoder
from quant.rounding.importance import LayerImportance
from quant.scheme import Processor
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, save_tiny, stages_of
from tests.actors.own_kernels import use_own_kernels
from tests.cuda_emulation import needs_compiler

CPU = torch.device("cpu")
REQUESTS, HEADS, KV_HEADS, WIDTH, LENGTH, SCALE = 5, 4, 2, 32, 70, 0.2
PAIR = (3, 3 + WIDTH // 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_with_factors_are_the_same_numbers(dtype: torch.dtype) -> None:
    """Both sides of a score are multiplied without rounding, so that the product is kept."""
    torch.manual_seed(0)
    keys = torch.randn(50, KV_HEADS, WIDTH) * torch.logspace(-1, 2.5, WIDTH)
    queries = torch.randn(50, KV_HEADS, WIDTH) * 100
    queries[queries.abs() < 1] = 1  # float16 has fewer digits for the product with a small factor
    keys, queries = keys.to(dtype), queries.to(dtype)
    factors = key_factors(keys.abs().amax(0), 0).to(dtype)
    asked, stored = queries * factors, keys / factors
    assert torch.equal(asked.double() * stored.double(), queries.double() * keys.double())
    assert asked.abs().amax() <= queries.abs().amax()
    assert len(factors.unique()) > 5


def test_large_channels_are_divided_by_what_they_are_larger() -> None:
    torch.manual_seed(0)
    usual = torch.rand(3, 16) + 1
    largest = usual.clone()
    largest[0, 4], largest[1, :3], largest[2] = 200, 0, 0
    factors = key_factors(largest, rotary_width=0)
    assert torch.equal(factors.log2(), factors.log2().round())
    assert factors.amax(-1).eq(1).all()
    stored = largest / factors
    assert stored[0].amax() / stored[0].amin() < 8 < largest[0].amax() / largest[0].amin()
    assert factors[1, 3:].amin() >= 0.5, "as without the channels of which nothing is known"
    assert factors[1, :3].amin() > 0
    assert factors[2].eq(1).all(), "a head without keys"


@pytest.mark.parametrize("name", [*CONFIGS, "glm4"])
def test_pairs_are_the_channels_that_rotate_into_each_other(name: str, tmp_path: Path) -> None:
    """The first layer sees one token everywhere: what changes in its keys is the rotation."""
    model = save_tiny(tmp_path, EVERY_CONFIG[name])
    width = rotary_width(model.config, 0)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    assert width == (0 if rotary is None else 2 * len(rotary.inv_freq))
    if not width:
        return
    with torch.no_grad():
        cache = model(input_ids=torch.full((1, 6), 7), use_cache=True).past_key_values
    keys = cache.layers[0].keys[0]  # [kv_heads, tokens, head_dim]
    neighbours = architecture_of(model.config).turns_neighbours
    turned = keys[..., :width].square()
    first, second = (turned[..., ::2], turned[..., 1::2]) if neighbours else turned.chunk(2, -1)
    lengths = first + second
    torch.testing.assert_close(lengths, lengths[:, :1].expand_as(lengths), rtol=1e-3, atol=1e-5)
    assert not torch.allclose(first, first[:, :1].expand_as(first), rtol=1e-2)
    still = keys[..., width:]
    torch.testing.assert_close(still, still[:, :1].expand_as(still))
    of_first = key_factors(keys.abs()[:, 0], width, neighbours)[:, :width]
    pair = (of_first[:, ::2], of_first[:, 1::2]) if neighbours else of_first.chunk(2, -1)
    assert torch.equal(*pair)


def large_pair(times: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values `[requests, tokens, heads, head_dim]` and what the keys are multiplied
    by and the queries divided, `[head_dim]`.
    """
    torch.manual_seed(0)
    channels = torch.ones(WIDTH)
    channels[list(PAIR)] = times
    query = torch.randn(REQUESTS, LENGTH, HEADS, WIDTH) / channels
    key, value = torch.randn(2, REQUESTS, LENGTH, KV_HEADS, WIDTH)
    return query, key * channels, value, channels


def error(times: float, known: bool, start: int, scoring: Scoring) -> float:
    """Error of attention from token `start` on, relative to the output, against float64."""
    query, key, value, channels = large_pair(times)
    factors = {0: key_factors(channels.expand(KV_HEADS, -1), WIDTH)} if known else {}
    shape = CacheShape(REQUESTS * LENGTH, KV_HEADS, WIDTH)
    cache = KVCache(range(1), shape, CacheForm(torch.float32, CPU, 8), factors=factors)
    slots = np.arange(REQUESTS)

    def context(start: int, count: int) -> RaggedContext:
        batch = batch_in_ranges(slots, slots * 0 + start, slots * 0 + count, slot_tokens=LENGTH)
        return RaggedContext.of(cache, batch)

    if start:
        earlier = (x[:, :start].flatten(0, 1) for x in (key, value))
        cache.append(0, context(0, start).where, *earlier)
    new = NewTokens(*(x[:, start:].flatten(0, 1) for x in (query, key, value)))
    out = attend(context(start, LENGTH - start), 0, new, scoring).unflatten(0, (REQUESTS, -1))
    exact = in_double(query[:, start:], key, value, scoring)
    return float((out.double() - exact).norm() / exact.norm())


def in_double(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """The product by its definition, `[requests, tokens, heads, head_dim]`."""
    groups = HEADS // KV_HEADS
    keys, values = (x.double().repeat_interleave(groups, 2) for x in (key, value))
    scores = scoring.scale * torch.einsum("rqhd,rkhd->rhqk", query.double(), keys)
    positions = torch.arange(LENGTH)
    distance = positions[LENGTH - query.shape[1] :, None] - positions
    hidden = distance < 0
    if scoring.window is not None:
        hidden |= distance >= scoring.window
    if scoring.alibi_slopes is not None:
        scores += (scoring.alibi_slopes[:, None] * positions)[:, None]
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("rhqk,rkhd->rqhd", shares, values)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("start", [0, 20, LENGTH - 1])
@pytest.mark.parametrize(
    "scoring",
    [Scoring(SCALE), Scoring(SCALE, window=9), Scoring(SCALE, None, torch.tensor([0.1, 0, 1, 2]))],
)
def test_a_large_pair_costs_attention_little(
    scoring: Scoring, start: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, parts of prompts and decode steps, with windows and ALiBi: the error with factors is
    near that of keys without such a pair; with one scale alone it is many times that.
    """
    if not compiled:
        monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
    usual = error(1, False, start, scoring)
    assert usual < 0.01
    assert error(128, True, start, scoring) < 2 * usual
    assert error(128, False, start, scoring) > 10 * usual


def measured(folder: Path) -> list[LayerImportance]:
    """Importance of every layer of a tiny model."""
    (stage,) = stages_of(folder, (0, LAYERS), 1, 8)
    return measure_stage(stage.spec, folder, CPU, Processor(), None)[1]


def with_biases(folder: Path) -> Any:
    """A checkpoint whose keys have large biases on the slowest pair of one head and the fastest of
    another, as Qwen 2 has them; queries there are small.
    """
    model = save_tiny(folder, CONFIGS["qwen2"])
    width = rotary_width(model.config, 0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            query, bias = attention.q_proj.weight.view(6, width, -1), attention.k_proj.bias
            for kv_head, channel in ((0, width // 2 - 1), (2, 0)):
                bias.view(3, width)[kv_head, channel] = 300.0
                heads, pair = slice(2 * kv_head, 2 * kv_head + 2), [channel, channel + width // 2]
                query[heads, pair] /= 100
                attention.q_proj.bias.view(6, width)[heads, pair] /= 100
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def log_probabilities(
    stage: Stage, tokens: Tensor, kv_bits: int, importance: Sequence[LayerImportance] | None
) -> Tensor:
    """Of every next token of `tokens`, in one pass."""
    model = stage._model
    form = CacheForm(stage.dtype, CPU, kv_bits)
    cache = make_cache(model.config, stage.spec.layers, len(tokens), form, importance)
    batch = batch_in_ranges([0], [0], [len(tokens)], slot_tokens=len(tokens))
    hidden = run_decoder(model, RaggedContext.of(cache, batch), tokens)
    scores: Tensor = model.get_output_embeddings()(hidden)
    return scores.double().log_softmax(-1)


def test_a_model_with_biases_on_keys_hardly_notices(tmp_path: Path) -> None:
    """Also at positions beyond those of the ids that were measured, where pairs have turned."""
    with_biases(tmp_path)
    importance = measured(tmp_path)
    (stage,) = stages_of(tmp_path, (0, LAYERS), 1, 8)
    (tokens,) = (torch.tensor(prompt) for prompt in random_prompts((120,)))
    full = log_probabilities(stage, tokens, 16, None)

    def divergence(known: Sequence[LayerImportance] | None) -> float:
        apart = full - log_probabilities(stage, tokens, 8, known)
        return float((full.exp() * apart).sum(-1).mean())

    assert 0 < divergence(importance) < divergence(None) / 20


RARE = [pytest.param(name, marks=pytest.mark.rare) for name in ("qwen2", "gpt_neox")]


@pytest.mark.parametrize("name", ["opt", "bloom", *RARE])
def test_batching_stages_and_replay_do_not_change_tokens(name: str, tmp_path: Path) -> None:
    """Factors are those of the layer, whichever stage holds it and whatever it has computed."""
    save_tiny(tmp_path, CONFIGS[name])
    importance = measured(tmp_path)
    prompts, most = random_prompts((5, 11, 1, 8, 8, 8)), 12

    def made(bounds: Sequence[int]) -> list[Stage]:
        return stages_of(tmp_path, bounds, len(prompts), 25, kv_bits=8, importance=importance)

    tokens = generate(made((0, LAYERS)), prompts, most, prefill=1, decode=6)
    split = made((0, 2, LAYERS))
    assert generate(split, prompts, most, prefill=3, decode=2) == tokens
    replayed = [p + tuple(t[:5]) for p, t in zip(prompts, tokens, strict=True) if len(t) > 5]
    rest = [t[5:] for t in tokens if len(t) > 5]
    assert rest
    assert generate(made((0, 3, LAYERS)), replayed, most - 5, prefill=2, decode=3) == rest


def test_factors_take_no_bytes_of_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    importance = measured(tmp_path)
    config = CONFIGS["llama"]
    form = CacheForm(torch.bfloat16, CPU, 8)
    plain, known = (
        make_cache(config, range(LAYERS), 30, form, each) for each in (None, importance)
    )
    assert known.nbytes == plain.nbytes


def test_codes_of_keys_are_those_of_keys_divided() -> None:
    """Of 16-bit keys too, and the keys given stay as they are."""
    torch.manual_seed(0)
    factors = key_factors(torch.logspace(0, 2, WIDTH).expand(KV_HEADS, -1), 0)
    for dtype in (torch.bfloat16, torch.float32):
        cache = KVCache(
            range(1), CacheShape(8, KV_HEADS, WIDTH), CacheForm(dtype, CPU, 8), factors={0: factors}
        )
        key = torch.randn(8, KV_HEADS, WIDTH).to(dtype)
        before = key.clone()
        where = cache.addresses(batch_in_ranges([0], [0], [8]))
        keys, values = cache.append(0, where, key, key)
        codes, scales = quantized(key.double() / factors)
        assert torch.equal(keys.numbers, codes.transpose(0, 1))
        assert keys.scales is not None
        assert torch.equal(keys.scales, scales.T)
        assert torch.equal(values.numbers, quantized(key)[0].transpose(0, 1))
        assert torch.equal(key, before)


def test_latents_lose_no_more_by_rotated_numbers_that_are_many_times_as_large() -> None:
    """Scores by codes, with both codes of what is rotated, against float64."""
    rank, rotated = 32, 8
    draw = torch.Generator().manual_seed(0)
    key = torch.randn(1, 50, rank + rotated, generator=draw)
    key[..., rank:] *= 90
    query = torch.randn(50, 3, rank + rotated, generator=draw)
    codes, scales = quantized_latents(key, rotated)
    assert codes.shape == (1, 50, rank + 2 * rotated)
    step = scales.double()[..., None]
    largest = key[..., :rank].abs().amax(-1, keepdim=True).double()
    assert bool((step <= 1.02 * torch.maximum(largest, key.abs().amax(-1, True) / 128) / 127).all())
    asked = asked_of_latents(query, rotated).double()
    found = asked @ (codes[0].double() * step[0]).t()
    wanted = query.double() @ key[0].double().t()
    bound = step[0, :, 0] / 2 * query.double().abs().sum(-1, keepdim=True)
    assert bool(((found - wanted).abs() <= bound * (1 + 1e-9)).all())


def error_of_latents(way: str, start: int, size: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Error of attention in float16 from token `start` on, against float64, with queries of up to
    `size` and equal scores.
    """
    if way == "kernels of GPUs":
        use_own_kernels(monkeypatch)
    if way != "loop of CPUs":
        monkeypatch.setattr("actors.attention.ragged.can_attend", lambda _: False)
    rank, rotated, dtype = 32, 8, torch.float16
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(LENGTH, HEADS, rank + rotated, generator=draw)
    query = (query * (size / query.abs().max())).to(dtype)
    key = torch.randn(LENGTH, 1, rank + rotated, generator=draw).to(dtype)
    scoring = Scoring(3 / size)
    shape = CacheShape(LENGTH, 1, rank + rotated, rotated=rotated)
    cache = KVCache(range(1), shape, CacheForm(dtype, CPU, 8))
    for begin, end in ((0, start), (start, LENGTH)):
        if begin < end:
            where = batch_in_ranges([0], [begin], [end - begin], slot_tokens=LENGTH)
            new = NewTokens(query[begin:end], key[begin:end], key[begin:end])
            out = attend(RaggedContext.of(cache, where), 0, new, scoring)
    scores = torch.einsum("qhd,kd->hqk", query[start:].double(), key[:, 0].double()) * 3 / size
    hidden = torch.ones(LENGTH, LENGTH).triu_(1).bool()[start:]
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    exact = torch.einsum("hqk,kd->qhd", shares, key[:, 0, :rank].double())
    return float((out[..., :rank].double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("start", [0, 20, LENGTH - 1])
@pytest.mark.parametrize(
    "way",
    ["loop of CPUs", "PyTorch", pytest.param("kernels of GPUs", marks=needs_compiler)],
)
def test_queries_of_latents_are_as_large_as_float16_has_numbers(
    way: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of whole prompts, parts of prompts and decode steps."""
    usual = error_of_latents(way, start, 4, monkeypatch)
    assert usual < 0.02
    for size in (1000, 60000):
        assert error_of_latents(way, start, size, monkeypatch) < 1.1 * usual
