"""The registry against Ray's own names and against what devices are known to report."""

from __future__ import annotations

import pytest
from ray._private.accelerators.amd_gpu import amd_product_dict
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from planner.cluster.accelerators import (
    Accelerator,
    assumption,
    find_accelerator,
    registry,
    reported_accelerator,
)
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.workload import Workload
from quant.common.errors import SpecError
from quant.common.units import GIB
from tests.planner.plan_alone import find_plan

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
    "NVIDIA GeForce RTX 2080 Ti": "RTX2080Ti-11GB",
    "NVIDIA GeForce RTX 3060": "RTX3060-12GB",
    "NVIDIA GeForce RTX 4060 Ti": "RTX4060Ti-8GB",
    "NVIDIA GeForce RTX 5090": "RTX5090-32GB",
    "NVIDIA RTX A6000": "RTX-A6000-48GB",
    "NVIDIA A30": "A30-24GB",
    "Tesla P40": "P40-24GB",
    "NVIDIA H100 NVL": "H100-NVL-94GB",
    "Tesla P4": "P4-8GB",
    "NVIDIA GeForce GTX 1080 Ti": "GTX1080Ti-11GB",
    "NVIDIA TITAN Xp": "TITAN-Xp-12GB",
    "NVIDIA TITAN V": "TITAN-V-12GB",
    "NVIDIA TITAN RTX": "TITAN-RTX-24GB",
    "Quadro RTX 6000": "Quadro-RTX-6000-24GB",
    "Quadro RTX 8000": "Quadro-RTX-8000-48GB",
    "NVIDIA RTX A5000": "RTX-A5000-24GB",
    "NVIDIA RTX A4000": "RTX-A4000-16GB",
    "NVIDIA L40": "L40-48GB",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada-48GB",
    "NVIDIA GeForce RTX 3090 Ti": "RTX3090Ti-24GB",
    "NVIDIA GeForce RTX 4090 D": "RTX4090D-24GB",
    "NVIDIA GeForce RTX 5060 Ti": "RTX5060Ti-8GB",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000-96GB",
    "NVIDIA H800": "H800-SXM5-80GB",
    "NVIDIA H800 PCIe": "H800-PCIE-80GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA B200": "B200-180GB",
    "NVIDIA GeForce GTX 1660": "GTX1660-6GB",
    "NVIDIA A16": "A16-16GB",
    "NVIDIA H20": "H20-SXM-96GB",
}
# What torch calls these, and the product names that Ray finds by the PCI identifier.
REPORTED_AMD = {
    "AMD Instinct MI250": ("MI250-64GB", "0x740c"),
    "AMD Instinct MI300X": ("MI300X-192GB", "0x74a1"),
    "AMD Instinct MI210": ("MI210-64GB", "0x740f"),
    "AMD Radeon RX 7900 XTX": ("RX7900XTX-24GB", "0x744c"),
}
SAME_NAME = {"RTX4060Ti-16GB": "RTX4060Ti-8GB", "RTX5060Ti-16GB": "RTX5060Ti-8GB"}


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_reported_names_are_found_and_ray_agrees(reported: str, name: str) -> None:
    accelerator = find_accelerator(reported)
    assert accelerator.name == name
    if accelerator.ray_type is not None:
        detected = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(reported)
        assert accelerator.ray_type == detected


@pytest.mark.parametrize(("reported", "found"), REPORTED_AMD.items())
def test_names_of_amd_are_found_and_ray_agrees(reported: str, found: tuple[str, str]) -> None:
    accelerator = find_accelerator(reported)
    assert accelerator.name == found[0]
    assert accelerator.ray_type == amd_product_dict.get(found[1])
    assert accelerator.is_reported_as(reported)


def test_every_gpu_has_a_reported_name() -> None:
    named = {*REPORTED.values(), *(name for name, _ in REPORTED_AMD.values()), *SAME_NAME}
    assert named == {entry.name for entry in registry() if not entry.is_cpu}


