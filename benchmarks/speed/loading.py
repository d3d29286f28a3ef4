"""Time and memory of loading a model quantized: sequentially, overlapped, from the cache, and with
transformers and bitsandbytes.

    python -m benchmarks.speed.loading [--bits 4 3 8] [--gib 1.5] [--threads 1] [--rounds 3]
    python -m benchmarks.speed.loading --stored awq gptq compressed-tensors

A LLaMA of random bfloat16 weights (hidden size 2048, one file a layer) is written to a temporary
folder and loaded in a fresh process each time, all ways in turn, round after round; medians are
printed. `cold`: the files are dropped from the system's cache before (`posix_fadvise`), and what
the disk then gave is in the column `read` (`/proc/self/io`). Seconds are from the first tensor to
the last, after imports, a warm-up on a tiny model and the module's construction; a run that writes
the cache includes waiting for the disk (`fsync`). Memory is anonymous memory (resident less
file-backed, `/proc/PID/statm`, looked at every 5 ms from outside) beyond that before loading.
With `--stored` layers are LLaMA-7B's in random 4-bit codes of these formats, which are kept, and
the ratio is to reading all files once.
bitsandbytes and accelerate (`pip install bitsandbytes accelerate`) are left out where missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PretrainedConfig,
)
from transformers.utils import logging

from actors.stage.partial_model import empty_model
from benchmarks.lab import BFLOAT16_CAPABILITY, header, processor_name, table_row
from benchmarks.speed.loading_stored import stored_entries, stored_parts
from quant.checkpoint.read_ahead import READ_AHEAD_BYTES
from quant.checkpoint.reader import Checkpoint
from quant.common.units import MIB
from quant.devices import local_processor
from quant.linear import LayerForm
from quant.loading.cache_folder import ShardCache
from quant.loading.layer_load import LayerLoad
from quant.loading.loader import load_layer, load_tensors, loading
from quant.scheme import BITWIDTHS, WEIGHTED

CPU = torch.device("cpu")
LOOK_EVERY_S = 0.005
TINY_LAYERS = 1
HAS_PEER = all(importlib.util.find_spec(name) for name in ("bitsandbytes", "accelerate"))


@dataclass(frozen=True)
class Way:
    """One way to load: by us or by `peer`; `cache` is none, write or hit; `stored`: the format of a
    quantized checkpoint; `rounding` of what is none.
    """

    name: str
    bits: int
    cold: bool
    overlapped: bool = True
    cache: str = "none"
    peer: bool = False
    stored: str = ""
    rounding: str = WEIGHTED


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes of one load."""

    seconds: float
    peak_bytes: int
    held_bytes: int
    disk_bytes: int


def ways_of(bits: int) -> list[Way]:
    """All ways of loading that are compared at one bitwidth."""
    found = [Way("sequential", bits, cold, overlapped=False) for cold in (True, False)] + [
        Way("overlapped", bits, cold) for cold in (True, False)
    ]
    if bits != 8:
        name = "overlapped, nearest rounding"
        found += [Way(name, bits, cold, rounding="nearest") for cold in (True, False)]
    found += [Way("overlapped, writing the cache", bits, cold=True, cache="write")]
    found += [Way("from the cache", bits, cold, cache="hit") for cold in (True, False)]
    if bits == 4 and HAS_PEER:
        name = "transformers + bitsandbytes nf4"
        found += [Way(name, bits, cold, peer=True) for cold in (True, False)]
    return found


READING = "reading alone"


def stored_ways(stored: str) -> list[Way]:
    """Loading codes that are kept, and reading them."""
    found = [Way(READING, 4, cold, stored=stored) for cold in (True, False)]
    return found + [Way("overlapped", 4, cold, stored=stored) for cold in (True, False)]


