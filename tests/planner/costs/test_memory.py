"""Bytes against tensors that torch really allocates, and against LLM-PQ's formulas."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from actors.attention.addresses import Scoring
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import NewTokens, RaggedContext, attend
from actors.messages import Admission, MicroBatch, Sampling
from actors.stage.layer_cache import make_cache
from actors.stage.layers.own_layers import own_layers, put_own_layers
from actors.stage.partial_model import empty_model, keep_stage
from actors.stage.sampler import Sampler
from actors.stage.stage import run_decoder
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.memory import (
    StageEnds,
    StageWork,
    fixed_stage_memory,
    graph_bytes,
    margin_bytes,
    memory_with_layers,
    padded_rows,
    runtime_bytes,
    temporary_bytes,
)
from planner.costs.stored_bytes import (
    embedding_bytes,
    head_bytes,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    norm_bytes,
)
from planner.model.finding import model_shape, shape_from_config
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.workload import MicroBatches, Workload
from quant.common.errors import SpecError
from quant.scheme import Processor
from tests.actors.own_kernels import pretend_own_kernels

WORKLOAD = Workload(global_batch=32, prompt_length=512, new_tokens=100)
OPT_30B = model_shape("opt-30b")
_GATED = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 128,
        "vocab_size": 500,
        "max_position_embeddings": 512,
        "dropout": 0.0,
    },
    "granite": _GATED | {"residual_multiplier": 0.5},
    "phi3": _GATED | {"pad_token_id": 0, "eos_token_id": 1},
    "bloom": {"hidden_size": 128, "n_layer": 1, "n_head": 4, "vocab_size": 500},
}


def device(name: str = "T4") -> Device:
    return ClusterSpec.from_counts([name], [1]).devices[0]


def tiny(model_type: str) -> tuple[ModelShape, Any]:
    values = CONFIGS[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    return shape_from_config("tiny", {"model_type": model_type, **values}), model.eval()


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages alive at once that operations inside the block created."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage(), inputs)
        return result

    def _add(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in inputs or key in self._seen:
            return
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.alive -= size


@pytest.mark.parametrize("model_type", ["llama", "opt", "phi3"])
def test_temporaries_cover_what_the_librarys_forward_allocates(model_type: str) -> None:
    shape, model = tiny(model_type)
    requests, length = 2, 256
    workload = Workload(requests, length, 1)
    with torch.inference_mode(), PeakBytes() as seen:
        model.base_model(torch.ones(requests, length, dtype=torch.long), use_cache=False)
    work = StageWork(shape, workload, MicroBatches(requests, requests), "float32", quantized=False)
    estimated = temporary_bytes(work, StageEnds(embedding=True))
    assert seen.peak <= estimated <= 3 * seen.peak


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("model_type", ["llama", "opt", "bloom", "granite", "phi3"])
def test_temporaries_cover_prompts_by_own_layers(
    monkeypatch: pytest.MonkeyPatch, model_type: str, kv_bits: int
) -> None:
    pretend_own_kernels(monkeypatch)
    config = AutoConfig.for_model(model_type, **CONFIGS[model_type])
    meta, layers = torch.device("meta"), range(config.num_hidden_layers)
    model = empty_model(config)
    keep_stage(model, layers, is_first=False, is_last=False, has_head=False)
    model.to_empty(device=meta).half()
    cache = make_cache(config, layers, 600, CacheForm(torch.float16, meta, kv_bits))
    put_own_layers(model, layers, cache, torch.float16)
    assert own_layers(model)
    batch = MicroBatch(*np.array([[0, 1], [0, 0], [256, 256], [0, 300]]))
    hidden = torch.empty(512, config.hidden_size, dtype=torch.float16, device=meta)
    with torch.inference_mode(), PeakBytes() as seen:
        run_decoder(model, RaggedContext.of(cache, batch, own_kernels=True), hidden)
    shape, workload = tiny(model_type)[0], Workload(2, 256, 1)
    work = StageWork(shape, workload, MicroBatches(2, 2), "float16", False, kv_bits=kv_bits)
    estimated = temporary_bytes(work, StageEnds(), Processor((7, 0)))
    assert seen.peak + hidden.nbytes <= estimated <= 4 * seen.peak


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_temporaries_cover_prompts_of_latents(kv_bits: int) -> None:
    """Whose keys and values are expanded."""
    values = _GATED | {"num_key_value_heads": 4, "kv_lora_rank": 96, "q_lora_rank": None}
    values |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    values |= {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    values |= {"moe_intermediate_size": 64, "intermediate_size": 96}
    config = AutoConfig.for_model("deepseek_v2", **values)
    cpu, layers = torch.device("cpu"), range(1)
    model = empty_model(config)
    keep_stage(model, layers, is_first=False, is_last=False, has_head=False)
    model.to_empty(device=cpu)
    cache = make_cache(config, layers, 600, CacheForm(torch.float32, cpu, kv_bits))
    batch = MicroBatch(*np.array([[0, 1], [0, 0], [256, 256], [0, 300]]))
    hidden = torch.zeros(512, config.hidden_size)
    with torch.inference_mode(), PeakBytes() as seen:
        run_decoder(model, RaggedContext.of(cache, batch), hidden)
    shape = shape_from_config("tiny", {"model_type": "deepseek_v2", **values})
    work = StageWork(shape, Workload(2, 256, 1), MicroBatches(2, 2), "float32", False, kv_bits)
    assert seen.peak + hidden.nbytes <= temporary_bytes(work, StageEnds()) <= 2 * seen.peak


def test_temporaries_cover_blooms_spelled_out_activation() -> None:
    """BLOOM's own attention keeps scores, the runtime's does not: compare the MLP alone."""
    shape, model = tiny("bloom")
    hidden = torch.randn(2, 256, 128)
    with torch.inference_mode(), PeakBytes() as seen:
        model.base_model.h[0].mlp(hidden, hidden)
    work = StageWork(shape, Workload(2, 256, 1), MicroBatches(2, 2), "float32", quantized=False)
    estimated = temporary_bytes(work, StageEnds())
    assert seen.peak <= estimated <= 3 * seen.peak


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("failed", [False, True])
def test_temporaries_cover_what_decoding_of_unlike_requests_gathers(
    kv_bits: int, alibi: bool, case: int, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest may be far longer than the others, whose ranges lie at any distance: copies of
    all up to the longest would be many times the cache, and what is planned. On a GPU whose own
    attention `failed` its self-test no more is copied than was planned with it.
    """
    monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
    rng = np.random.default_rng(case)
    requests, heads, kv_heads, width = int(rng.integers(2, 24)), 8, int(rng.choice([1, 2, 8])), 16
    lengths = rng.geometric(1 / 12, requests).clip(1, 200)
    lengths[rng.integers(requests)] = longest = 256
    workload = Workload(requests, 1, longest - 1, n_slots=int(lengths.sum()) + 3)
    order = rng.permutation(requests)
    begins = np.empty(requests, np.int64)
    begins[order] = (
        np.cumsum(lengths[order]) - lengths[order] + np.sort(rng.integers(4, size=requests))
    )
    batch = MicroBatch(np.arange(requests), lengths - 1, np.ones(requests, np.int64), begins)
    cpu = torch.device("cpu")
    form = CacheForm(torch.float32, cpu, kv_bits)
    monkeypatch.setattr("actors.attention.kv_cache.counts_on_ranges", lambda *_: failed)
    monkeypatch.setattr("planner.costs.memory.reads_ranges", lambda *_: failed)
    cache = KVCache(range(1), CacheShape(workload.kv_tokens, kv_heads, width), form)
    key, query = torch.randn(requests, kv_heads, width), torch.randn(requests, heads, width)
    slopes = torch.rand(heads) if alibi else None
    with torch.inference_mode(), PeakBytes() as seen:
        context = RaggedContext.of(cache, batch)
        for _ in range(2):
            attend(context, 0, NewTokens(query, key, key), Scoring(0.3, None, slopes))
    values = CONFIGS["llama"] | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    shape = replace(shape_from_config("tiny", {"model_type": "llama", **values}), alibi=alibi)
    sizes = MicroBatches(1, requests)
    work = StageWork(shape, workload, sizes, "float32", quantized=False, kv_bits=kv_bits)
    assert seen.peak <= temporary_bytes(work, StageEnds(), Processor()) <= 4 * seen.peak


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporaries_cover_what_sampling_allocates(
    temperature: float, penalty: float, dtype: str
) -> None:
    """Of all requests of a batch, in the costliest way: every filter, penalties and a bias."""
    requests = 8
    sampling = Sampling(
        temperature, 40, 0.9, min_p=0.01, repetition_penalty=penalty, logit_bias={3: 1.0}
    )
    seen_tokens = tuple(range(300))
    admitted = [Admission(i, str(i), 9, sampling, (), seen_tokens) for i in range(requests)]
    slots = np.arange(requests)
    batch = MicroBatch(slots, slots * 0, slots * 0 + 1, slots, tuple(admitted))
    logits = torch.randn(requests, OPT_30B.vocab_size).to(getattr(torch, dtype))
    with torch.inference_mode(), PeakBytes() as seen:
        Sampler(()).sample(batch, logits)
    shape = replace(OPT_30B, hidden_size=64, intermediate_size=64)
    sizes = MicroBatches(requests, requests)
    work = StageWork(shape, Workload(requests, 1, 1), sizes, dtype, quantized=False)
    estimated = temporary_bytes(work, StageEnds(head=True))
    assert seen.peak + logits.nbytes <= estimated


