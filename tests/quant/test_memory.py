"""Host memory while a stage loads: what is packed, two decoder layers, and the runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LAYERS = 20
HIDDEN = 1536
INTERMEDIATE = 4096
RUNTIME_BYTES = 16 << 20
"""Python objects and the allocator's slack, above what imports and a warm-up already hold."""

LOADING = """
import json, pathlib, sys
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from quant.checkpoint import Checkpoint
from quant.linear import quantize_linear
from quant.loader import load_layer, module_nbytes
from quant.processor import local_processor

folder, bits = sys.argv[1], int(sys.argv[2])
config = LlamaConfig(**json.loads((pathlib.Path(folder) / "config.json").read_text()))
cpu = torch.device("cpu")
target = (local_processor(cpu), torch.bfloat16, cpu)
quantize_linear(torch.randn(64, 128), None, bits, *target)(torch.randn(2, 128))
status = pathlib.Path("/proc/self/status").read_text().splitlines()
anonymous = next(line for line in status if line.startswith("RssAnon"))
print(int(anonymous.split()[1]) * 1024, flush=True)
checkpoint = Checkpoint(folder)
layers = []
for index in range(config.num_hidden_layers):
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, index)
    load_layer(layer, checkpoint, f"model.layers.{index}", bits, *target)
    layers.append(layer)
print(sum(map(module_nbytes, layers)), flush=True)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded float16 checkpoint of more than 1 GB, one layer a file."""
    folder = tmp_path_factory.mktemp("checkpoint")
    options = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
    }
    (folder / "config.json").write_text(json.dumps(options))
    with torch.device("meta"):
        layer = LlamaDecoderLayer(LlamaConfig(**options), 0)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand(parameter.shape, generator=generator).half()
        for name, parameter in layer.named_parameters()
    }
    weight_map = {}
    for index in range(LAYERS):
        named = {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()}
        file = f"model-{index:05d}.safetensors"
        save_file(named, folder / file)
        weight_map |= dict.fromkeys(named, file)
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
@pytest.mark.parametrize("bits", [4, 8])
def test_loading_stays_within_packed_size_and_two_layers(checkpoint: Path, bits: int) -> None:
    stored_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert stored_bytes >= 1 << 30
    with subprocess.Popen(
        [sys.executable, "-c", LOADING, str(checkpoint), str(bits)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        before = int(process.stdout.readline())
        peak = peak_anonymous_bytes(process) - before
        packed = int(process.stdout.readline())
    assert process.returncode == 0
    assert peak > 0.9 * packed, "the measurement missed what the process certainly holds"
    assert peak <= packed + 2 * stored_bytes // LAYERS + RUNTIME_BYTES
