"""The GPU that a stage finds, against the planned one; torch's answers are stated here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.processes.device import local_device
from actors.processes.health import Health
from actors.profiling.links import End, Rank
from actors.stage.spec import StageSpec
from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.spec import ClusterSpec
from quant.common.errors import DeviceError
from quant.common.units import GIB
from tests.actors.batches import batch_in_ranges
from tests.paths import ROOT

LIMIT = 7 * GIB


@pytest.fixture(autouse=True)
def with_cudnn() -> Iterator[None]:
    """A process with cuDNN's attention, as torch comes."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


def described(**values: object) -> Accelerator:
    """An RTX 3080 as a cluster file describes it."""
    figures = {
        "memory_gib": 10,
        "memory_gbyte_per_s": 760,
        "fp32_tflops": 29.8,
        "fp16_tflops": 59.5,
        "compute_capability": "8.6",
        **values,
    }
    node = {"accelerators": {"Mine": 1}}
    cluster = ClusterSpec.from_dict(
        {"name": "x", "accelerators": {"Mine": figures}, "nodes": [node]}
    )
    return cluster.devices[0].accelerator


def device_of(
    planned: Accelerator, found: str, gib: float, monkeypatch: pytest.MonkeyPatch
) -> torch.device:
    properties = SimpleNamespace(name=found, total_memory=round(gib * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    spec = StageSpec(0, 1, range(2), (16, 16), "bfloat16", 1, 8, 8, memory_limit_bytes=LIMIT)
    return local_device(replace(spec, accelerator=planned))


@pytest.mark.parametrize("size", [8, 16])
def test_gpus_of_one_name_are_told_apart_by_memory(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, name = find_accelerator(f"RTX4060Ti-{size}GB"), "NVIDIA GeForce RTX 4060 Ti"
    assert device_of(planned, name, 7.9, monkeypatch).type == "cuda"
    with pytest.raises(DeviceError, match="planned with "):
        device_of(planned, name, 5.9, monkeypatch)


def test_processes_on_gpus_go_without_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for every new length, so at every decode step; others take any length."""
    assert device_of(find_accelerator("T4"), "Tesla T4", 15, monkeypatch).type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_there_is_one_place_where_a_process_takes_a_gpu() -> None:
    """What that does is then done for stages, ranks, measurements and judgements of quality.
    `llmpq doctor` alone tries each GPU as it finds it, in a process that ends with that.
    """
    makes = re.compile(r"""torch\.device\(["']cuda|device=["']cuda""")
    found = [
        path.relative_to(ROOT).as_posix()
        for package in ("llmpq", "actors", "planner", "quant")
        for path in (ROOT / package).rglob("*.py")
        if makes.search(path.read_text())
    ]
    assert sorted(found) == ["llmpq/doctor/child.py", "quant/devices.py"]


@pytest.mark.parametrize("measured", [End, Rank])
def test_what_measures_a_cpu_leaves_gpus_alone(
    measured: type[End] | type[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    measured(False)
    health = Health()
    slots = np.zeros(1, dtype=np.int64)
    with pytest.raises(MemoryError), health.computing(batch_in_ranges(slots, slots, slots + 1)):
        raise MemoryError
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("of a GPU"))
    assert health.take_failure() is not None


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="planned for T4-16GB, but its process got Tesla P40"):
        device_of(find_accelerator("T4"), "Tesla P40", 22, monkeypatch)


def test_described_gpus_are_known_by_what_drivers_call_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = "NVIDIA GeForce RTX 3080"
    assert device_of(described(), reported, 9.8, monkeypatch).index == 0
    assert device_of(described(reported_as=[reported]), reported, 9.8, monkeypatch).index == 0
    with pytest.raises(DeviceError, match=r"reported_as: \[NVIDIA GeForce RTX 3090\]"):
        device_of(described(), "NVIDIA GeForce RTX 3090", 23, monkeypatch)
    with pytest.raises(DeviceError, match="planned for Mine"):
        device_of(described(reported_as=[reported]), "NVIDIA GeForce RTX 3070", 9, monkeypatch)
    like = described(like="RTX3090", memory_gib=12)
    assert device_of(like, "NVIDIA GeForce RTX 3090", 12, monkeypatch).index == 0
