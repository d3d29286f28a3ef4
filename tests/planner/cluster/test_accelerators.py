"""The registry against Ray's own names and against what devices are known to report."""

from __future__ import annotations

import pytest
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.util.accelerators import accelerators as ray_types

from planner.cluster.accelerators import assumption, find_accelerator, registry
from quant.common.errors import SpecError
from quant.common.units import GIB

# What `torch.cuda.get_device_name` and nvidia-smi call these GPUs.
REPORTED = {
    "Tesla T4": "T4-16GB",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "Tesla V100-SXM3-32GB": "V100-SXM3-32GB",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
    "Tesla V100-PCIE-16GB": "V100-PCIE-16GB",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32GB",
    "Tesla V100S-PCIE-32GB": "V100S-PCIE-32GB",
    "Tesla P100-PCIE-12GB": "P100-PCIE-12GB",
    "Tesla P100-PCIE-16GB": "P100-PCIE-16GB",
    "Tesla P100-SXM2-16GB": "P100-SXM2-16GB",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
    "NVIDIA A800-SXM4-80GB": "A800-SXM4-80GB",
    "NVIDIA A800 80GB PCIe": "A800-PCIE-80GB",
    "NVIDIA A10": "A10-24GB",
    "NVIDIA A10G": "A10G-24GB",
    "NVIDIA A40": "A40-48GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H100 PCIe": "H100-PCIE-80GB",
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA GeForce RTX 3090": "RTX3090-24GB",
    "NVIDIA GeForce RTX 4090": "RTX4090-24GB",
    "NVIDIA L4": "L4-24GB",
    "NVIDIA L40S": "L40S-48GB",
}


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_reported_names_are_found_and_ray_agrees(reported: str, name: str) -> None:
    accelerator = find_accelerator(reported)
    assert accelerator.name == name
    if accelerator.ray_type is not None:
        detected = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(reported)
        assert accelerator.ray_type == detected


def test_every_gpu_has_a_reported_name() -> None:
    assert set(REPORTED.values()) == {entry.name for entry in registry() if not entry.is_cpu}


def test_ray_types_are_rays_and_every_name_is_unique() -> None:
    known = {value for key, value in vars(ray_types).items() if key.isupper()}
    names: list[str] = []
    for entry in registry():
        assert entry.ray_type is None or entry.ray_type in known
        names += [entry.name, *entry.aliases]
        assert all(find_accelerator(name) == entry for name in (entry.name, *entry.aliases))
    assert len(names) == len(set(names))
    for ray_type in ("T4", "V100", "P100", "A100", "A100-40G", "A100-80G", "L4", "H100", "A10G"):
        assert find_accelerator(ray_type).ray_type == ray_type.removesuffix("-40G").removesuffix(
            "-80G"
        )


def test_capability_decides_bf16_and_kernels() -> None:
    for entry in registry():
        newer = entry.compute_capability is None or entry.compute_capability >= (8, 0)
        assert entry.bf16 == newer
        assert entry.default_dtype == ("bfloat16" if newer else "float16")
        assert entry.processor.is_cpu == (entry.name == "CPU")
        assert 0 <= entry.usable_memory_bytes <= entry.nominal_memory_bytes


def test_measured_sizes_and_one_way_links() -> None:
    assert find_accelerator("t4").usable_memory_bytes == round(14.6 * GIB)
    assert find_accelerator("a100_80g").usable_memory_bytes == round(79.1 * GIB)
    assert find_accelerator("V100").link_bytes_per_s == 150e9


def test_host_links_are_pci_express_of_their_generation() -> None:
    """3.0 up to Turing, 4.0 with Ampere and Ada, 5.0 with Hopper; NVLink is never slower."""
    generation = {6: 3, 7: 3, 8: 4, 9: 5}
    for entry in registry():
        if entry.compute_capability is None:
            assert entry.host_link_bytes_per_s == entry.link_bytes_per_s
            continue
        expected = {3: 16e9, 4: 32e9, 5: 64e9}[generation[entry.compute_capability[0]]]
        assert entry.host_link_bytes_per_s == expected
        assert entry.link_bytes_per_s >= expected
        if "SXM" not in entry.name and entry.name != "A40-48GB":  # its figure is NVLink's bridge
            assert entry.link_bytes_per_s == expected


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown accelerator 'A1000'; nearest known: A100"):
        find_accelerator("A1000")
    with pytest.raises(SpecError, match=r"known: P100-PCIE-12GB"):
        find_accelerator("zzzz")


@pytest.mark.parametrize(
    ("name", "meant", "others"),
    [
        ("V100", "V100-SXM2-16GB (16 GB)", ("V100-PCIE-32GB", "V100-SXM2-32GB")),
        ("v100_32g", "V100-SXM2-32GB (32 GB)", ("V100-PCIE-32GB", "V100-SXM3-32GB")),
        ("A100", "A100-SXM4-40GB (40 GB)", ("A100-SXM4-80GB",)),
        ("A100-80G", "A100-SXM4-80GB (80 GB)", ("A100-PCIE-80GB",)),
        ("P100", "P100-SXM2-16GB (16 GB)", ("P100-PCIE-12GB",)),
        ("A800", "A800-SXM4-80GB (80 GB)", ("A800-PCIE-80GB",)),
        ("H100", "H100-SXM5-80GB (80 GB)", ("H100-PCIE-80GB",)),
    ],
)
def test_a_name_of_several_says_what_is_assumed(
    name: str, meant: str, others: tuple[str, ...]
) -> None:
    note = assumption(name)
    assert note is not None
    assert note.startswith(f"{name} is taken for {meant}; if it is another, name it: ")
    assert set(others) <= set(note.partition("name it: ")[2].split(", "))


def test_full_names_and_what_drivers_report_assume_nothing() -> None:
    reported = [
        "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "Tesla T4",
        "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A800 80GB PCIe", "NVIDIA A10",
        "Tesla P100-PCIE-12GB", "NVIDIA L4", "NVIDIA GeForce RTX 3090",
    ]  # fmt: skip
    for name in (*reported, *(entry.name for entry in registry()), "T4", "A10", "V100S", "CPU"):
        assert assumption(name) is None, name