def test_gpus_that_are_reported_alike_are_told_apart_by_their_memory() -> None:
    for other, first in SAME_NAME.items():
        name = next(name for name, found in REPORTED.items() if found == first)
        both = [find_accelerator(each) for each in (first, other)]
        for accelerator in both:
            assert accelerator.is_reported_as(name)
            found = reported_accelerator(name, accelerator.usable_memory_bytes)
            assert found == accelerator
        assert f"name it: {other}" in (assumption(name) or "")
        assert f"name it: {other}" in (assumption(first.partition("-")[0]) or "")
        assert assumption(first) is None
    assert reported_accelerator("Tesla T4", 0).name == "T4-16GB"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100 PCIe 80 GB", "A100-PCIE-80GB"),
        ("nvidia-h100-80gb-hbm3", "H100-SXM5-80GB"),
        ("H100 HBM3 80GB", "H100-SXM5-80GB"),
        ("RTX6000-Ada", "RTX-6000-Ada-48GB"),
        ("NVIDIA Graphics L40S GPU", "L40S-48GB"),
        ("v100 32g sxm2", "V100-SXM2-32GB"),
        ("4090 Ti", None),
        ("RTX 6000", None),  # of Turing, of Ada, of Blackwell
    ],
)
def test_words_may_stand_in_any_order(written: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(SpecError, match="nearest known"):
            find_accelerator(written)
        return
    assert find_accelerator(written).name == name
    assert find_accelerator(name).is_reported_as(written)
    assert reported_accelerator(written, 0).name == name


@pytest.mark.parametrize(
    ("reported", "kind", "like"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a part of a GPU (MIG)", "A100-SXM4-40GB"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "a part of a GPU (MIG)", "H100-SXM5-80GB"),
        ("1g.5gb", "a part of a GPU (MIG)", "the GPU that it is of"),
        ("GRID T4-16Q", "a virtual GPU (vGPU)", "T4-16GB"),
        ("NVIDIA A40-48Q", "a virtual GPU (vGPU)", "A40-48GB"),
        ("GRID V100D-32Q", "a virtual GPU (vGPU)", "the GPU that it is of"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "a GPU held to less power", "RTX3060-12GB"),
        ("Tesla V100-SXM2-32GB-LS", "a GPU held to less power", "V100-SXM2-32GB"),
    ],
)
def test_devices_that_are_less_than_their_gpu_are_to_be_described(
    reported: str, kind: str, like: str
) -> None:
    with pytest.raises(SpecError) as caught:
        find_accelerator(reported)
    said = str(caught.value)
    assert kind in said
    assert f"with like: {like}, " in said
    if like == "the GPU that it is of":
        return
    entry = {"like": like, "memory_gib": 10.0, "reported_as": [reported]}
    values = {"name": "x", "accelerators": {"part": entry}, "nodes": [{"accelerators": "part"}]}
    (device,) = ClusterSpec.from_dict(values).devices
    assert device.accelerator.is_reported_as(reported)
    assert not find_accelerator(like).is_reported_as(reported)


TOO_OLD = (
    "Tesla K80", "k80", "Tesla_K40m", "Tesla M40 24GB", "GRID M60-8Q", "GRID K520", "Quadro K620",
    "NVIDIA GeForce GTX TITAN X", "GTX 980 Ti", "GeForce 940MX", "NVIDIA GeForce GT 710",
)  # fmt: skip
NOT_BUILT_IN = ("GeForce GT 1030", "Quadro P6000", "TITAN X (Pascal)", "AMD Instinct MI100")


@pytest.mark.parametrize("name", ["Intel Arc A770", "Apple M2 Ultra", *TOO_OLD, *NOT_BUILT_IN])
def test_devices_that_nothing_runs_on_are_named_so(name: str) -> None:
    said = "on NVIDIA GPUs from .* 6.0 on" if name in TOO_OLD else "on NVIDIA GPUs, on AMD GPUs"
    with pytest.raises(SpecError, match="nearest known: " if name in NOT_BUILT_IN else said):
        find_accelerator(name)


def test_every_name_is_unique() -> None:
    names: list[str] = []
    for entry in registry():
        names += [entry.name, *entry.aliases]
        assert all(find_accelerator(name) == entry for name in (entry.name, *entry.aliases))
    assert len(names) == len(set(names))
    for ray_type in ("T4", "V100", "P100", "A100", "A100-40G", "A100-80G", "L4", "H100", "A10G"):
        assert find_accelerator(ray_type).ray_type == ray_type.removesuffix("-40G").removesuffix(
            "-80G"
        )


def test_capability_decides_bf16_and_kernels() -> None:
    for entry in registry():
        assert entry.is_cpu or (entry.compute_capability is None) != (
            entry.rocm_architecture is None
        )
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
    """3.0 up to Turing, 4.0 with Ampere, Ada, CDNA 2 and RDNA 3, 5.0 with Hopper, Blackwell and
    CDNA 3; the RTX 4060 Ti, 5060 Ti and A16 have half of the lanes. NVLink is never slower.
    """
    generation = {6: 3, 7: 3, 8: 4, 9: 5, 10: 5, 12: 5}
    for entry in registry():
        if entry.is_cpu or entry.name == "GH200-96GB":  # NVLink leads to its host
            assert entry.host_link_bytes_per_s == entry.link_bytes_per_s
            continue
        of_amd = {"gfx90a": 4, "gfx942": 5, "gfx1100": 4}
        major, architecture = (entry.compute_capability or (0,))[0], entry.rocm_architecture
        expected = {3: 16e9, 4: 32e9, 5: 64e9}[
            generation[major] if architecture is None else of_amd[architecture]
        ]
        expected /= 2 if "060Ti" in entry.name or entry.name == "A16-16GB" else 1
        assert entry.host_link_bytes_per_s == expected
        assert entry.link_bytes_per_s >= expected
        own_links = "SXM" in entry.name or entry.name == "B200-180GB" or architecture is not None
        if not own_links and entry.name != "A40-48GB":  # its figure is NVLink's bridge
            assert entry.link_bytes_per_s == expected


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown accelerator 'A1000'; nearest known: A100"):
        find_accelerator("A1000")
    with pytest.raises(SpecError, match=r"unknown accelerator 'zzzz'; `llmpq devices` lists all"):
        find_accelerator("zzzz")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("T5", ["T4-16GB", "RTX5090-32GB"]),
        ("RTX3080", ["RTX3060-12GB", "RTX3090-24GB"]),
        ("MI200", ["MI250-64GB", "MI300X-192GB"]),
        ("v100-32", ["V100-SXM2-32GB"]),
    ],
)
def test_an_unknown_name_gives_several_near_ones(wrong: str, near: list[str]) -> None:
    with pytest.raises(SpecError, match="nearest known: ") as caught:
        find_accelerator(wrong)
    named = str(caught.value).partition("nearest known: ")[2].partition(";")[0].split(", ")
    assert 2 <= len(named) <= 3
    assert len(set(named)) == len(named)
    assert set(near) <= set(named)


