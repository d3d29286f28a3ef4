"""Stages whose embedding and LM head have 6 or 8 bit: `transformers` with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.stage.ends import path_of
from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from actors.stage.stage import Stage
from planner.costs.stored_bytes import embedding_bytes, head_bytes, layer_weight_bytes, norm_bytes
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import shape_of_ranks
from quant.backends.kernel_classes import BACKENDS
from quant.checkpoint.reader import Checkpoint
from quant.devices import local_processor
from quant.loading.cache_settings import NO_CACHE, CacheSettings
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import HEAD, InputStatistics, LayerImportance
from quant.rounding.ways import Rounding
from quant.scheme import HEAD_BITWIDTHS, Processor
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, SHARED_CONFIGS
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import load_ranks

LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 6
CODED = HEAD_BITWIDTHS[:-1]
PLAIN = Processor(instruction_sets=frozenset())
CPU = torch.device("cpu")
ALL = EVERY_CONFIG | SHARED_CONFIGS
WIDE = {"hidden_size": 128, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}


def decoded(weight: Tensor, backend: str) -> Tensor:
    return BACKENDS[backend].represent(weight)


def with_coded_ends(model: Any, bits: int) -> Any:
    """`model` with the numbers in place that codes of its embedding and head stand for."""
    for end in {id(e.weight): e for e in (model.get_input_embeddings(), model.lm_head)}.values():
        end.weight.data = decoded(end.weight.data, f"torch_{bits}bit")
    return model


def stages_of(
    folder: Path,
    bounds: tuple[int, ...],
    bits: int,
    cache: CacheSettings = NO_CACHE,
    **others: Any,
) -> list[Stage]:
    slots, most = len(LENGTHS), max(LENGTHS) + NEW_TOKENS
    specs = specs_of(bounds, slots, most, head_bits=bits, **others)
    return [Stage(spec, folder, CPU, PLAIN, cache) for spec in specs]


def reading_all_but(names: Sequence[str]) -> Callable[[Checkpoint, str], Tensor]:
    read = Checkpoint.read

    def refusing(self: Checkpoint, name: str) -> Tensor:
        assert name not in names
        return read(self, name)

    return refusing


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


FAMILIES = {"llama": 6, "llama-tied": 8, "opt-post-norm": 8, "bloom": 6, "gemma3": 6, "gemma4": 8}


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *FAMILIES.items(),
        *(
            pytest.param(n, b, marks=pytest.mark.rare)
            for n in ALL
            for b in CODED
            if FAMILIES.get(n) != b
        ),
    ],
)
def test_tokens_are_those_of_the_decoded_weights(
    name: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both ends are on one stage and share a weight, and where each has its own; from the
    first start on they come from the cache.
    """
    model = save_tiny(tmp_path, ALL[name])
    ends = [f"{path_of(model, e)}.weight" for e in (model.get_input_embeddings(), model.lm_head)]
    with_coded_ends(model, bits)
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    cache = CacheSettings(str(tmp_path / "cache"))
    first = stages_of(tmp_path, (0, LAYERS), bits, cache)
    monkeypatch.setattr(Checkpoint, "read", reading_all_but(ends))
    for bounds, head_on_first in (((0, LAYERS), False), ((0, 2, LAYERS), True)):
        stages = stages_of(tmp_path, bounds, bits, cache, head_on_first=head_on_first)
        assert generate(stages, prompts, NEW_TOKENS, prefill=3, decode=4) == expected, bounds
        for end in ("get_input_embeddings", "get_output_embeddings"):
            found, rounded = (getattr(each[0]._model, end)() for each in (stages, first))
            assert_same(found.packed.state(), rounded.packed.state())
    assert len({*cache.path.glob("*.safetensors")}) == 2 - model_shape(tmp_path).tied_embeddings


def planned(shape: ModelShape, stage: Stage, processor: Processor) -> int:
    spec, device = stage.spec, SimpleNamespace(processor=processor)
    layers = sum(layer_weight_bytes(shape.layer(i), 16, device, spec.dtype) for i in spec.layers)
    held = (shape, spec.dtype, processor)
    embedding = embedding_bytes(*held, with_head=spec.has_head) if spec.is_first else 0
    norm = norm_bytes(shape, spec.dtype) if spec.is_last else 0
    head = head_bytes(*held, on_first=spec.is_first) if spec.has_head else 0
    return layers + embedding + norm + head


@pytest.mark.parametrize("name", ["llama", "llama-tied", "opt-post-norm", "bloom"])
def test_bytes_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS[name])
    for bounds, bits in product(((0, LAYERS), (0, 2, LAYERS)), CODED):
        shape = model_shape(tmp_path).with_all(head_bits=bits)
        for stage in stages_of(tmp_path, bounds, bits, dtype="bfloat16"):
            assert stage.stats().weight_bytes == planned(shape, stage, PLAIN)