def config_of(layers: int, hidden: int, vocabulary: int) -> LlamaConfig:
    """Shapes of TinyLlama-1.1B at hidden size 2048."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 512),
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def write_checkpoint(folder: Path, config: PretrainedConfig, stored: str = "") -> None:
    """A file for each layer and one for the rest; layers share their random values."""
    if stored:
        config.quantization_config = stored_entries(stored)
    config.save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    stack = next(name for name in parameters if ".layers." in name).partition("0.")[0]
    first = f"{stack}0."
    values = {
        name: torch.randn(parameter.shape, dtype=torch.bfloat16) * 0.02
        for name, parameter in parameters.items()
        if name.startswith(first) or ".layers." not in name
    }
    for name, value in list(values.items()):
        if stored and name.startswith(first) and value.dim() == 2:
            parts = stored_parts(stored, *values.pop(name).shape)
            values |= {f"{name.removesuffix('weight')}{part}": own for part, own in parts.items()}
    weight_map: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    for index in range(config.num_hidden_layers):
        own = f"{stack}{index}."
        layer = {n.replace(first, own): t for n, t in values.items() if n.startswith(first)}
        write(f"layer-{index:03d}.safetensors", layer)
    write("others.safetensors", {n: t for n, t in values.items() if ".layers." not in n})
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def drop_from_memory(folders: Iterable[Path]) -> None:
    """Write what is not on disk yet, and have the system forget the files' content."""
    for path in (path for folder in folders for path in folder.glob("*.safetensors")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bring_into_memory(folders: Iterable[Path]) -> None:
    """Read every file once."""
    for path in (path for folder in folders for path in folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while file.read(16 * MIB):
                pass


def load(
    folder: Path,
    way: Way,
    cache_folder: Path,
    device: torch.device = CPU,
    backend: str | None = None,
) -> object:
    """Load the whole model onto `device`; what is returned holds it. Prints a line just before it
    begins. `backend` is that of the kernels, None the preferred one.
    """
    if way.peer:
        print("begin", flush=True)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map="cpu",
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        )
    if way.name == READING:
        print("begin", flush=True)
        bring_into_memory([folder])
        return None
    checkpoint = Checkpoint(folder)
    model: Any = empty_model(LlamaConfig.from_pretrained(folder))
    form = LayerForm(
        way.bits, local_processor(device), dtype_on(device), device, backend, way.rounding
    )
    loads = [
        LayerLoad(layer, f"model.layers.{index}", form)
        for index, layer in enumerate(model.model.layers)
    ]
    parts = {"model.embed_tokens": model.model.embed_tokens, "model.norm": model.model.norm}
    parts["lm_head"] = model.lm_head
    cache = None if way.cache == "none" else ShardCache(cache_folder)
    window_bytes = READ_AHEAD_BYTES if way.overlapped else 0
    print("begin", flush=True)
    names = [f"{name}.weight" for name in parts]
    with loading(loads, names, checkpoint, cache, window_bytes):
        for each in loads:
            load_layer(each, checkpoint, cache)
        for name, part in parts.items():
            load_tensors(part, checkpoint, name, form.dtype, device)
    return model


def dtype_on(device: torch.device) -> torch.dtype:
    """The 16-bit type that stages compute in on `device`."""
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY:
        return torch.bfloat16
    return torch.float16


def run_child(arguments: Sequence[str]) -> None:
    """Measure one load in this process; the parent looks at its memory meanwhile."""
    folder, tiny, cache_folder = map(Path, arguments[:3])
    way = Way(**json.loads(arguments[3]))
    torch.set_num_threads(int(arguments[4]))
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load(tiny, way, cache_folder / "tiny")
    read_before = disk_bytes_read()
    sys.stdin.readline()
    began = time.perf_counter()
    model = load(folder, way, cache_folder)
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, disk_bytes_read() - read_before]), flush=True)
    sys.stdin.readline()
    del model