def _ratio_of_int8(entry: Accelerator) -> float | None:
    return None if entry.int8_ops is None else entry.int8_ops / entry.fp16_flops


def test_every_entry_is_plausible() -> None:
    """Datasheets hold some ratios: a figure that is off by a power of ten, or with sparsity, or of
    the wrong column does not keep them.
    """
    for entry in registry():
        assert entry.source, entry.name
        if entry.is_cpu:
            continue
        gib = entry.nominal_memory_bytes / GIB
        assert f"-{gib:g}GB" in entry.name
        assert 0.9 * gib <= entry.usable_memory_bytes / GIB <= gib
        assert 190e9 <= entry.memory_bytes_per_s <= 8e12, entry.name
        assert 4e12 <= entry.fp32_flops <= 170e12, entry.name
        # Reading the whole memory takes 10 to 90 ms.
        assert 0.01 <= entry.nominal_memory_bytes / entry.memory_bytes_per_s <= 0.09, entry.name
        if entry.compute_capability == (6, 1):
            assert entry.fp32_flops / entry.fp16_flops == pytest.approx(64, rel=0.01)
            continue
        assert 1.9 <= entry.fp16_flops / entry.fp32_flops <= 30, entry.name
        # GeForce GPUs sum 16-bit products in float32 at half of the rate.
        slowed = entry.name.startswith("RTX") and not entry.name.startswith("RTX-")
        allowed = {None, 4.0} if slowed else {None, 1.0, 2.0}
        ratio = _ratio_of_int8(entry)
        assert ratio is None or any(
            ratio == pytest.approx(each, rel=0.03) for each in allowed if each
        ), entry.name


