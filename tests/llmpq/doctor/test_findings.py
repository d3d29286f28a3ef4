"""What `llmpq doctor` says of machines: each thing that is wrong is named, with its remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmpq.doctor.facts import Driver, Facts, Folder, Gpu, Library, Torch
from llmpq.doctor.findings import Finding, all_works, findings
from llmpq.doctor.remedies import Installer, wanted_build
from quant.common.units import GIB, MIB
from tests.llmpq.doctor.machines import (
    A100,
    CPU,
    CUDA_13,
    CUDA_126,
    FREE,
    HOST,
    P100,
    T4,
    WITHOUT_GPU,
    driver,
    with_gpus,
)

PIP = Installer("/env/bin/python")
OLD_GPUS = (
    "/env/bin/python -m pip install --extra-index-url https://download.pytorch.org/whl/cu126 "
    "'llmpq[cuda126]'"
)
IN_ORDER = with_gpus(driver((13, 0), T4), CUDA_13)


def wrong(facts: Facts) -> list[Finding]:
    return [each for each in findings(facts, PIP) if each.state != "works"]


def only(facts: Facts, state: str) -> Finding:
    """The one finding that is not in order."""
    (found,) = wrong(facts)
    assert found.state == state
    assert all_works(findings(facts, PIP)) == (state == "note")
    return found


@pytest.mark.parametrize(
    "facts",
    [
        IN_ORDER,
        with_gpus(driver((12, 4), T4, P100, A100, version="550.90"), CUDA_126),
        with_gpus(driver((13, 0), Gpu("NVIDIA GeForce RTX 4090", (8, 9))), CUDA_13),
        with_gpus(driver((13, 0), Gpu("NVIDIA L4", (8, 9))), replace(CUDA_126)),
        WITHOUT_GPU,
        replace(WITHOUT_GPU, torch=replace(CUDA_13, available=False)),
        replace(WITHOUT_GPU, driver=Driver(on_bus=2, hidden="")),
    ],
    ids=["T4", "all-by-12.6", "4090-by-8.6", "L4-by-12.6", "CPU", "CPU-by-CUDA", "hidden"],
)
def test_machines_in_order_have_nothing_to_mend(facts: Facts) -> None:
    assert wrong(facts) == []
    assert all_works(findings(facts, PIP))


def test_a_p100_under_cuda_13_is_told_of_the_build_that_has_its_code() -> None:
    found = only(with_gpus(driver((13, 0), P100), CUDA_13), "fails")
    assert found.subject == "torch"
    assert "no code for Tesla P100-PCIE-16GB (compute capability 6.0)" in found.text
    assert "no kernel image is available" in found.text
    assert found.remedy == OLD_GPUS


def test_of_a_p100_and_a_t4_the_p100_alone_is_named() -> None:
    found = only(with_gpus(driver((13, 0), T4, P100), CUDA_13), "fails")
    assert "P100" in found.text
    assert "T4" not in found.text


def test_gpus_without_a_driver_are_told_of() -> None:
    found = only(replace(WITHOUT_GPU, driver=Driver(on_bus=2)), "fails")
    assert "2 NVIDIA GPUs" in found.text
    assert "no driver answers" in found.text
    assert "--gpus all" in str(found.remedy)


def test_a_driver_older_than_torchs_cuda_has_the_other_build() -> None:
    facts = with_gpus(driver((12, 4), A100, version="550.90"), replace(CUDA_13, available=False))
    found = only(facts, "fails")
    assert found.text == "2.13.0+cu130 of CUDA 13.0 needs driver 580, here is 550.90"
    assert found.remedy == OLD_GPUS


def test_a_gpu_newer_than_cuda_126_needs_a_newer_driver() -> None:
    newest = Gpu("NVIDIA B200", (10, 0))
    facts = with_gpus(driver((12, 8), newest, version="570.1"), replace(CUDA_13, available=False))
    assert only(facts, "fails").remedy == "install NVIDIA's driver 580 or newer"


def test_a_driver_older_than_every_build_is_named_with_the_least_that_will_do() -> None:
    old = driver((11, 4), P100, version="470.2")
    found = wrong(with_gpus(old, replace(CUDA_126, available=False)))
    assert [each.subject for each in found] == ["driver", "torch"]
    assert "525.60 or newer" in str(found[0].remedy)


def test_a_driver_of_two_versions_wants_a_restart() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch"
    found = wrong(replace(WITHOUT_GPU, driver=Driver(said=(said,), on_bus=1)))
    assert said in found[0].text
    assert "restart" in str(found[0].remedy)


def test_a_build_for_cpus_beside_gpus_is_exchanged() -> None:
    found = only(with_gpus(driver((13, 0), T4), CPU), "fails")
    assert "build for CPUs" in found.text
    assert found.remedy == "/env/bin/python -m pip install 'llmpq[cuda13]'"


def test_a_product_that_fails_on_a_gpu_is_told() -> None:
    bad = replace(CUDA_13, complaints=("GPU 0: CUDA error: an illegal memory access",))
    assert "illegal memory access" in only(with_gpus(driver((13, 0), T4), bad), "fails").text


def test_missing_torch_is_installed_from_the_index_of_its_build() -> None:
    found = only(replace(WITHOUT_GPU, torch=Torch()), "fails")
    assert found.remedy == (
        "/env/bin/python -m pip install --extra-index-url https://download.pytorch.org/whl/cpu "
        "'llmpq[cpu]'"
    )


def test_broken_torch_is_removed_first() -> None:
    broken = Torch("2.13.0", error="its process was ended by SIGILL")
    found = only(replace(WITHOUT_GPU, torch=broken), "fails")
    assert "SIGILL" in found.text
    assert str(found.remedy).startswith("/env/bin/python -m pip uninstall --yes torch && ")


def test_uv_is_named_where_the_environment_has_no_pip() -> None:
    found = findings(replace(WITHOUT_GPU, torch=Torch()), Installer("/env/bin/python", False))
    (remedy,) = [each.remedy for each in found if each.state == "fails"]
    assert remedy == "uv pip install --python /env/bin/python --torch-backend cpu 'llmpq[cpu]'"


@pytest.mark.parametrize(
    ("library", "word"),
    [
        (Library(), "not installed"),
        (Library("0.50.2", error="OSError: libcusparse.so.12: cannot open"), "libcusparse.so.12"),
        (Library("0.45", error="bitsandbytes is 0.45; plans count on 0.50"), "0.50"),
    ],
    ids=["missing", "broken", "old"],
)
def test_broken_bitsandbytes_is_named_where_there_are_gpus(library: Library, word: str) -> None:
    found = only(replace(IN_ORDER, bitsandbytes=library), "fails")
    assert found.subject == "bitsandbytes"
    assert word in found.text
    assert found.remedy == "/env/bin/python -m pip install 'llmpq[bitsandbytes]'"


def test_a_kernel_that_cannot_be_used_is_a_note() -> None:
    complaint = "cuda_packed on GPU 0: CudaError: libnvrtc of CUDA 12 is not found"
    found = only(replace(IN_ORDER, kernels=Library("2.13.0", complaints=(complaint,))), "note")
    assert complaint in found.text
    assert "nvidia-cuda-nvrtc-cu12" in str(found.remedy)


def test_small_shared_memory_is_a_note_with_the_size_that_ray_wants() -> None:
    small = replace(HOST, shared_bytes=64 * MIB, shared_free_bytes=64 * MIB)
    found = only(replace(WITHOUT_GPU, host=small), "note")
    assert found.subject == "/dev/shm"
    assert "--shm-size=10g" in str(found.remedy)
    little = replace(small, limit_bytes=4 * GIB)  # of which Ray takes 30 %
    assert "--shm-size=2g" in str(only(replace(WITHOUT_GPU, host=little), "note").remedy)


def test_a_home_that_cannot_be_written_stops_nothing() -> None:
    temporary = Folder("/tmp/llmpq-cache-12345", True, FREE)
    locked = replace(HOST, cache=temporary, cache_is_temporary=True, has_entry=False)
    found = only(replace(WITHOUT_GPU, host=locked), "note")
    assert (found.subject, found.text.endswith("/tmp/llmpq-cache-12345")) == ("home", True)
    assert "XDG_CACHE_HOME" in str(found.remedy)
    named = replace(HOST, cache=Folder("/mnt/llmpq", False))
    assert "XDG_CACHE_HOME" in str(only(replace(WITHOUT_GPU, host=named), "note").remedy)


def test_a_folder_of_rays_that_cannot_be_written_stops_runs() -> None:
    locked = replace(HOST, ray=Folder("/scratch", False))
    found = only(replace(WITHOUT_GPU, host=locked), "fails")
    assert "/scratch cannot be written" in found.text
    assert "RAY_TMPDIR" in str(found.remedy)


@pytest.mark.parametrize(("free_bytes", "state"), [(20 * MIB, "fails"), (200 * MIB, "note")])
def test_a_full_disk_under_ray_is_told_before_it_stops_it(free_bytes: int, state: str) -> None:
    full = replace(HOST, ray=Folder("/tmp", True, free_bytes))
    assert "MiB free" in only(replace(WITHOUT_GPU, host=full), state).text


def test_a_ray_that_does_not_start_and_a_cluster_that_does_not_answer_are_told() -> None:
    ray = replace(WITHOUT_GPU, ray=Library("2.60.0", error="Ray did not start: no space"))
    assert "no space" in only(ray, "fails").text
    lost = Library("2.60.0", error="no Ray cluster answers at 'h:6379'")
    assert "h:6379" in only(replace(WITHOUT_GPU, cluster=lost, address="h:6379"), "fails").text


@pytest.mark.parametrize(
    ("cuda", "gpus", "build"),
    [
        ((13, 0), (P100,), "cuda126"),
        ((13, 0), (T4, P100), "cuda126"),
        ((13, 0), (T4,), "cuda13"),
        ((12, 4), (T4,), "cuda126"),
        ((12, 8), (Gpu("NVIDIA B200", (10, 0)),), "cuda13"),
        ((13, 0), (Gpu("NVIDIA GeForce RTX 5090", (12, 0)), P100), "cuda13"),
    ],
)
def test_the_build_is_that_of_gpus_and_driver(
    cuda: tuple[int, int], gpus: tuple[Gpu, ...], build: str
) -> None:
    assert wanted_build(driver(cuda, *gpus)) == build
