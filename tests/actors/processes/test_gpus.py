"""Unlike GPUs of one machine, as a pretend driver reports them and a local Ray hands them out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.thirdparty import pynvml

from actors.processes.device import see_own, stage_environment, visible_gpus
from actors.processes.placement import DeviceRequest, place
from actors.processes.reservation import Reservation
from llmpq.detect import detect_cluster
from llmpq.remote.session import ray_session
from planner.cluster.spec import ClusterSpec

GPUS = """GPU-1a, 32768, Tesla V100-SXM2-32GB
GPU-2b, 15360, Tesla T4
GPU-3c, 32768, Tesla V100-SXM2-32GB
GPU-4d, 32768, Tesla V100-SXM2-32GB
GPU-5e, 40960, NVIDIA A100-SXM4-40GB"""
LISTED = """GPU 4: NVIDIA A100-SXM4-40GB (UUID: GPU-5e)
  MIG 3g.20gb     Device  0: (UUID: MIG-6f)
  MIG 1g.5gb      Device  1: (UUID: MIG-7a)"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretend nvidia-smi, which knows nothing of CUDA_VISIBLE_DEVICES either."""
    found = tmp_path / "nvidia-smi"
    found.write_text(f'#!/bin/sh\n[ "$1" = -L ] && echo "{LISTED}" || echo "{GPUS}"\n')
    found.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-1a", "GPU-2b", "GPU-3c", "GPU-4d", "GPU-5e"]),
        ("1", ["GPU-2b"]),
        ("3, 1", ["GPU-4d", "GPU-2b"]),
        ("GPU-3c,GPU-2", ["GPU-3c", "GPU-2b"]),  # a part of a UUID that is one's alone
        ("0,9,1", ["GPU-1a"]),  # CUDA stops at what there is not
        ("-1", []),
        ("", []),
        ("GPU-", []),
        ("0,,1", ["GPU-1a"]),
        ("0,1,0", []),  # as `torch.cuda._parse_visible_devices` has it, too
        ("MIG-7a", ["MIG-7a"]),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    visible: str | None, uuids: list[str], driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each.uuid for each in visible_gpus()] == uuids


@pytest.mark.parametrize(
    "said",
    [
        "Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
)
def test_what_a_driver_says_beside_its_gpus_is_told(said: str, driver: Path) -> None:
    driver.write_text(f'#!/bin/sh\necho "{said}"; echo "GPU-1a, [N/A], Tesla T4"; exit 18\n')
    with pytest.warns(UserWarning, match="nvidia-smi says: " + said):
        assert visible_gpus() == (("Tesla T4", 0, "GPU-1a"),)


def test_a_gpu_with_an_error_is_left_out_and_told(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers count it: they are those of the driver."""
    lost = "GPU-2b, [GPU is lost], [GPU is lost]"
    driver.write_text(f'#!/bin/sh\necho "{GPUS}" | sed "s/GPU-2b.*/{lost}/"\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with pytest.warns(UserWarning, match=r"says of GPU-2b: \[GPU is lost\]; it is left out"):
        assert [each.uuid for each in visible_gpus()] == ["GPU-3c"]


def test_a_part_of_a_gpu_has_its_own_name_and_memory(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-6f")
    (part,) = visible_gpus()
    assert part == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 * 2**30, "MIG-6f")


def test_stages_number_gpus_as_the_driver_does() -> None:
    assert stage_environment(1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


class Seen:
    """A process of a stage, but for CUDA."""

    def gpu(self) -> str:
        see_own()
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def local_ray(driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray on a machine of three V100 and a T4, of which its NVML names the first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("LLMPQ_GPUS", "RAY_custom_unit_instance_resources"):
        monkeypatch.setenv(name, "")  # to be restored
    pretend: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 5,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: "Tesla V100-SXM2-32GB",
    }
    for name, answer in pretend.items():
        monkeypatch.setattr(pynvml, name, answer)
    with ray_session():
        yield


@pytest.mark.rare
def test_each_process_of_a_local_ray_sees_a_gpu_of_its_type(local_ray: None) -> None:
    """Ray itself knows four GPUs, which it takes for V100, and gives the T4's number away."""
    detected = detect_cluster()
    assert [(d.accelerator.name, d.index) for d in detected.devices] == [
        *(("V100-SXM2-32GB", index) for index in range(3)),
        ("T4-16GB", 0),
    ]
    kinds = {each.accelerator.name: each for each in detected.devices}
    wanted = ["V100-SXM2-32GB", "T4-16GB", "V100-SXM2-32GB", "V100-SXM2-32GB"]
    offered = ray.cluster_resources()
    placements = place([DeviceRequest.of(kinds[name]) for name in wanted], offered)
    reservation = Reservation(placements, 20.0)
    process: Any = ray.remote(Seen)
    actors = [process.options(**reservation.actor_options(i)).remote() for i in range(4)]
    seen = ray.get([actor.gpu.remote() for actor in actors], timeout=60)
    assert seen[1] == "GPU-2b"
    assert sorted([seen[0], *seen[2:]]) == ["GPU-1a", "GPU-3c", "GPU-4d"]
    emulated = ClusterSpec.from_dict(
        {"name": "e", "nodes": [{"accelerators": {"T4": 4}}], "emulate": {}}
    )
    for placement in place([DeviceRequest.of(each) for each in emulated.devices], offered):
        assert not placement.resources, "what is emulated leaves the real one alone"
