"""Host memory while a stage loads and its layers go to the cache or come from it: packed size, two
decoder layers, and a stated allowance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from quant.devices import local_processor

CPU = torch.device("cpu")
BITWIDTHS = 3, 4, 8, 16
RUNTIME_BYTES = 16 << 20
"""Python objects and the allocator's slack, above what imports and a warm-up already hold."""

LOADING = """
import pathlib, sys
import torch
from actors.stage import stage
from actors.stage.spec import StageSpec
from quant.loading.cache_settings import CacheSettings
from quant.devices import local_processor

stage.warm_up = lambda dtype: None  # seconds of compiling what no step here runs

small, large = map(pathlib.Path, sys.argv[1:3])
bitwidths = tuple(map(int, sys.argv[3].split(",")))
cache = CacheSettings(sys.argv[4])
cpu = torch.device("cpu")

def load(folder, bitwidths):
    layers = range(len(bitwidths))
    spec = StageSpec(0, 1, layers, bitwidths, "bfloat16", 2, 128, kv_tokens=256)
    return stage.Stage(spec, folder, cpu, local_processor(cpu), cache)

load(small, bitwidths[:4])
status = pathlib.Path("/proc/self/status").read_text().splitlines()
anonymous = next(line for line in status if line.startswith("RssAnon"))
print(int(anonymous.split()[1]) * 1024, flush=True)
stats = load(large, bitwidths).stats()
print(stats.weight_bytes, stats.kv_cache_bytes, flush=True)
load(large, bitwidths)  # the first one is gone
"""


def save(folder: Path, layers: int, hidden: int, intermediate: int, vocabulary: int) -> Path:
    """A float16 LLaMA checkpoint, one layer a file, whose layers share their random values."""
    folder.mkdir()
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    first = "model.layers.0."
    values = {
        name: torch.rand(parameter.shape).half()
        for name, parameter in parameters.items()
        if name.startswith(first) or ".layers." not in name
    }
    files = {"others.safetensors": {n: t for n, t in values.items() if ".layers." not in n}}
    for index in range(layers):
        files[f"layer-{index}.safetensors"] = {
            name.replace(first, f"model.layers.{index}."): tensor
            for name, tensor in values.items()
            if name.startswith(first)
        }
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    assert weight_map.keys() == parameters.keys()
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def peak_anonymous_bytes(process: subprocess.Popen[str]) -> int:
    """The most anonymous memory seen until `process` ends, looked at every two milliseconds.

    From outside, so that no lock of the interpreter delays a look. The kernel needs about that
    long to hand out 8 MB of pages, so that no larger peak goes unseen.
    """
    peak = 0
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    with open(f"/proc/{process.pid}/statm") as pages:
        while process.poll() is None:
            pages.seek(0)
            fields = pages.read().split()
            if len(fields) > 2:  # resident less file-backed
                peak = max(peak, (int(fields[1]) - int(fields[2])) * page_bytes)
            try:
                process.wait(0.002)
            except subprocess.TimeoutExpired:
                continue
    return peak


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("layers", [8, pytest.param(20, marks=pytest.mark.rare)])
def test_loading_stays_within_packed_size_and_two_layers(layers: int, tmp_path: Path) -> None:
    """Embedding, layers of every bitwidth, norm and head of a stage that is a whole model."""
    compiled = save(tmp_path / "compiled", 4, 512, 1024, 96)
    spec = StageSpec(0, 1, range(4), BITWIDTHS, "bfloat16", 2, 128, kv_tokens=256)
    Stage(spec, compiled, CPU, local_processor(CPU))  # loops of fits: compiling takes 20 to 40 MB
    small = save(tmp_path / "small", 4, 128, 256, 96)
    large = save(tmp_path / "large", layers, 768, 2048, 12000)
    layer_bytes = (large / "layer-0.safetensors").stat().st_size
    whole_bytes = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    bitwidths = BITWIDTHS * (layers // len(BITWIDTHS))
    command = [sys.executable, "-c", LOADING, str(small), str(large)]
    with subprocess.Popen(
        [*command, ",".join(map(str, bitwidths)), str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        before = int(process.stdout.readline())
        peak = peak_anonymous_bytes(process) - before
        weight_bytes, kv_cache_bytes = map(int, process.stdout.readline().split())
    assert process.returncode == 0
    cached = [path.name for path in (tmp_path / "cache").glob("*.safetensors")]
    assert len(cached) == sum(bits < 16 for bits in bitwidths) + 3  # those of the small one
    assert peak > 0.9 * weight_bytes, "the measurement missed what the process certainly holds"
    allowed = weight_bytes + kv_cache_bytes + 2 * layer_bytes + RUNTIME_BYTES
    assert peak <= allowed < whole_bytes
