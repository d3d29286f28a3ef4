"""Deterministic stages: a request gets the same bit for bit, whatever is computed with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from actors.logprobs import TokenLogprobs
from actors.messages import (
    MicroBatch,
    Request,
    Sampled,
    Sampling,
    TokenIds,
)
from actors.stage.stage import Stage
from quant.common.errors import DeviceError
from quant.devices import local_processor
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS, STATE_CONFIGS, VOCABULARY
from tests.actors.interleaving import LARGEST_SPARE, RandomPolicy
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, references, save_tiny, specs_of
from tests.actors.thread_ranks import divided

CPU = torch.device("cpu")
LENGTHS = (5, 70, 1, 33, 2, 40)
NEW_TOKENS = 4
ROOM = max(LENGTHS) + NEW_TOKENS + LARGEST_SPARE
SLOTS, KV_TOKENS = 6, 6 * ROOM
KINDS = {
    "odd sizes": CONFIGS["gpt_neox"],
    "experts": EVERY_CONFIG["qwen3_moe"],
    "latents": EVERY_CONFIG["deepseek_v3"],
    "states": STATE_CONFIGS["qwen3_5"],
    "kernels": LlamaConfig(
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}

Told = dict[tuple[str, int], tuple[int, TokenLogprobs]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("model") for name in KINDS}
    for name, config in KINDS.items():
        save_tiny(made[name], config)
    return made


def stages(folder: Path, bounds: Sequence[int], **others: Any) -> list[Stage]:
    specs = specs_of(bounds, SLOTS, ROOM, **{"deterministic": True} | others)
    return [Stage(spec, folder, CPU, local_processor(CPU)) for spec in specs]


def requests() -> list[Request]:
    """Half of them greedy, half drawn; each tells the log-probabilities of its tokens."""

    def sampling(i: int) -> Sampling:
        return Sampling(temperature=i % 2, top_p=0.9, ignore_eos=True)

    return [
        Request(str(i), prompt, NEW_TOKENS, sampling(i), top_logprobs=5)
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]


class Listening(LocalPipeline):
    """Notes what each request is told of each of its tokens."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self.told: Told = {}
        self._names: dict[int, str] = {}

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        self._names |= {each.slot: each.custom_id for each in batch.admitted}
        sampled = super().submit(batch, token_ids)
        logprobs = {} if sampled.logprobs is None else sampled.logprobs.by_row()
        for place, row in enumerate(batch.sampled_rows.tolist()):
            key = self._names[int(batch.slots[row])], int(batch.lengths[row])
            self.told[key] = int(sampled.token_ids[place]), logprobs[place]
        return sampled


def told_in_company(stages: Sequence[Stage]) -> Told:
    pipeline = Listening(stages)
    policy = RandomPolicy(SLOTS, KV_TOKENS, 0, lambda ranges: None)
    policy.run(requests(), pipeline.submit)
    assert policy.kinds == {"prefill", "decode", "mixed"}
    return pipeline.told


def told_alone(stages: Sequence[Stage]) -> Told:
    pipeline = Listening(stages)
    for request in requests():
        policy = RandomPolicy(SLOTS, KV_TOKENS, 0, lambda ranges: None)
        policy.run([request], pipeline.submit)
    return pipeline.told


