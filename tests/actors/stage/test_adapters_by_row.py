"""Requests that choose adapters, in the same micro-batches: token for token as float32 `generate`
on a model that the adapter was added to by hand, and those without one as on the model alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.messages import Request, Sampling
from actors.schedule.orca import OrcaScheduler
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.static import StaticScheduler
from actors.stage.layers.own_layers import own_layers
from actors.stage.stage import Stage
from planner.adapters import adapter_folders, ranks_of, with_adapters
from planner.cluster.accelerators import find_accelerator
from planner.cluster.device import Device
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from planner.model.tensor_parallel import largest_rank_shape
from quant.checkpoint.stored_tensors import ADAPTER_WEIGHTS
from quant.common.errors import CheckpointError
from quant.linear import QuantizedLinear
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided
from tests.quant.adapters import adapter_tensors, merge, save_adapter
from tests.quant.stored_formats import FORMATS, store

LENGTHS, NEW_TOKENS = (5, 11, 1, 8, 3, 6), 8
CPU = Device(find_accelerator("CPU"), "here", 0, 1 << 30, None, 1)
OF_ROW = ("", "first", "second", "first", "", "second")
RANKS = {"first": 4, "second": 7}
TARGETS = {
    "qwen2": {"first": ("q_proj", "v_proj", "down_proj"), "second": ("o_proj", "up_proj")},
    "phi3": {"first": ("qkv_proj", "o_proj"), "second": ("gate_up_proj", "down_proj")},
    "gpt_neox": {"first": ("query_key_value",), "second": ("dense", "dense_4h_to_h")},
    "opt": {"first": ("fc1", "fc2"), "second": ("out_proj", "k_proj")},
    "gemma2": {"first": ("q_proj", "gate_proj"), "second": ("v_proj", "down_proj")},
    "deepseek_v3": {"first": ("q_a_proj", "q_b_proj"), "second": ("kv_a_proj_with_mqa", "o_proj")},
    "qwen3_moe": {"first": ("q_proj", "o_proj"), "second": ("k_proj", "v_proj")},
    "qwen2_moe": {"first": ("q_proj",), "second": ("shared_expert.up_proj", "o_proj")},
}
USUAL = ("qwen2",)


@dataclass(frozen=True)
class Adapted:
    """A model's folder, `NAME=FOLDER` of its adapters, and what each row is to get."""

    folder: Path
    adapters: tuple[str, ...]
    tokens: list[list[int]]


def adapted(tmp_path: Path, name: str, form: str | None = None) -> Adapted:
    """Of a model of family `name`, stored quantized in a `form` of `tests.quant.stored_formats`."""
    model = save_tiny(tmp_path / "base", EVERY_CONFIG[name])
    if form is not None:
        plain = store(tmp_path / "base", form)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    models: dict[str, Any] = {"": model}
    adapters = []
    for seed, (adapter, rank) in enumerate(RANKS.items()):
        tensors = adapter_tensors(model, TARGETS[name][adapter], rank, seed)
        assert tensors
        adapters.append(f"{adapter}={save_adapter(tmp_path / adapter, tensors, rank)}")
        models[adapter] = deepcopy(model)
        merge(models[adapter], tensors, 16 / rank)
    prompts = random_prompts(LENGTHS)
    each = {key: references(own, prompts, NEW_TOKENS) for key, own in models.items()}
    tokens = [each[adapter][row] for row, adapter in enumerate(OF_ROW)]
    assert each["first"] != each[""] != each["second"]
    return Adapted(tmp_path / "base", tuple(adapters), tokens)


