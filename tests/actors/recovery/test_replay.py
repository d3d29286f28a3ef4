"""A request that goes on from the tokens it had gets the rest of the tokens it would have had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages import Admission, Finished, MicroBatch, Request, Sampling, TokenRange
from actors.processes.health import Health
from actors.schedule.driver import PipelineDriver
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage.sampler import Sampler
from actors.stage.stage import Stage
from actors.transport.message_format import decode, encode
from quant.backends.cuda.driver import CudaError, Kernels
from tests.actors.batches import batch_in_ranges
from tests.actors.configs import EVERY_CONFIG, LAYERS, STATE_CONFIGS
from tests.actors.driving import drive, run_dry
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, save_tiny, stages_of

NEW_TOKENS = 12
LENGTHS = (5, 11, 1, 8, 17, 2, 11)


def run(stages: list[Stage], requests: list[Request]) -> dict[str, Finished]:
    scheduler = StaticScheduler(QueueSizes(4, 2, 3, stages[0].spec.max_tokens), len(stages))
    scheduler.add(requests)
    batches = list(drive(scheduler, LocalPipeline(stages)))
    return {f.custom_id: f for batch in batches for f in batch}


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "mistral-sliding", "qwen3_next"),
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("bloom", "deepseek_v3", "opt", "granite", "ministral3")
        ),
    ],
)
def test_tokens_are_those_of_an_undisturbed_run(name: str, tmp_path: Path) -> None:
    """Greedy and sampled, cut after any number of tokens; some end at EOS, some at a length."""
    save_tiny(tmp_path, (EVERY_CONFIG | STATE_CONFIGS)[name])
    stages = stages_of(tmp_path, (0, 2, LAYERS), 4, max(LENGTHS) + NEW_TOKENS)
    warm = Sampling(temperature=0.9, seed=5)
    requests = [
        Request(str(i), prompt, NEW_TOKENS - i % 3, warm if i % 2 else Sampling())
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]
    whole = run(stages, requests)
    for shift in range(4):
        cut = {i: (shift + 3 * int(i)) % len(f.token_ids) for i, f in whole.items()}
        again = [
            replace(r, generated=whole[r.custom_id].token_ids[: cut[r.custom_id]]) for r in requests
        ]
        assert run(stages, again) == whole


def test_tokens_so_far_are_told_while_requests_run() -> None:
    request = Request("a", (3, 4), 5, Sampling(), generated=(7,))
    scheduler = StaticScheduler(QueueSizes(2, 2, 2, 64), 1)
    scheduler.add([request])

    class Nine:
        stages = 1

        def submit(self, batch: MicroBatch, token_ids: object) -> MicroBatch:
            return batch

        def result(self, handle: MicroBatch) -> object:
            told.append({i: tokens.tolist() for i, tokens in driver.slot_tokens().values()})
            return sampler.sample(handle, torch.eye(10)[[9] * len(handle.slots)])

    told: list[dict[str, list[int]]] = []
    sampler = Sampler(())
    driver = PipelineDriver(scheduler, Nine())  # type: ignore[arg-type]
    (finished,) = [f for batch in run_dry(driver) for f in batch]
    assert finished.token_ids == (7, 9, 9, 9, 9)
    assert told == [{"a": [7]}, {"a": [7, 9]}, {"a": [7, 9, 9]}, {"a": [7, 9, 9, 9]}]
    assert driver.slot_tokens() == {}


class Letters:
    """Tokens are letters."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        return "".join(chr(97 + i) for i in token_ids)


@pytest.mark.parametrize(("generated", "ends"), [((0,), True), ((1,), False)])
def test_a_stop_string_may_begin_before_the_fault(generated: tuple[int, ...], ends: bool) -> None:
    sampler = Sampler((), tokenizer=Letters())
    sampling = Sampling(stop=("ac",))
    admission = Admission(0, "x", 9, sampling, generated, room=TokenRange(0, 64))
    slots = np.zeros(1, dtype=np.int64)
    batch = batch_in_ranges(slots, slots, slots + 3, (admission,))
    sent = decode(encode(batch, torch.zeros(3, 2)))
    assert isinstance(sent, tuple)
    assert sent[0].admitted == (admission,)
    sampled = sampler.sample(sent[0], torch.eye(5)[[2]])
    assert sampled.finish_reasons == ("stop" if ends else None,)


def driver_error(code: int) -> CudaError:
    """What our own launches raise where the driver answers `code`."""
    driver: Any = SimpleNamespace(
        cuModuleLoadData=lambda *_: code, cuGetErrorString=lambda *_: None
    )
    with pytest.raises(CudaError) as raised:
        Kernels.load(driver, b"", (), torch.device("cpu"))
    return raised.value


@pytest.mark.parametrize(
    ("error", "kind", "asked"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."),
            "memory",
            3 * 2**29,
        ),
        (MemoryError(), "memory", 0),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 640 bytes."
            ),
            "memory",
            640,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "memory",
            0,
        ),
        (driver_error(700), "device", 0),
        (driver_error(719), "device", 0),
        (RuntimeError("CUDA error: device-side assert triggered"), "device", 0),
        (ValueError("a shape"), "failed", 0),
    ],
)
def test_why_a_micro_batch_failed_is_told(error: Exception, kind: str, asked: int) -> None:
    health = Health()
    slots = np.array([3, 5])
    with pytest.raises(type(error)), health.computing(batch_in_ranges(slots, slots, slots * 0 + 1)):
        raise error
    failure = health.take_failure()
    assert failure is not None
    assert (failure.batch_kind, failure.slots) == ("decode", (3, 5))
    assert (failure.kind, failure.asked_bytes) == (kind, asked)
    assert (failure.held_bytes > 2**20) is (kind == "memory")
    assert health.take_failure() is None
    assert health.heartbeat(None).done == 0
