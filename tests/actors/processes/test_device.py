"""The GPU that a stage finds, against the planned one; torch's answers are stated here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.processes.device import local_device
from actors.stage.spec import StageSpec
from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.cluster.spec import ClusterSpec
from quant.common.errors import DeviceError
from quant.common.units import GIB

LIMIT = 7 * GIB


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
