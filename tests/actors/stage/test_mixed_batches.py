"""Stages under a policy that does everything that policies may, against `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages import MicroBatch, Request, Sampled, Sampling, TokenIds, TokenRange
from actors.stage.stage import Stage
from actors.transport import pipelines
from actors.transport.gloo_links import Links
from actors.transport.message_format import Codec
from actors.transport.message_limits import Limits
from actors.transport.pipelines import GlooPipeline, RayPipeline, from_ray, relay, serve
from quant.common.errors import StageLostError
from tests.actors.configs import EVERY_CONFIG, LAYERS, SHARED_CONFIGS, STATE_CONFIGS
from tests.actors.interleaving import LARGEST_SPARE, RandomPolicy
from tests.actors.linking import CPU, GPU, meet_on_gpus
from tests.actors.local_pipeline import LocalPipeline, metered
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of
from tests.actors.pretend_nccl import PretendGpus

LENGTHS = (5, 11, 1, 8, 17, 2, 8, 3)
NEW_TOKENS = 8
LONGEST = max(LENGTHS) + NEW_TOKENS
SLOTS, KV_TOKENS = 5, 5 * (LONGEST + LARGEST_SPARE)
PROMPTS = random_prompts(LENGTHS)
REQUESTS = [Request(str(i), prompt, NEW_TOKENS, Sampling()) for i, prompt in enumerate(PROMPTS)]
LIMITS = Limits(SLOTS, KV_TOKENS, 96, SLOTS, LONGEST, KV_TOKENS)


def stages_for(
    folder: Path, head_on_first: bool = False, kv_bits: int = 16, stages: int = 2
) -> list[Stage]:
    room, bounds = LONGEST + LARGEST_SPARE, (0, 2, LAYERS) if stages == 2 else (0, 1, 2, LAYERS)
    return stages_of(folder, bounds, SLOTS, room, head_on_first=head_on_first, kv_bits=kv_bits)


def spoil_others(stages: Sequence[Stage], ranges: Sequence[TokenRange]) -> None:
    """Make all numbers in the cache that belong to no request NaN."""
    others = torch.ones(KV_TOKENS, dtype=torch.bool)
    for each in ranges:
        others[each.begin : each.end] = False
    for stage in stages:
        for stored in stage._cache._in_ranges():
            held = stored.numbers if stored.scales is None else stored.scales
            held[:, others] = torch.nan
        for rooms in stage._cache._windows.values():
            lengths = torch.from_numpy(rooms._ends - rooms._firsts)
            behind = (torch.arange(rooms.room) >= lengths[:, None]).flatten()
            for tensor in rooms._tensors:
                if tensor.is_floating_point():
                    tensor[:, :, behind] = torch.nan


class MessagePipeline(LocalPipeline):
    """Stages with messages between them, as actors over Ray."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__(stages)
        self._pipeline = RayPipeline(Computing(stages[0]), [Relaying(s) for s in stages[1:]], CODEC)

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        return self._pipeline.result(self._pipeline.submit(batch, token_ids))


CODEC = Codec(LIMITS)


class Computing:
    """A stage in a process of its own."""

    def __init__(self, stage: Stage) -> None:
        self.finish, self.compute = stage.finish, stage.step

    def sent(self) -> None: ...


class Relaying:
    """The handle of an actor whose calls end at once."""

    def __init__(self, stage: Stage, codec: Codec = CODEC) -> None:
        self.step, self._stage, self._codec = self, Computing(stage), codec

    def remote(self, message: Any, epoch: int) -> Any:
        at_once = message.value if isinstance(message, Reference) else message
        return Reference(relay(self._stage, from_ray(at_once), self._codec).numpy())


class Reference:
    def __init__(self, value: Any) -> None:
        self.value = value


class PretendRay:
    ObjectRef = Reference

    @staticmethod
    def get(reference: Reference) -> Any:
        return reference.value


@pytest.fixture(autouse=True)
def pretend_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ray", PretendRay)


def interleaved(stages: Sequence[Stage], seed: int) -> tuple[RandomPolicy, list[list[int]]]:
    policy = RandomPolicy(SLOTS, KV_TOKENS, seed, lambda ranges: spoil_others(stages, ranges))
    tokens = policy.run(REQUESTS, MessagePipeline(stages).submit)
    return policy, [tokens[request.custom_id] for request in REQUESTS]


MORE = ("qwen3_5_moe", "gemma2", "gemma3")
GATED = ("smollm3", "granite", "phi3", "glm4", "olmo3", "ministral", "ministral3")
Tiny = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of each family, and what `generate` adds to the prompts."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        model = save_tiny(folder, (EVERY_CONFIG | STATE_CONFIGS | SHARED_CONFIGS)[name])
        return folder, references(model, PROMPTS, NEW_TOKENS)

    return made