def generated(stages: Sequence[Stage], scheduler: Scheduler | None = None) -> list[list[int]]:
    prompts, spec = random_prompts(LENGTHS), stages[0].spec
    if scheduler is None:
        sizes = QueueSizes(spec.slots, 2, 3, spec.max_tokens)
        scheduler = StaticScheduler(sizes, len(stages))
    rows = enumerate(zip(prompts, OF_ROW, strict=True))
    scheduler.add(
        [
            Request(str(i), ids, NEW_TOKENS, Sampling(), expected_tokens=1, adapter=name)
            for i, (ids, name) in rows
        ]
    )
    found = {}
    for finished in drive(scheduler, LocalPipeline(stages)):
        found |= {each.custom_id: list(each.token_ids) for each in finished}
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.rare) for n in TARGETS]
)
def test_each_row_has_its_own(name: str, tmp_path: Path) -> None:
    case = adapted(tmp_path, name)
    for bounds, degrees in (
        ((0, LAYERS), (1,)),
        ((0, 1, 3, LAYERS), (1, 2, 1)),
        ((0, LAYERS), (2,)),
    ):
        longest = max(LENGTHS) + NEW_TOKENS
        specs = specs_of(bounds, len(LENGTHS), longest, adapters=case.adapters)
        with divided(specs, degrees, case.folder) as stages:
            assert generated(stages) == case.tokens


@pytest.mark.parametrize("policy", [pytest.param("orca", marks=pytest.mark.rare), "s3"])
def test_requests_that_move_and_are_preempted_keep_theirs(policy: str, tmp_path: Path) -> None:
    case, longest = adapted(tmp_path, "qwen2"), max(LENGTHS) + NEW_TOKENS
    kv_tokens, slots = 2 * longest, 8
    specs = specs_of(
        (0, 2, LAYERS),
        slots,
        longest,
        adapters=case.adapters,
        kv_tokens=kv_tokens,
        parked_tokens=10**6,
    )
    stages = [Stage(spec, case.folder, torch.device("cpu"), Processor()) for spec in specs]
    parking = {"park_tokens_from": 1, "parked_tokens": 10**6} if policy == "s3" else {}
    sizes = QueueSizes(
        slots,
        1,
        4,
        longest,
        policy,
        kv_tokens=kv_tokens,
        max_batch_size=4,
        prefill_chunk_tokens=4,
        **parking,
    )
    scheduler = (S3Scheduler if policy == "s3" else OrcaScheduler)(sizes, len(stages))
    assert generated(stages, scheduler) == case.tokens
    assert bool(scheduler.supervision.parked) == (policy == "s3")


@pytest.mark.parametrize("form", ["awq", pytest.param("int8", marks=pytest.mark.rare)])
def test_codes_that_are_kept_have_adapters_beside_them(form: str, tmp_path: Path) -> None:
    case = adapted(tmp_path, "qwen2", form)
    stage = stage_of(case, FORMATS[form][2], adapters=case.adapters)
    assert any(isinstance(module, QuantizedLinear) for module in stage._model.modules())
    assert generated([stage]) == case.tokens


def stage_of(case: Adapted, bits: int, **others: Any) -> Stage:
    longest = max(LENGTHS) + NEW_TOKENS
    (spec,) = specs_of((0, LAYERS), len(LENGTHS), longest, bits, **others)
    return Stage(spec, case.folder, torch.device("cpu"), Processor())


@pytest.mark.parametrize("bits", [16, 4])
def test_rows_without_one_are_as_without_any_bit_for_bit(bits: int, tmp_path: Path) -> None:
    """And over quantized weights an adapter changes what it changes of a merged model, nearly."""
    case = adapted(tmp_path, "qwen2")
    beside, alone = stage_of(case, bits, adapters=case.adapters), stage_of(case, bits)
    hidden = []
    for stage in (beside, alone):
        requests = [
            Request(str(i), ids, 1, Sampling(), adapter=name if stage is beside else "")
            for i, (ids, name) in enumerate(zip(random_prompts(LENGTHS), OF_ROW, strict=True))
        ]
        scheduler = StaticScheduler(
            QueueSizes(len(LENGTHS), len(LENGTHS), 1, stage.spec.max_tokens), 1
        )
        scheduler.add(requests)
        found = scheduler.next_batch()
        assert found is not None
        batch, token_ids = found
        stage._cache.prepare(batch)
        if stage._adapters is not None:
            stage._adapters.admit(batch.admitted)
        with torch.inference_mode():
            hidden.append(stage._hidden(batch, torch.from_numpy(token_ids)))
    rows = [each for n, name in zip(LENGTHS, OF_ROW, strict=True) for each in [not name] * n]
    is_base = torch.tensor(rows)
    assert torch.equal(hidden[0][is_base], hidden[1][is_base])
    assert not torch.isclose(hidden[0][~is_base], hidden[1][~is_base]).all(-1).any()