@pytest.mark.parametrize(
    ("bits", "dtype", "backend"), [(8, "float32", "onednn_w8a8"), (6, "bfloat16", "int6pack")]
)
def test_a_tied_weight_of_blocks_serves_head_and_embedding(
    bits: int, dtype: str, backend: str, tmp_path: Path
) -> None:
    """Layouts of kernels are read row by row, and held once."""
    vnni = Processor(instruction_sets=frozenset({"avx512_vnni"}))
    if bits == 8 and not onednn_runs_here():
        pytest.skip("no VNNI here, without which 8-bit products saturate")
    values = CONFIGS["llama-tied"].to_dict() | WIDE | {"head_dim": 32}
    config = type(CONFIGS["llama-tied"]).from_dict(values)
    model = save_tiny(tmp_path, config)
    (spec,) = specs_of((0, LAYERS), 1, 16, head_bits=bits, dtype=dtype)
    cache = CacheSettings(str(tmp_path / "cache"))
    Stage(spec, tmp_path, CPU, vnni, cache)
    stage = Stage(spec, tmp_path, CPU, vnni, cache)  # with what the first one kept
    shape = model_shape(tmp_path).with_all(head_bits=bits)
    assert stage.stats().weight_bytes == planned(shape, stage, vnni)
    ids = torch.tensor([[0, 63, 64, 255], [7, 128, 200, 1]])
    found = stage._model.get_input_embeddings()(ids)
    wanted = decoded(model.lm_head.weight.data, backend)[ids].to(found.dtype)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert stage._model.get_output_embeddings().packed is stage._model.get_input_embeddings().packed


def onednn_runs_here() -> bool:
    return bool(torch.backends.mkldnn.is_available()) and "avx512_vnni" in (
        local_processor(CPU).instruction_sets
    )


@pytest.mark.parametrize(("name", "bits"), [("llama-tied", 6), ("gemma3", 8)])
def test_ranks_hold_rows_of_both_ends(name: str, bits: int, tmp_path: Path) -> None:
    model = with_coded_ends(save_tiny(tmp_path, ALL[name]), bits)
    (spec,) = specs_of((0, LAYERS), 2, 16, head_bits=bits)
    whole = model_shape(tmp_path).with_all(head_bits=bits)
    for rank, stage in enumerate(load_ranks(spec, 2, tmp_path, processor=PLAIN)):
        shape = shape_of_ranks(whole, 2, range(rank, rank + 1))
        ends = embedding_bytes(shape, "float32", PLAIN, with_head=True)
        first = 0 if rank == 0 else whole.vocab_size - shape.vocab_size
        part = stage._model.get_input_embeddings()
        ids = torch.arange(first, first + shape.vocab_size)
        with torch.inference_mode():
            torch.testing.assert_close(part(ids), model.get_input_embeddings()(ids))
        head = stage._model.get_output_embeddings()
        assert ends == head.packed.nbytes
        hidden = torch.randn(3, shape.hidden_size)
        logits = hidden @ model.lm_head.weight.data[ids].T
        torch.testing.assert_close(head(hidden), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "bits"), [("llama", 6), ("llama-tied", 6), ("gemma3", 8)])
def test_evaluation_rounds_ends_as_stages_do(name: str, bits: int, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, ALL[name])
    whole = model_shape(tmp_path)
    inputs = InputStatistics(torch.rand(whole.hidden_size) ** 4, torch.ones(whole.hidden_size))
    ends = model.get_input_embeddings(), model.lm_head
    plain, weighed = (
        BACKENDS[f"torch_{bits}bit"].represent(end.weight.data, Rounding(inputs=by))
        for end, by in zip(ends, (inputs if whole.tied_embeddings else None, inputs), strict=True)
    )
    ends[0].weight.data, ends[1].weight.data = plain, weighed
    token_ids = torch.tensor(random_prompts((9, 9)))
    scheme = LayerScheme(bits, planned_for=PLAIN)
    stream = LayerStream(tmp_path, replace(compute_on(CPU, torch.float32), processor=PLAIN))
    hidden = stream.embed(token_ids, scheme, inputs)
    with torch.inference_mode():
        wanted = model.get_input_embeddings()(token_ids)
        torch.testing.assert_close(hidden[..., : wanted.shape[-1]], wanted, rtol=1e-6, atol=1e-6)
        *_, last = stream_layers(stream, token_ids)
        tail = stream.tail(scheme, inputs)
        normed = tail.normed(last.hidden)
        torch.testing.assert_close(tail.logits(normed), model.lm_head(normed), rtol=1e-5, atol=1e-5)
    (spec,) = specs_of((0, LAYERS), 1, 16, head_bits=bits)
    alike = InputStatistics(*[torch.ones(whole.hidden_size)] * 2)
    for seen in (alike, inputs):  # what the cache has of other inputs is not taken
        layer = LayerImportance({HEAD: seen}, torch.ones(whole.kv_heads, whole.head_dim))
        cache = CacheSettings(str(tmp_path / "cache"))
        stage = Stage(spec, tmp_path, CPU, PLAIN, cache, [layer] * LAYERS)
    found = stage._model.get_output_embeddings().packed.rows(torch.arange(9))
    torch.testing.assert_close(found, model.lm_head.weight.data[:9], rtol=1e-6, atol=1e-6)