@pytest.mark.parametrize("model_type", CONFIGS)
def test_ends_are_the_librarys_tensors(model_type: str) -> None:
    shape, model = tiny(model_type)
    layers = sum(weight.nbytes for weight in model.parameters() if weight.dim() >= 1)
    ends = layers - shape.layers * layer_weight_bytes(shape, 16, device(), "float32")
    shared = head_bytes(shape, "float32", on_first=True)
    assert embedding_bytes(shape, "float32") + norm_bytes(shape, "float32") + shared == ends
    apart = head_bytes(shape, "float32") - shared
    head = model.get_output_embeddings().weight.nbytes
    assert apart == (head if shape.tied_embeddings else 0)


def test_full_precision_layer_is_the_papers_formula() -> None:
    h1, h2 = 7168, 28672
    linears = 4 * h1**2 + 2 * h1 * h2
    norms_and_biases = 4 * h1 + 4 * h1 + h2 + h1
    assert layer_weight_bytes(OPT_30B, 16, device(), "float16") == 2 * (linears + norms_and_biases)


def test_quantized_layer_bytes_follow_the_kernels() -> None:
    others = 2 * OPT_30B.layer_other_parameters
    weights = OPT_30B.layer_linear_parameters
    t4 = layer_weight_bytes(OPT_30B, 8, device(), "float16") - others
    sides = sum(each.out_features + each.in_features for each in OPT_30B.layer_linears)
    assert t4 == weights + 4 * sides
    emulated = replace(device(), emulated=True)
    three = layer_weight_bytes(OPT_30B, 3, emulated, "bfloat16") - others
    rows = sum(each.out_features for each in OPT_30B.layer_linears)
    assert three == weights * 3 // 8 + weights * 2 // 32 + 2 * rows
    assert layer_weight_bytes(OPT_30B, 4, device(), "float16") != layer_weight_bytes(
        OPT_30B, 4, emulated, "bfloat16"
    )
    assert layer_weight_bytes(OPT_30B, 4, device(), "float16", "torch_4bit") == (
        layer_weight_bytes(OPT_30B, 4, device("V100"), "float16", "torch_4bit")
    )