def test_an_adapter_over_kernels_adds_what_it_adds_to_their_weights(tmp_path: Path) -> None:
    case = adapted(tmp_path, "qwen2")
    stage = stage_of(case, 4, adapters=case.adapters)
    layer: Any = own_layers(stage._model)[2].layer
    linear, adapters = layer.self_attn.q_proj, stage._adapters
    assert adapters is not None
    x = torch.randn(3, linear.in_features)
    plain = linear(x)
    adapters.rows = {1: torch.tensor([0, 2])}
    changed = linear(x)
    tensors = load_file(tmp_path / "first" / ADAPTER_WEIGHTS)
    place = "base_model.model.model.layers.2.self_attn.q_proj"
    up, down = (tensors[f"{place}.lora_{part}.weight"] for part in "BA")
    wanted = plain[[0, 2]] + 16 / 4 * (x[[0, 2]] @ down.t() @ up.t())
    torch.testing.assert_close(changed[[0, 2]], wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(changed[1], plain[1])


def test_planned_bytes_are_those_of_stages(tmp_path: Path) -> None:
    case = adapted(tmp_path, "qwen2")
    shape = model_shape(case.folder)
    planned = with_adapters(shape, ranks_of(adapter_folders(case.adapters), shape))
    assert planned.fingerprint() == shape.fingerprint()
    for degree in (1, 2):
        before, after = (
            sum(
                layer_weight_bytes(largest_rank_shape(own, degree), 16, CPU, "float32")
                for _ in range(LAYERS)
            )
            for own in (shape, planned)
        )
        specs = specs_of((0, LAYERS), 2, 32), specs_of((0, LAYERS), 2, 32, adapters=case.adapters)
        held = []
        for own in specs:
            with divided(own, (degree,), case.folder) as stages:
                held.append(stages[0].stats().weight_bytes)
        assert held[1] - held[0] == after - before > 0


def test_a_deterministic_stage_computes_rows_alike_in_any_company(tmp_path: Path) -> None:
    case = adapted(tmp_path, "qwen2")
    stage = stage_of(case, 16, adapters=case.adapters, deterministic=True)
    assert generated([stage]) == case.tokens


def test_what_a_layer_has_not_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", EVERY_CONFIG["qwen2"])
    shape = model_shape(tmp_path / "base")
    tensors = adapter_tensors(model, ("q_proj",), 65)
    large = save_adapter(tmp_path / "large", tensors, 65)
    with pytest.raises(CheckpointError, match=r"rank 65 .* at most 64 .* merge it"):
        ranks_of({"a": str(large)}, shape)
    tensors = adapter_tensors(model, ("layers.1.self_attn.q_proj",), 2)
    renamed = {name.replace("layers.1.", "layers.9."): own for name, own in tensors.items()}
    other = save_adapter(tmp_path / "other", renamed, 2)
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.q_proj .* none that"):
        ranks_of({"a": str(other)}, shape)
    wide = replace(shape, hidden_size=2 * shape.hidden_size)
    small = save_adapter(tmp_path / "small", tensors, 2)
    with pytest.raises(CheckpointError, match=r"which in .* is .* there"):
        ranks_of({"a": str(small)}, wide)
