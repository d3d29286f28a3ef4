"""Stages that are divided among ranks: their tokens are those of `generate`, their codes those of
the stage that is not divided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from actors.messages import MicroBatch
from actors.stage.ranks import follow
from actors.stage.stage import Stage
from planner.costs.communication import cache_tensors
from planner.costs.stored_bytes import (
    embedding_bytes,
    head_bytes,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    norm_bytes,
)
from planner.model.finding import model_shape
from planner.model.tensor_parallel import largest_rank_shape, shape_of_ranks
from planner.workload import Workload
from quant.checkpoint.codes import GroupCodes
from quant.common.errors import SpecError, StageLostError
from quant.loading.cache_settings import CacheSettings
from quant.loading.loader import module_nbytes
from quant.rounding.encoding import gptq_tensors
from quant.rounding.importance import InputStatistics, LayerImportance
from quant.scheme import Processor
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import (
    CONFIGS,
    EVERY_CONFIG,
    LATENT_CONFIGS,
    LAYERS,
    MORE_CONFIGS,
    SHARED_CONFIGS,
    STATE_CONFIGS,
    VOCABULARY,
)
from tests.actors.models import generate, random_prompts, reference, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided, following, load_ranks, thread_groups

ALL = EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS
UNLIKE = "gpt_oss", "gemma4-shared", "qwen3_next", "deepseek_v3"
"""Models of layers with parts of their own, of which these have most."""

LAYOUTS = (
    (
        ((4, 1, 2), False),
        {"llama", "bloom", "opt-post-norm", "phi3", "olmo2", *UNLIKE},
    ),
    (
        ((2, 4, 1), True),
        {"gpt_neox", "glm", "qwen3_5_moe", "gemma4-experts", "qwen2_moe"},
    ),
    (((1, 2, 4), False), set[str]()),
    (((4, 4, 4), True), set[str]()),
)
"""Degrees of three stages, whether the LM head is on the first one, and which models are usual."""

LENGTHS = (5, 11, 1, 8)
NEW_TOKENS = 6
BOUNDS = (0, 1, 3, LAYERS)
WIDE = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("name", "degrees", "head_on_first"),
    [
        pytest.param(name, *layout, marks=() if name in usual else pytest.mark.rare)
        for layout, usual in LAYOUTS
        for name in ALL
    ],
)
def test_greedy_tokens_equal_generate(
    name: str, degrees: tuple[int, ...], head_on_first: bool, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, ALL[name], shard="60KB")
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    specs = specs_of(BOUNDS, len(prompts), max(LENGTHS) + NEW_TOKENS, head_on_first=head_on_first)
    with divided(specs, degrees, tmp_path) as stages:
        assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


def hidden_of(stages: Sequence[Stage], batch: MicroBatch, token_ids: Tensor) -> Tensor:
    """Hidden states after `stages`, the last of which has no head."""
    x = token_ids
    for stage in stages:
        result = stage.step(batch, x)
        assert isinstance(result, Tensor)
        x = result
    return x


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("wide", 3), ("wide", 4), ("bloom", 8)),
        *(pytest.param(*case, marks=pytest.mark.rare) for case in (("wide", 8), ("bloom", 4))),
        *(
            pytest.param(name, bits, marks=pytest.mark.rare)
            for name in ("llama", "gpt_neox", "opt-post-norm", "qwen3")
            for bits in (3, 4, 8)
        ),
    ],
)
def test_hidden_states_are_those_of_the_whole_stage(name: str, bits: int, tmp_path: Path) -> None:
    """The same codes: only the order of sums differs. The wide model has five groups."""
    save_tiny(tmp_path, WIDE if name == "wide" else CONFIGS[name])
    specs = specs_of((0, 1, 2, LAYERS if name != "wide" else 3), 3, 16, bits)[:2]
    batch = batch_in_ranges([0, 1, 2], [0, 0, 0], [4, 1, 9], slot_tokens=16)
    token_ids = torch.arange(14) * 13 % VOCABULARY
    whole = [load_ranks(spec, 1, tmp_path)[0] for spec in specs]
    expected = hidden_of(whole, batch, token_ids)
    with divided(specs, (2, 4), tmp_path) as stages:
        found = hidden_of(stages, batch, token_ids)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_rank_holds_its_part_of_the_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, WIDE)
    (spec,) = specs_of((0, 3), 2, 16, 4)
    whole = load_ranks(spec, 1, tmp_path)[0].stats()
    ranks = [stage.stats() for stage in load_ranks(spec, 2, tmp_path)]
    total = sum(each.weight_bytes for each in ranks)
    norms, exponents = 7 * 256 * 4, 3 * 2 * 256 * 2  # of the rows whose columns are divided
    assert total == whole.weight_bytes + norms + exponents
    assert sum(each.kv_cache_bytes for each in ranks) == whole.kv_cache_bytes


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.rare)])
@pytest.mark.parametrize(
    "name",
    [
        *UNLIKE,
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in (*MORE_CONFIGS, *STATE_CONFIGS, *LATENT_CONFIGS)
            if name not in (*UNLIKE, "granitemoehybrid")  # whose entries fit one width alone
        ),
    ],
)
def test_a_rank_holds_the_bytes_of_its_plan(name: str, degree: int, tmp_path: Path) -> None:
    """In every kind of layer, with keys, values and states; the first rank has the biases of what
    is summed over experts.
    """
    save_tiny(tmp_path, type(ALL[name]).from_dict(ALL[name].to_dict() | {"hidden_size": 96}))
    plain = Processor(instruction_sets=frozenset())
    whole, device = model_shape(tmp_path), SimpleNamespace(processor=plain)
    slots, tokens = 3, 8
    workload = Workload(global_batch=slots, prompt_length=tokens - 1, new_tokens=1)
    dtype = "bfloat16"
    for bits in (16, 4):
        (spec,) = specs_of((0, LAYERS), slots, tokens, bits, dtype=dtype)
        for rank, stage in enumerate(load_ranks(spec, degree, tmp_path, processor=plain)):
            shape = shape_of_ranks(whole, degree, range(rank, rank + 1))
            layers = stage._model.get_decoder().layers
            kept, counted = 0, 0
            for index, layer in enumerate(layers):
                own = shape.layer(index)
                experts = own.experts
                left_out = 0
                if rank and experts is not None and experts.has_biases:
                    left_out = 2 * experts.count * own.hidden_size
                expected = layer_weight_bytes(own, bits, device, dtype) - left_out
                assert module_nbytes(layer) == expected, (index, rank)
                kept += kv_cache_bytes_per_layer(own, workload, 16, dtype)
                counted += expected
            stats = stage.stats()
            assert stats.kv_cache_bytes == kept
            held = len(stage._cache.forms(tokens=1))
            assert held == cache_tensors(16, [shape.layer(i) for i in range(LAYERS)])
            ends = embedding_bytes(shape, dtype) + norm_bytes(shape, dtype)
            ends += head_bytes(shape, dtype, on_first=True)
            buffers = sum(b.nbytes for n, b in stage._model.named_buffers() if "embed" in n)
            assert stats.weight_bytes == counted + ends + buffers
            largest = largest_rank_shape(whole, degree)
            for index in range(LAYERS):
                most = layer_weight_bytes(largest.layer(index), bits, device, dtype)
                assert module_nbytes(layers[index]) <= most


def test_each_rank_keeps_its_layers_in_the_cache(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_tiny(folder, WIDE)
    (spec,) = specs_of((0, 3), 2, 16, 4)
    spec = replace(spec, stages=2)
    batch, token_ids = batch_in_ranges([0], [0], [9], slot_tokens=16), torch.arange(9)
    found = []
    for files in (6, 6):
        with divided([spec], (2,), folder, cache=CacheSettings(str(cache))) as stages:
            found.append(hidden_of(stages, batch, token_ids))
        assert len(list(cache.glob("*.safetensors"))) == files
    assert torch.equal(*found)
    load_ranks(spec, 4, folder, cache=CacheSettings(str(cache)))
    assert len(list(cache.glob("*.safetensors"))) == 6 + 12


def test_keys_in_8_bit_are_rounded_by_the_heads_of_the_rank(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS["qwen2"])
    keys = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) * 8
    importance = [LayerImportance({}, keys)] * LAYERS
    prompts = random_prompts(LENGTHS)
    specs = specs_of((0, LAYERS), len(prompts), 20, kv_bits=8)
    found = []
    for degree in (1, 2, 4):
        with divided(specs, (degree,), tmp_path, importance=importance) as stages:
            found.append(generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == reference(model, prompts[0], NEW_TOKENS)


def test_weights_are_rounded_by_the_inputs_of_the_whole(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    draws = torch.Generator().manual_seed(0)

    def statistics(width: int) -> InputStatistics:
        squares = torch.rand(width, generator=draws).square()
        return InputStatistics(squares, 3 * squares.sqrt())

    widths = {"self_attn.q_proj": 48, "self_attn.o_proj": 48, "mlp.down_proj": 80}
    own = LayerImportance({name: statistics(w) for name, w in widths.items()}, torch.ones(2, 8))
    spec = specs_of((0, 2, LAYERS), 2, 16, 3)[0]
    batch, token_ids = batch_in_ranges([0], [0], [9], slot_tokens=16), torch.arange(9)
    expected = hidden_of(load_ranks(spec, 1, tmp_path, importance=[own] * 2), batch, token_ids)
    with divided([spec], (2,), tmp_path, importance=[own] * 2) as stages:
        assert torch.allclose(hidden_of(stages, batch, token_ids), expected, atol=1e-4)


def test_ranks_meet_again_without_loading(tmp_path: Path) -> None:
    """After a fault the ranks that are left keep their weights and join another group."""
    model = save_tiny(tmp_path, CONFIGS["llama"])
    (spec,) = specs_of((0, LAYERS), 1, 20)
    ranks = load_ranks(spec, 2, tmp_path)
    (prompt,) = random_prompts((7,))
    for _ in range(2):
        with following(ranks) as leader:
            tokens = generate([leader], [prompt], NEW_TOKENS, prefill=1, decode=1)
            assert tokens == [reference(model, prompt, NEW_TOKENS)]


def test_a_rank_that_has_left_computes_nothing_and_forgets_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    (spec,) = specs_of((0, LAYERS), 1, 20)
    first, second = load_ranks(spec, 2, tmp_path)
    for stage, group in zip((first, second), thread_groups(2), strict=True):
        stage.join(group)
    first.leave()
    first.forget_parked()
    with pytest.raises(RuntimeError, match="rank 0 of stage 0 has not joined"):
        first.step(batch_in_ranges([0], [0], [3]), torch.arange(3))
    with pytest.raises(StageLostError):
        follow(second, second._group)


def test_a_rank_joins_in_its_own_place_alone(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    (spec,) = specs_of((0, LAYERS), 1, 20)
    first, second = load_ranks(spec, 2, tmp_path)
    groups = thread_groups(2)
    first.join(groups[0])
    for group in (groups[0], thread_groups(3)[1]):
        with pytest.raises(ValueError, match="rank 1 of 2 cannot join as rank"):
            second.join(group)


def test_a_rank_that_has_not_joined_computes_nothing(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    (spec,) = specs_of((0, LAYERS), 1, 20)
    first, _ = load_ranks(spec, 2, tmp_path)
    with pytest.raises(RuntimeError, match="rank 0 of stage 0 has not joined"):
        first.step(batch_in_ranges([0], [0], [3]), torch.arange(3))


def stored_as_gptq(folder: Path) -> None:
    """Make the linears of a saved model's layers, of experts each, 4-bit GPTQ weights in groups of
    16.
    """
    (path,) = folder.glob("*.safetensors")
    tensors, draws = load_file(path), torch.Generator().manual_seed(0)
    for name, weight in list(tensors.items()):
        if ".layers." not in name or weight.dim() < 2 or name.endswith(".gate.weight"):
            continue
        del tensors[name]
        tensors |= gptq_of(name.removesuffix(".weight"), *weight.shape, draws)
    save_file(tensors, path)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    (folder / "quantize_config.json").write_text(json.dumps(settings))


def gptq_of(module: str, rows: int, columns: int, draws: torch.Generator) -> dict[str, Tensor]:
    coded = GroupCodes(
        codes=torch.randint(16, (rows, columns), generator=draws, dtype=torch.uint8),
        scale=(torch.rand(rows, columns // 16, generator=draws) * 0.02).half(),
        zero=torch.full((rows, columns // 16), 8, dtype=torch.uint8),
        group_of_column=torch.arange(columns, dtype=torch.int32) // 16,
        bits=4,
    )
    return {f"{module}.{part}": each for part, each in gptq_tensors(coded, 1).items()}


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.rare)])
def test_a_gptq_checkpoint_is_divided(name: str, tmp_path: Path) -> None:
    """Four ranks have half of a group of an expert's columns each."""
    save_tiny(tmp_path, EVERY_CONFIG[name])
    stored_as_gptq(tmp_path)
    spec = specs_of((0, 2, LAYERS), 2, 16, 4)[0]
    batch, token_ids = batch_in_ranges([0], [0], [9], slot_tokens=16), torch.arange(9)
    expected = hidden_of(load_ranks(spec, 1, tmp_path), batch, token_ids)
    for degree in (2, 4):
        with divided([spec], (degree,), tmp_path) as stages:
            assert torch.allclose(hidden_of(stages, batch, token_ids), expected, atol=1e-4)


def test_a_model_that_cannot_be_divided_so_often_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["opt"])
    (spec,) = specs_of((0, LAYERS), 1, 20)
    with pytest.raises(SpecError, match=r"4 attention heads.*8 ranks; choose at most 4"):
        load_ranks(spec, 8, tmp_path)