def test_kv_cache_is_the_tensors_of_every_request() -> None:
    llama = model_shape("llama-3-8b")
    expected = torch.empty(2, 32, 8, 612, 128, dtype=torch.float16, device="meta").nbytes
    assert kv_cache_bytes_per_layer(llama, WORKLOAD, 16, "float16") == expected
    assert kv_cache_bytes_per_layer(llama, WORKLOAD, 16, "float32") == 2 * expected
    codes = torch.empty(2, 32, 8, 612, 128, dtype=torch.int8, device="meta").nbytes
    scales = torch.empty(2, 32, 8, 612, dtype=torch.bfloat16, device="meta").nbytes
    assert kv_cache_bytes_per_layer(llama, WORKLOAD, 8, "float32") == codes + scales
    with pytest.raises(SpecError, match="kv_bits is 5"):
        kv_cache_bytes_per_layer(llama, WORKLOAD, 5, "float16")


def test_stage_adds_up() -> None:
    t4 = device()
    work = StageWork(OPT_30B, WORKLOAD, MicroBatches(4, 8), "float16")
    fixed = fixed_stage_memory(work, t4, StageEnds.of(0, 2))
    assert fixed.total == fixed.fixed
    assert (fixed.weights, fixed.kv_cache, fixed.final) == (0, 0, 0)
    kv = kv_cache_bytes_per_layer(OPT_30B, WORKLOAD, 16, "float16")
    stage = memory_with_layers(work, t4, range(3), [*map(LayerChoice.whole, (3, 8, 8))], fixed)
    layers = [layer_weight_bytes(OPT_30B, bits, t4, "float16") for bits in (3, 8, 8)]
    assert stage.total == fixed.total + sum(layers) + 3 * kv