def disk_bytes_read() -> int:
    """The bytes that this process has had read from a disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def measure(way: Way, folder: Path, tiny: Path, cache_folder: Path, threads: int) -> Measured:
    """One load in a process of its own."""
    if way.cache == "write":
        for path in cache_folder.glob("*.safetensors"):
            path.unlink()
    command = [sys.executable, "-m", "benchmarks.speed.loading", "--child", str(folder), str(tiny)]
    command += [str(cache_folder), json.dumps(asdict(way)), str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"begin\n", "the warm-up failed"
        if way.cold:
            drop_from_memory([folder, cache_folder])
        else:
            bring_into_memory([folder, cache_folder])
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"begin\n", "the load failed"
        before = peak = anonymous_bytes(child.pid)
        os.set_blocking(child.stdout.fileno(), False)
        while not (line := child.stdout.readline()):
            assert child.poll() is None, "the load failed"
            peak = max(peak, anonymous_bytes(child.pid))
            time.sleep(LOOK_EVERY_S)
        held = anonymous_bytes(child.pid)
        child.stdin.close()
    seconds, disk_bytes = json.loads(line)
    return Measured(seconds, max(peak, held) - before, held - before, disk_bytes)


def anonymous_bytes(process_id: int) -> int:
    """Resident less file-backed memory of a process."""
    fields = Path(f"/proc/{process_id}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def median(samples: Sequence[Measured]) -> Measured:
    """The median of each figure by itself."""
    columns = zip(*(asdict(sample).values() for sample in samples), strict=True)
    seconds, *sizes = (statistics.median(column) for column in columns)
    return Measured(seconds, *map(int, sizes))


def table(results: dict[Way, list[Measured]]) -> str:
    """Markdown; the ratio is to our overlapped load at the same bits from the same files."""
    lines = [header("bits | files | load | seconds | ratio | peak MiB | held MiB | read MiB")]
    medians = {way: median(samples) for way, samples in results.items()}
    base = {
        (way.stored, way.bits, way.cold): found.seconds
        for way, found in medians.items()
        if way.name == (READING if way.stored else "overlapped")
    }
    for way, found in sorted(medians.items(), key=lambda each: (-each[0].bits, not each[0].cold)):
        sizes = (found.peak_bytes, found.held_bytes, found.disk_bytes)
        cells = [
            way.stored or str(way.bits),
            "cold" if way.cold else "warm",
            way.name,
            f"{found.seconds:.2f}",
        ]
        cells += [f"{found.seconds / base[way.stored, way.bits, way.cold]:.2f}"]
        cells += [f"{size / MIB:.0f}" for size in sizes]
        lines.append(table_row(cells))
    return "\n".join(lines)


def run(options: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoints, load them in all ways, print the table."""
    tiny, cache_folder = folder / "tiny", folder / "cache"
    hidden = 4096 if options.stored else 2048
    layer_bytes = sum(
        parameter.numel() * 2
        for name, parameter in empty_model(config_of(1, hidden, 32000)).named_parameters()
        if ".layers." in name
    )
    layers = max(1, round(options.gib * 1024 * MIB / layer_bytes))
    write_checkpoint(tiny, config_of(TINY_LAYERS, 128, 96))
    larges = {stored: folder / f"large{stored}" for stored in options.stored or ("",)}
    for stored, large in larges.items():
        write_checkpoint(large, config_of(layers, hidden, 32000), stored)
    ways = [way for stored in options.stored for way in stored_ways(stored)]
    ways = ways or [way for bits in options.bits for way in ways_of(bits)]
    results: dict[Way, list[Measured]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            if way.cold and way.name == "sequential":  # the cache holds one bitwidth at a time
                shutil.rmtree(cache_folder, ignore_errors=True)
            sample = measure(way, larges[way.stored], tiny, cache_folder, options.threads)
            results[way].append(sample)
            print(way, sample, file=sys.stderr, flush=True)
    files = [path for large in larges.values() for path in large.glob("*.safetensors")]
    stored_bytes = sum(path.stat().st_size for path in files)
    print(
        f"{processor_name()}, {options.threads} torch thread(s), "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}; "
        f"{layers} layers, {stored_bytes / MIB:.0f} MiB of files; "
    )
    print(f"medians of {options.rounds} rounds, each load in its own process.\n")
    print(table(results))
    if not HAS_PEER:
        print("\nbitsandbytes is left out: pip install bitsandbytes accelerate")


def main() -> None:
    """Entry point, of the parent and of its children."""
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", nargs="+", type=int, choices=BITWIDTHS[:-1], default=[4, 3, 8])
    formats = ("awq", "gptq", "compressed-tensors")
    parser.add_argument("--stored", nargs="+", choices=formats, default=[])
    parser.add_argument("--gib", type=float, default=1.5, help="of decoder layers in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