CASES = {
    "float32": ("odd sizes", {"dtype": "float32"}),
    "bfloat16": ("kernels", {"dtype": "bfloat16"}),
    "bfloat16, odd sizes, head on the first": (
        "odd sizes",
        {"dtype": "bfloat16", "head_on_first": True},
    ),
    "8-bit keys and values": ("kernels", {"dtype": "bfloat16", "kv_bits": 8}),
    "8 bit": ("kernels", {"dtype": "bfloat16", "bits": 8}),
    "8 bit, int8pack": (
        "kernels",
        {"dtype": "bfloat16", "bits": 8, "backends": {8: "int8pack"}},
    ),
    "4 and 3 bit": ("kernels", {"dtype": "bfloat16", "bits": (4, 3, 4, 3, 16)}),
    "experts": ("experts", {"dtype": "float32", "bits": (16, 4, 3, 4, 16)}),
    "latents": ("latents", {"dtype": "bfloat16"}),
    "latents in 8 bit": ("latents", {"dtype": "bfloat16", "kv_bits": 8}),
    "states": ("states", {"dtype": "bfloat16"}),
    "pure torch": ("odd sizes", {"dtype": "float32", "bits": (8, 4, 3, 8, 4)}),
}
RARE = "float32", "bfloat16", "8 bit", "pure torch", "latents in 8 bit"
"""Cases of which others show the parts."""


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.rare if each in RARE else ()) for each in CASES]
)
def test_tokens_and_logprobs_are_those_of_each_request_alone(
    case: str, folders: dict[str, Path]
) -> None:
    """In random micro-batches of whole prompts, parts of prompts and decode steps, moved about."""
    model, others = CASES[case]
    expected = told_alone(stages(folders[model], (0, LAYERS), **others))
    assert len(expected) == len(LENGTHS) * NEW_TOKENS
    assert told_in_company(stages(folders[model], (0, 2, LAYERS), **others)) == expected


@pytest.mark.rare
@pytest.mark.parametrize("name", ["mistral-sliding", "gpt_oss", "qwen3_moe"])
def test_ranks_tell_of_a_request_what_they_do_of_it_alone(name: str, tmp_path: Path) -> None:
    """With windows, of which rooms keep the latest tokens, and experts."""
    save_tiny(tmp_path, EVERY_CONFIG[name])
    specs = specs_of((0, 2, LAYERS), SLOTS, ROOM, deterministic=True)
    found = []
    for told in (told_alone, told_in_company):
        with divided(specs, (2, 2), tmp_path, processor=local_processor(CPU)) as ranks:
            assert any(stage._cache._windows for stage in ranks) == (name != "qwen3_moe")
            found.append(told(ranks))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "bloom"),
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("opt", "mistral-sliding", "granite", "glm4", "olmo3", "deepseek_v2")
        ),
    ],
)
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, EVERY_CONFIG[name])
    greedy = [replace(each, sampling=Sampling(ignore_eos=True)) for each in requests()]
    policy = RandomPolicy(SLOTS, KV_TOKENS, 0, lambda ranges: None)
    tokens = policy.run(greedy, LocalPipeline(stages(tmp_path, (0, 2, LAYERS))).submit)
    prompts = [each.prompt_ids for each in greedy]
    expected = references(model, prompts, NEW_TOKENS, ignore_eos=True)
    assert [tokens[each.custom_id] for each in greedy] == expected


def test_a_request_that_is_replayed_goes_on_as_it_would_have(folders: dict[str, Path]) -> None:
    """From its prompt and the tokens that it had, by one prefill in place of decode steps."""
    whole = told_alone(stages(folders["kernels"], (0, LAYERS), dtype="bfloat16"))
    pipeline = Listening(stages(folders["kernels"], (0, LAYERS), dtype="bfloat16"))
    for request in requests():
        first = len(request.prompt_ids)
        had = tuple(whole[request.custom_id, first + i][0] for i in range(2))
        again = replace(request, prompt_ids=request.prompt_ids + had, generated=had)
        RandomPolicy(SLOTS, KV_TOKENS, 1, lambda ranges: None).run([again], pipeline.submit)
    assert pipeline.told == {key: whole[key] for key in pipeline.told}
    assert len(pipeline.told) == len(LENGTHS) * (NEW_TOKENS - 2)


def test_a_stage_whose_rows_depend_on_their_place_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_place(x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.gelu(x)
        out[..., -1, -1] *= 1 + 2**-20
        return out

    monkeypatch.setattr(
        "transformers.activations.GELUActivation.forward", lambda self, x: by_place(x)
    )
    with pytest.raises(DeviceError, match="of equal rows GELUActivation makes unequal ones"):
        stages(folders["odd sizes"], (0, LAYERS))
    assert stages(folders["odd sizes"], (0, LAYERS), deterministic=False)


def test_compiled_attention_is_asked_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.attention.cpu.has_numba", lambda: False)
    with pytest.raises(DeviceError, match=r"pip install numba"):
        stages(folders["odd sizes"], (0, LAYERS))