def test_recorded_steps_take_little_of_a_gpu_and_nothing_where_none_is_recorded() -> None:
    t4 = device()

    def held(requests: int, dtype: str = "float16", kind: Device = t4) -> int:
        sizes = MicroBatches(1, requests)
        return graph_bytes(StageWork(OPT_30B, WORKLOAD, sizes, dtype), kind)

    assert 0 < held(1) < held(8) < held(24) < 0.003 * t4.memory_bytes
    assert held(33) <= held(48) < held(49)
    work = StageWork(OPT_30B, WORKLOAD, MicroBatches(4, 8), "float16")
    on_first = StageEnds.of(0, 2)
    planned = fixed_stage_memory(work, t4, on_first).temporary
    assert planned == temporary_bytes(work, on_first, t4.processor) + held(8)
    assert held(8, "float32") == held(8, kind=replace(t4, emulated=True)) == 0


def test_at_most_a_third_of_a_large_recorded_step_is_nobodys() -> None:
    for requests in range(1, 600):
        rows = padded_rows(requests)
        assert requests <= rows == padded_rows(rows)
        assert rows < 2 * requests
        assert requests < 16 or rows - requests < rows / 3
    assert len({padded_rows(requests) for requests in range(1, 257)}) == 13


def test_the_margin_is_a_share_of_a_gpu_and_nothing_of_a_cpu() -> None:
    t4 = device()
    assert margin_bytes(t4, 0.02) == pytest.approx(0.02 * t4.memory_bytes, abs=1)
    assert margin_bytes(replace(t4, emulated=True), 0.02) == margin_bytes(t4, 0.02)
    cpu = ClusterSpec.from_dict({"name": "c", "nodes": [{"accelerators": "CPU", "memory_gib": 4}]})
    assert margin_bytes(t4, 0.0) == margin_bytes(cpu.devices[0], 0.02) == 0


def test_runtime_is_only_what_a_gpu_takes() -> None:
    assert runtime_bytes(replace(device(), emulated=True)) == 0
    assert 0.5e9 < runtime_bytes(device()) < 1.5e9


def test_larger_micro_batches_and_logits_need_more() -> None:
    def peak(prefill: int, decode: int, last: bool, quantized: bool = True) -> int:
        sizes = MicroBatches(prefill, decode)
        work = StageWork(OPT_30B, WORKLOAD, sizes, "float16", quantized)
        return temporary_bytes(work, StageEnds(head=last))

    assert peak(1, 8, False) < peak(8, 8, False) < peak(32, 32, False)
    assert peak(1, 1, False, quantized=False) < peak(1, 1, False)
    short = replace(WORKLOAD, prompt_length=1)
    work = StageWork(OPT_30B, short, MicroBatches(1, 32), "float16", quantized=False)
    logits = temporary_bytes(work, StageEnds(head=True))
    assert logits > 32 * OPT_30B.vocab_size * 8


def test_paper_cluster_1_needs_quantization_and_8_bits_fit() -> None:
    """OPT-13B on one V100-32GB: 16 bit runs out of memory there, int8 fits (LLM-PQ table 4)."""
    shape, v100 = model_shape("opt-13b"), device("V100-32G")
    work = StageWork(shape, WORKLOAD, MicroBatches(1, 32), "float16")
    fixed = fixed_stage_memory(work, v100, StageEnds.of(0, 1))
    need = {
        bits: memory_with_layers(work, v100, range(40), [LayerChoice.whole(bits)] * 40, fixed).total
        for bits in (8, 16)
    }
    assert need[8] < v100.memory_bytes < need[16]
