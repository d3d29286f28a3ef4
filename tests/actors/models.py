"""Tiny random checkpoints of every supported architecture, and pipelines over them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from actors.messages import Request, Sampling
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage.partial_model import register_models
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from quant.rounding.importance import LayerImportance
from quant.scheme import Processor
from tests.actors.configs import VOCABULARY
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline
from tests.made_once import made_once


def save_tiny(folder: Path, config: PretrainedConfig, seed: int = 0, shard: str = "5GB") -> Any:
    """Write a random checkpoint of `config` and return the model that was saved."""
    made = f"{type(config).__name__} {config.to_json_string()} {seed} {shard}"
    if made not in _saved:
        model, kept = random_model(config, seed), TemporaryDirectory(prefix="llmpq-")
        model.save_pretrained(kept.name, max_shard_size=shard)
        _saved[made] = model, kept
    model, kept = _saved[made]
    shutil.copytree(kept.name, folder, dirs_exist_ok=True)
    return deepcopy(model)


_saved: dict[str, tuple[Any, TemporaryDirectory[str]]] = {}
"""Each model that was written, and a folder of it: many tests ask for the same."""


def random_model(config: PretrainedConfig, seed: int) -> Any:
    register_models()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if name.endswith("A_log"):
                parameter.sub_(5.0)  # as it is made, a state forgets all within a token
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.5)
    return model


def stages_of(
    folder: Path,
    bounds: Sequence[int],
    slots: int,
    max_tokens: int,
    bits: int | Sequence[int] = 16,
    dtype: str = "float32",
    processor: Processor = Processor(),  # noqa: B008  (frozen)
    head_on_first: bool = False,
    kv_bits: int = 16,
    parked_tokens: int = 0,
    importance: Sequence[LayerImportance] | None = None,
) -> list[Stage]:
    """Stages in this process; stage j holds layers `bounds[j]` up to `bounds[j + 1]`, of all of
    which `importance` tells.
    """
    specs = specs_of(
        bounds,
        slots,
        max_tokens,
        bits,
        dtype=dtype,
        head_on_first=head_on_first,
        kv_bits=kv_bits,
        parked_tokens=parked_tokens,
    )
    return [
        Stage(
            spec,
            folder,
            torch.device("cpu"),
            processor,
            importance=importance and importance[spec.layers.start : spec.layers.stop],
        )
        for spec in specs
    ]


def specs_of(
    bounds: Sequence[int],
    slots: int,
    max_tokens: int,
    bits: int | Sequence[int] = 16,
    **others: Any,
) -> list[StageSpec]:
    """The specifications of `stages_of`, in float32 unless `others` say so."""
    spans = [range(a, b) for a, b in pairwise(bounds)]
    all_bits = [bits] * bounds[-1] if isinstance(bits, int) else list(bits)
    return [
        StageSpec(
            index=j,
            stages=len(spans),
            layers=span,
            bitwidths=tuple(all_bits[i] for i in span),
            slots=slots,
            max_tokens=max_tokens,
            **{"dtype": "float32", "kv_tokens": slots * max_tokens} | others,
        )
        for j, span in enumerate(spans)
    ]


def random_prompts(lengths: Sequence[int], seed: int = 7) -> list[tuple[int, ...]]:
    """Prompts of the given lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths
    ]


def generate(
    stages: Sequence[Stage],
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int | Sequence[int],
    prefill: int,
    decode: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  (frozen)
) -> list[list[int]]:
    """New tokens of every prompt through the stages, in the order of the prompts."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    requests = [
        Request(str(i), *row) for i, row in enumerate(zip(prompts, counts, each, strict=True))
    ]
    results: dict[str, list[int]] = {}
    spec = stages[0].spec
    sizes = QueueSizes(spec.slots, prefill, decode, spec.max_tokens)
    scheduler = StaticScheduler(sizes, len(stages))
    scheduler.add(requests)
    for finished in drive(scheduler, LocalPipeline(stages)):
        results |= {f.custom_id: list(f.token_ids) for f in finished}
    return [results[str(i)] for i in range(len(prompts))]


_answers: dict[str, list[int]] = {}
"""The longest greedy answer so far, by all that it depends on: many tests ask the same."""


def reference(
    model: Any, prompt: tuple[int, ...], new_tokens: int, ignore_eos: bool = False, **options: Any
) -> list[int]:
    """What transformers' `generate` adds to one unpadded prompt; greedy unless `options` say so."""
    if options.get("do_sample"):
        return _generated(model, [prompt], new_tokens, ignore_eos, options)[0]
    (tokens,) = references(model, [prompt], new_tokens, ignore_eos, **options)
    return tokens


def references(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int | Sequence[int],
    ignore_eos: bool = False,
    **options: Any,
) -> list[list[int]]:
    """What transformers' greedy `generate` adds to prompts that it pads on the left."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    content = f"{_content(model)} {ignore_eos} {sorted(options.items())}"
    asked = [f"{content} {prompt}" for prompt in prompts]
    most = max(counts)
    missing = {
        prompt: key
        for key, prompt, count in zip(asked, prompts, counts, strict=True)
        if key not in _answers or _answers[key][0] < count
    }
    if missing:

        def written(path: Path) -> None:
            answers = _generated(model, list(missing), most, ignore_eos, options)
            path.write_text(json.dumps(answers))

        file = made_once(f"{content} {most} {list(missing)}", ".json", written)
        answers = json.loads(file.read_text())
        _answers.update((k, [most, *a]) for k, a in zip(missing.values(), answers, strict=True))
    return [_answers[key][1 : 1 + count] for key, count in zip(asked, counts, strict=True)]


def named(answers: Sequence[list[int]]) -> dict[str, list[int]]:
    """Answers by the number of their request."""
    return {str(i): each for i, each in enumerate(answers)}


def _content(model: Any) -> str:
    """A digest of all numbers of `model`, and what else its answers depend on."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for values in (model.config, model.generation_config):
        digest.update(values.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _generated(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    ignore_eos: bool,
    options: dict[str, Any],
) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + list(each) for each in prompts])
    there = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    options = {"do_sample": False} | ({"eos_token_id": None} if ignore_eos else {}) | options
    ends = options.get("eos_token_id", model.generation_config.eos_token_id)
    ends = {ends} if isinstance(ends, int | None) else {*ends}
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=there.to(model.device),
        max_new_tokens=new_tokens,
        pad_token_id=0,
        **options,
    )
    rows = out[:, longest:].tolist()
    return [row[: next((i for i, t in enumerate(row, 1) if t in ends), None)] for row in rows]
