"""Kernels that a layer starts, counted as they are dispatched, against those that plans count."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from actors.attention.kv_cache import CacheForm
from actors.attention.ragged import RaggedContext
from actors.messages import Admission, MicroBatch, Sampled, Sampling
from actors.stage.layer_cache import make_cache
from actors.stage.layers import own_layers
from actors.stage.model_config import with_layers
from actors.stage.partial_model import empty_model, keep_stage
from actors.stage.stage import Stage, run_decoder
from benchmarks.gpu.counting import META, Operations, Started, Step
from planner.costs.roofline import layer_launches
from planner.model.finding import shape_from_config
from planner.model.layer_parts import Experts
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, STATE_CONFIGS
from tests.actors.models import save_tiny, stages_of
from tests.actors.own_kernels import pretend_own_kernels
from tests.planner.kinds import tiny_experts

COUNTED = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "opt", "bloom", "phi3")
USUAL = (("llama", 16), ("llama", 8), ("qwen3", 16), ("opt", 16), ("bloom", 8))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("name", "kv_bits"),
    [
        pytest.param(name, kv_bits, marks=() if (name, kv_bits) in USUAL else pytest.mark.rare)
        for name in COUNTED
        for kv_bits in (16, 8)
    ],
)
def test_a_layer_starts_as_many_kernels_as_plans_count(name: str, own: bool, kv_bits: int) -> None:
    """In a decode step of unlike requests; the queries of the tiny OPT are copied first, as a token
    of its heads is no whole number of octets.
    """
    step = Step((9, 7, 5, 9), kv_bits=kv_bits, own_kernels=own)
    counted = (step.count(EVERY_CONFIG[name], 2) - step.count(EVERY_CONFIG[name], 1)).kernels
    shape = shape_from_config(name, json.loads(EVERY_CONFIG[name].to_json_string()))
    assert abs(counted.total() - layer_launches(shape, kv_bits, own)) <= (1 if own else 2)
    if own:
        assert counted.total() <= 12, counted


def started_by_mixer(config: PretrainedConfig, before: int, new: int) -> int:
    """Kernels of the third layer for `new` tokens of each of three requests that have some."""
    found = []
    for layers in (range(2), range(3)):
        model = empty_model(with_layers(config, len(layers)))
        keep_stage(model, layers, is_first=False, is_last=False, has_head=False)
        model.to_empty(device="cpu").float()
        form = CacheForm(torch.float32, torch.device("cpu"), slots=3)
        cache, slots, ones = make_cache(model.config, layers, 900, form), np.arange(3), np.ones(3)
        passes = [(0, before)] * bool(before) + [(before, new)]
        for start, count in passes:
            batch = MicroBatch(slots, *(np.int64(n * ones) for n in (start, count)), 300 * slots)
            hidden, started = torch.zeros(3 * count, config.hidden_size), Started()
            with torch.inference_mode(), Operations(started):
                run_decoder(model, RaggedContext.of(cache, batch), hidden)
        found.append(started)
    return (found[1] - found[0]).kernels.total()


@pytest.mark.rare
def test_a_mixer_starts_as_many_kernels_as_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are float32 already need no casts, of which a GPU's mixers start some."""
    monkeypatch.setattr("actors.attention.delta.rule.can_run", lambda _: False)
    config = STATE_CONFIGS["qwen3_5"]
    shape = shape_from_config("tiny", json.loads(config.to_json_string())).layer(2)
    assert shape.delta is not None
    counted = started_by_mixer(config, 5, 1)
    assert counted <= layer_launches(shape) <= counted + 12
    three, four = (started_by_mixer(config, 0, tokens) for tokens in (130, 194))
    assert four - three == 9


def test_experts_start_as_many_kernels_as_plans_count() -> None:
    asked = torch.tensor([[0, 3], [3, 1], [0, 1]])
    model = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=8, num_experts=5, num_experts_per_tok=2))
    module, started = tiny_experts(Experts(5, 2, 4), 8), Started()
    with torch.inference_mode(), Operations(started):
        model(torch.zeros(3, 8))
        module(torch.zeros(3, 8), asked, torch.zeros(3, 2))
    conjugates = sum(n for name, n in started.kernels.items() if name.startswith("resolve"))
    several = 4  # of sorting, beside its one operation, and of numbers that go to the host
    planned = 22 + 2 * 3
    assert abs(started.kernels.total() - conjugates + several - planned) <= 2