@pytest.fixture(params=["compiled", "by PyTorch"])
def decode_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention by numba's loop, or as on a GPU."""
    if request.param != "compiled":
        monkeypatch.setattr("actors.attention.ragged.can_attend", lambda stored: False)
        monkeypatch.setattr("actors.attention.delta.rule.can_run", lambda device: False)


@pytest.mark.usefixtures("decode_kernel")
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "bloom", "mistral-sliding", "qwen3_5"),
        *("gemma4-shared", "gpt_oss", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in (*("opt", "qwen2-sliding", "qwen3_next", "qwen3_moe"), *MORE, *GATED)
        ),
    ],
)
def test_tokens_are_those_of_generate(name: str, tiny: Tiny) -> None:
    folder, expected = tiny(name)
    runs = [interleaved(stages_for(folder, seed == 1), seed) for seed in range(2)]
    assert [tokens for _, tokens in runs] == [expected] * 2
    assert {kind for policy, _ in runs for kind in policy.kinds} == {"prefill", "decode", "mixed"}
    assert sum(policy.unsampled for policy, _ in runs)
    assert sum(policy.moves for policy, _ in runs)


@pytest.mark.usefixtures("decode_kernel")
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral-sliding", "deepseek_v3"),
        *(
            pytest.param(n, marks=pytest.mark.rare)
            for n in ("bloom", "qwen3_next", "gemma3", "gemma4-shared", "gpt_oss", *GATED)
        ),
    ],
)
def test_codes_of_8_bit_do_not_depend_on_the_order(name: str, tiny: Tiny) -> None:
    stages = stages_for(tiny(name)[0], kv_bits=8)
    expected = generate(stages, PROMPTS, NEW_TOKENS, prefill=1, decode=5)
    assert interleaved(stages, 0)[1] == expected


@pytest.mark.parametrize("devices", [(CPU, CPU), (GPU, GPU, CPU)])
@pytest.mark.parametrize("head_on_first", [False, True])
def test_parts_of_prompts_go_over_links(
    devices: tuple[str, ...], head_on_first: bool, tiny: Tiny, gpus: PretendGpus
) -> None:
    """A micro-batch of which nothing is sampled has an empty answer. Between two GPUs hidden states
    go beside the messages.
    """
    folder, expected = tiny("llama")
    first, *others = stages_for(folder, head_on_first, stages=len(devices))
    links = meet_on_gpus(devices)

    def served(stage: Stage, own: Links) -> None:
        with pytest.raises(StageLostError):
            serve(Computing(stage), own, CODEC)

    serving = [Thread(target=served, args=each) for each in zip(others, links[1:], strict=True)]
    for each in serving:
        each.start()
    pipeline = GlooPipeline(Computing(first), links[0], CODEC)
    policy = RandomPolicy(SLOTS, KV_TOKENS, 0, lambda ranges: None)
    tokens = policy.run(REQUESTS, lambda *each: pipeline.result(pipeline.submit(*each)))
    for own in links:
        own.stop()
    for each in serving:
        each.join()
    assert [tokens[request.custom_id] for request in REQUESTS] == expected
    assert policy.unsampled
    assert [group.wire.done > len(REQUESTS) for group in gpus.groups] == [True] * (
        2 * devices.count(GPU) - 2 if GPU in devices else 0
    )


def test_tokens_of_prompts_and_of_decode_steps_are_counted_apart(tiny: Tiny) -> None:
    stages = stages_for(tiny("llama")[0])
    meters = [metered(stage) for stage in stages]
    _, tokens = interleaved(stages, 0)
    for meter in meters:
        counted = meter.tokens()
        assert counted["prefill"] + counted["decode"] == sum(
            len(prompt) + len(new) - 1 for prompt, new in zip(PROMPTS, tokens, strict=True)
        )
        steps = sum(len(new) - 1 for new in tokens)
        assert 0 <= counted["decode"] - steps <= sum(LENGTHS), "and single tokens of prompts"


def test_a_cpu_takes_a_long_mixed_batch_in_passes() -> None:
    batch = MicroBatch(np.arange(3), np.array([5, 0, 2]), np.array([1, 6, 4]), np.arange(3) * 20)
    parts = batch.passes(7)
    assert [part.begins.tolist() for part in parts] == [[0, 20], [40]]
    assert [part.kind for part in parts] == ["mixed", "prefill"]