# Multiprocessors (compute units), boost clock in GHz, bits of the memory bus, Gbit/s of each.
BUILT_OF = {
    "P4-8GB": (20, 1.063, 256, 6),
    "GTX1080Ti-11GB": (28, 1.582, 352, 11),
    "TITAN-Xp-12GB": (30, 1.582, 384, 11.4),
    "TITAN-V-12GB": (80, 1.35, 3072, 1.7),
    "TITAN-RTX-24GB": (72, 1.77, 384, 14),
    "Quadro-RTX-6000-24GB": (72, 1.77, 384, 14),
    "Quadro-RTX-8000-48GB": (72, 1.77, 384, 14),
    "RTX-A5000-24GB": (64, 1.695, 384, 16),
    "RTX-A4000-16GB": (48, 1.56, 256, 14),
    "L40-48GB": (142, 2.49, 384, 18),
    "RTX-6000-Ada-48GB": (142, 2.505, 384, 20),
    "RTX3090Ti-24GB": (84, 1.86, 384, 21),
    "RTX4090D-24GB": (114, 2.52, 384, 21),
    "RTX5060Ti-8GB": (36, 2.572, 128, 28),
    "RTX5060Ti-16GB": (36, 2.572, 128, 28),
    "RTX-PRO-6000-96GB": (188, 2.617, 512, 28),
    "GTX1660-6GB": (22, 1.785, 192, 8),
    "A16-16GB": (10, 1.755, 128, 12.5),
    "MI210-64GB": (104, 1.7, 4096, 3.2),
    "RX7900XTX-24GB": (96, 2.5, 384, 20),
}
SLOWED = {"GTX1660-6GB": 256, "L40-48GB": 512, "RX7900XTX-24GB": 512}


@pytest.mark.parametrize("name", BUILT_OF)
def test_figures_follow_from_units_and_clocks(name: str) -> None:
    """A multiprocessor does 512 multiply-adds of 16 bit a cycle, half of that where sums in fp32
    are slowed (GeForce, by its data sheet the L40) and on RDNA 3; without tensor cores 2 a core.
    """
    entry = find_accelerator(name)
    processors, ghz, bits, gbits = BUILT_OF[name]
    cycles = processors * ghz * 1e9
    cores = 64 if (entry.compute_capability or (0,))[0] == 7 else 128
    assert entry.fp32_flops == pytest.approx(2 * cores * cycles, rel=0.012)
    assert entry.memory_bytes_per_s == pytest.approx(bits * gbits / 8 * 1e9, rel=0.001)
    if entry.compute_capability != (6, 1):
        usual = 512 if (entry.ray_type or "").startswith("GeForce") else 1024
        assert entry.fp16_flops == pytest.approx(SLOWED.get(name, usual) * cycles, rel=0.012)


@pytest.mark.rare  # plans with each of forty GPUs
def test_a_small_model_is_planned_on_every_entry() -> None:
    """With the kernels that the tables have for it, and times that are marked as estimated."""
    shape, workload = model_shape("opt-125m"), Workload(4, 64, 16)
    for entry in registry():
        node: dict[str, object] = {"accelerators": {entry.name: 1}}
        if entry.is_cpu:
            node["memory_gib"] = 4
        cluster = ClusterSpec.from_dict({"name": "one", "nodes": [node]})
        for bits in (16, 8, 4, 3):
            options = PlanOptions(theta=0.0, bits=(bits,))
            plan = find_plan(cluster, shape, shape.name, workload, options).plan
            (stage,) = plan.stages
            assert "estimated" in stage.provenance
            assert stage.dtype == entry.default_dtype
            kernel = stage.backends[bits]
            if entry.rocm_architecture is not None:
                assert kernel in ("plain", f"torch_{bits}bit")
            elif not entry.is_cpu:
                assert kernel == "plain" if bits == 16 else kernel.startswith(("bnb", "cuda"))
            assert 1 < plan.predicted.tokens_per_s < 1e6


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
