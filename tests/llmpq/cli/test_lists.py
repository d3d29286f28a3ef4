"""`llmpq devices` and `llmpq models`: what is built in, in 80 columns, as JSON, and one in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.processes.device import ReportedGpu
from llmpq.cli.device_list import devices_main
from llmpq.cli.model_list import models_main
from planner.cluster.accelerators import find_accelerator, registry
from planner.cluster.spec import ClusterSpec
from planner.model.finding import builtin_names, model_shape, names_of_builtin
from quant.backends.table import backend_name
from tests.paths import ROOT

MAINS = {"devices": devices_main, "models": models_main}


def shown(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    assert MAINS[command](arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["devices", "models"])
def test_the_list_has_every_name_within_80_columns(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, command).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    names = [a.name for a in registry()] if command == "devices" else builtin_names()
    first = [line.split()[0] for line in lines if line.strip()]
    assert [name for name in first if name in names] == list(names)


def test_json_of_devices_can_be_put_into_a_cluster_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found: list[dict[str, Any]] = json.loads(shown(capsys, "devices", "--json"))
    assert [each["name"] for each in found] == [each.name for each in registry()]
    for each in found:
        real = find_accelerator(each.pop("name"))
        kernels, aliases = each.pop("kernels"), each.pop("aliases")
        assert tuple(aliases) == real.aliases
        assert each.pop("compute_type") == real.default_dtype
        for bits in (16, 8, 4, 3):
            name = backend_name(real.processor, bits, real.default_dtype)
            assert kernels[str(bits)] == name
        if real.is_cpu:
            continue
        node = {"accelerators": {"Copy": 1}}
        spec = ClusterSpec.from_dict(
            {"name": "copy", "accelerators": {"Copy": each}, "nodes": [node]}
        )
        (device,) = spec.devices
        assert device.memory_bytes == real.usable_memory_bytes
        assert device.accelerator.fp16_flops == real.fp16_flops


def test_one_accelerator_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "devices", "rtx 4090")
    for part in ("RTX4090-24GB", "1008 GB/s", "8.9", "bnb_nf4", "whitepaper", "estimates"):
        assert part in text
    assert "ROCm" in shown(capsys, "devices", "MI300X")
    assert "12.6" in shown(capsys, "devices", "P100-PCIE-16GB")
    assert devices_main(["V100"]) == 0
    assert "note: V100 is taken for V100-SXM2-16GB" in capsys.readouterr().err
    assert devices_main(["RTX4070"]) == 2
    assert "nearest known: " in capsys.readouterr().err


def test_devices_of_a_cluster_file_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(
        "name: lab\naccelerators: {Lab-4090: {like: RTX4090, memory_gib: 48}}\n"
        "nodes: [{accelerators: {Lab-4090: 1}}]\n"
    )
    lines = shown(capsys, "devices", "--cluster", str(file)).splitlines()
    assert lines[1].split()[:2] == ["Lab-4090", "48"]
    assert "48 GiB" in shown(capsys, "devices", "lab_4090", "--cluster", str(file))


def test_devices_here_are_those_that_the_driver_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = (
        ReportedGpu("NVIDIA GeForce RTX 4060 Ti", 16380 * 2**20, "GPU-0"),
        *(ReportedGpu("Tesla T4", 15360 * 2**20, f"GPU-{i}") for i in (1, 2)),
    )
    monkeypatch.setattr("llmpq.detect.visible_gpus", lambda: gpus)
    found = json.loads(shown(capsys, "devices", "--here", "--json"))
    assert [(each["name"], each["count"]) for each in found] == [
        ("RTX4060Ti-16GB", 1),
        ("T4-16GB", 2),
    ]
    text = shown(capsys, "devices", "--here")
    assert "This machine has 1 x RTX4060Ti-16GB, 2 x T4-16GB." in text
    monkeypatch.setattr("llmpq.detect.visible_gpus", tuple)
    found = json.loads(shown(capsys, "devices", "--here", "--json"))
    assert [each["name"] for each in found] == ["CPU"]


def test_one_model_in_full_and_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "models", "qwen2.5-14b-instruct")
    # Embedding and head are 2 x 152064 x 5120 weights.
    ends = "2.90 GiB of embedding and LM head; 1.45 in 8, 1.18 in 6 bit"
    for part in ("Qwen/Qwen2.5-14B-Instruct", "14.8 billion", "27.5 GiB", "192 KiB a token", ends):
        assert part in text
    text = " ".join(shown(capsys, "models", "qwen3.6-35b-a3b").split())
    for part in ("30 of", "linear attention, 256 experts of which a token asks 8", "10 of"):
        assert part in text
    # 10 layers have keys of 2 heads of 256; 30 have 32 states of 128 by 128 and three inputs of a
    # convolution over 8192 channels.
    for part in ("34.7 billion, 3.45 a token", "20 KiB a token", "61.41 MiB a request"):
        assert part in text
    assert "12 of" in shown(capsys, "models", str(ROOT / "examples" / "demo_model"))
    assert models_main(["opt-30b-tuned"]) == 2
    assert "nearest built-in: opt-30b" in capsys.readouterr().err


def test_json_of_models_has_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[dict[str, Any]] = json.loads(shown(capsys, "models", "--json"))
    for each in found:
        shape, sizes = model_shape(each["name"]), each["weight_bytes"]
        assert each["parameters"] == shape.total_parameters
        assert each["names"] == list(names_of_builtin(each["name"]))
        assert sizes["16"] == 2 * shape.total_parameters
        assert sizes["16"] > sizes["8"] > sizes["6"] > sizes["5"] > sizes["4"] > sizes["3"]
        # A weight of 4 bit has a scale and a zero of 16 bit for each group of up to 128 too.
        kinds = zip(shape.kind_shapes, shape.kind_counts, strict=True)
        linears = sum(count * kind.layer_linear_parameters for kind, count in kinds)
        saved = (sizes["16"] - sizes["4"]) / linears
        assert 1.3 < saved < 1.5
        ends = each["head_bytes"]
        assert ends["16"] == 2 * (
            shape.embedding_parameters + shape.head_parameters * (not shape.tied_embeddings)
        )
        assert ends["16"] > ends["8"] > ends["6"]
        assert each["active_parameters"] == shape.active_parameters
        assert sum(kind["layers"] for kind in each["kinds"]) == shape.layers
    by_name = {each["name"]: each for each in found}
    # 30.5 * 10^9 weights in 16 bit are 56.9 GiB, of 4 bit 15.8: more than 16 GiB offer.
    assert by_name["qwen3-30b-a3b"]["gpu_gib"] == {
        **{"16": 64, "8": 32, "6": 32, "5": 24, "4": 24, "3": 16}
    }
    assert by_name["qwen3.5-397b-a17b"]["gpu_gib"]["16"] is None


def test_the_driver_is_asked_for_names_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        "#!/bin/sh\necho 'GPU-a, 8188, NVIDIA GeForce RTX 4060 Ti'\n"
        "echo 'GPU-b, [N/A], Tesla T4'\necho 'GPU-c, 95830, NVIDIA H100 NVL'\n"
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = json.loads(shown(capsys, "devices", "--here", "--json"))
    assert [each["name"] for each in found] == ["RTX4060Ti-8GB", "T4-16GB", "H100-NVL-94GB"]
    driver.write_text("#!/bin/sh\necho 'GPU-a, 10240, NVIDIA GeForce RTX 3080'\n")
    assert devices_main(["--here"]) == 2
    assert "a cluster file can describe others" in capsys.readouterr().err