class Waits(TorchDispatchMode):
    """Counts what the host waits for: copies to the device from memory that is not pinned, and, as
    they are patched in, copies to the host and the wait for a stream. Tensors without memory have
    nothing else to tell the host: reading them fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        monkeypatch.setattr("actors.stage.sampler.on_host", self._on_host)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch, "tensor", partial(self._tensor, torch.tensor))

    def synchronize(self) -> None:
        self.found["stream"] += 1

    def _tensor(self, make: Any, data: Any, **options: Any) -> Tensor:
        made: Tensor = make(data, **options)
        if made.is_meta:
            self.found["numbers of Python"] += 1
        return made

    def _on_host(self, *tensors: Tensor) -> list[np.ndarray]:
        assert all(tensor.is_meta for tensor in tensors)
        self.found["tokens"] += 1
        return [torch.ones_like(tensor, device="cpu").numpy() for tensor in tensors]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        source = args[1] if func is aten.copy_.default else args[0] if args else None
        if isinstance(out, Tensor) and isinstance(source, Tensor) and out.is_meta:
            uploads = source.device.type == "cpu" and func is not aten.empty_like.default
            options = (kwargs or {}).get("non_blocking"), *args
            if uploads and not any(option is True for option in options):
                self.found[func.__name__] += 1
        return out


SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={3: 1.0}, min_tokens=3),
    Sampling(temperature=1.0, presence_penalty=0.5),
)


def on_meta(monkeypatch: pytest.MonkeyPatch, folder: Path, bounds: tuple[int, ...]) -> Stage:
    """The last of the stages of a tiny model, as if on a GPU."""
    for its_own in ("warm_up", "put_own_layers"):  # of a CPU
        monkeypatch.setattr(f"actors.stage.stage.{its_own}", lambda *_: None)
    stage = stages_of(folder, bounds, 4, 20)[-1]
    pretend_own_kernels(monkeypatch)
    stage.device, stage.dtype = META, torch.float16
    stage._model.to(META, torch.float16)
    form = CacheForm(torch.float16, META)
    stage._cache = make_cache(stage._model.config, stage.spec.layers, 80, form)
    own_layers.put_own_layers(stage._model, stage.spec.layers, stage._cache, stage.dtype)
    return stage


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "opt", "bloom"])
@pytest.mark.parametrize("samples", [True, False])
def test_a_step_waits_for_its_gpu_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, samples: bool
) -> None:
    """Whether it samples, with all ways of choosing and log-probabilities, or not."""
    config = CONFIGS[name.removesuffix("-dynamic")]
    if name.endswith("-dynamic"):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = type(config).from_dict(config.to_dict() | {"rope_parameters": rope})
    save_tiny(tmp_path, config)
    bounds = (0, LAYERS) if samples else (0, 2, LAYERS)
    stage = on_meta(monkeypatch, tmp_path, bounds)
    if not samples:
        stage.spec = replace(stage.spec, stages=3)
    slots = np.arange(4)
    admitted = tuple(
        Admission(slot, str(slot), 9, sampling, prompt_tokens=(3, 5), top_logprobs=slot or None)
        for slot, sampling in enumerate(SAMPLINGS)
    )
    begins = 20 * slots
    prompts = MicroBatch(slots, 0 * slots, np.array([3, 4, 3, 5]), begins, admitted)
    steps = (MicroBatch(slots, prompts.counts + i, 0 * slots + 1, begins) for i in range(2))
    for batch in (prompts, *steps):
        rows = int(batch.counts.sum())
        inputs = torch.ones(rows, dtype=torch.int64)
        if not stage.spec.is_first:
            inputs = torch.zeros(rows, stage.hidden_size, dtype=torch.float16)
        with Waits(monkeypatch) as waits:
            result = stage.step(batch, inputs)
        assert isinstance(result, Sampled) == samples
        assert waits.found == {"tokens" if samples else "stream": 1}
