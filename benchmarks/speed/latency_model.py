"""Errors of the models of time and memory: layer times of this CPU and of two GPUs, bytes held.

    python -m benchmarks.speed.latency_model cpu [--bits 3 4 8 16] [--workloads 8] [--together]
    python -m benchmarks.speed.latency_model gpus [--helix ../shared/data/helix]
    python -m benchmarks.speed.latency_model memory [--plans 20]

`cpu`: a LLaMA layer is profiled as `llmpq profile` does, then random workloads that are not in the
profile are measured afresh, one thread; both at the usual pace of the machine
(`actors.profiling.on_cluster`), the raw column as the clock ran. `--together` measures both in
turns, so that a machine that gets slower meanwhile counts for neither. `gpus`: measured fp16 times
of a LLaMA-30B layer (Helix, ASPLOS'25 artifact), fitted on alternate points. `memory`: stages with
random bitwidths are loaded, and the bytes of their tensors counted.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, Qwen2Config
from transformers.utils import logging

from actors.profiling.on_cluster import measure_on_cluster
from actors.profiling.task import ProfileState, ProfileTask
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from benchmarks.lab import PAPER_BITS, header, processor_name
from llmpq.remote.session import ray_session
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import (
    embedding_bytes,
    head_bytes,
    kv_cache_bytes_per_layer,
    layer_weight_bytes,
    norm_bytes,
)
from planner.model.finding import model_shape, shape_from_config
from planner.model.shape import ModelShape
from planner.profiles.design import DesignSpace, LayerWorkload, design
from planner.profiles.fit import FitError, FittedLatency, all_together, relative_errors
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.rows import ProfileRow
from planner.scheduling import PHASES, Phase
from planner.workload import Workload
from quant.devices import local_processor

CPU = torch.device("cpu")
HELIX = {"T4": "T4", "A100": "A100-SXM4-40GB"}
# Helix states tokens in a batch, not how they part: prompts of one length, contexts of none.
HELIX_PROMPT = 250


def layer_values(hidden: int) -> dict[str, Any]:
    """`config.json` of a LLaMA of this width."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 12,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }


def random_workloads(
    space: DesignSpace, phase: Phase, count: int, seed: int
) -> tuple[LayerWorkload, ...]:
    """`count` different workloads, evenly drawn from the logarithms of batch size and length."""
    generator = np.random.default_rng(seed)
    found: dict[LayerWorkload, None] = {}
    bounds = np.log(
        [
            (min(space.batch_sizes), max(space.batch_sizes) + 0.5),
            (space.min_length, space.max_length),
        ]
    )
    for _ in range(1000 * count):
        batch, length = np.exp(generator.uniform(bounds[:, 0], bounds[:, 1]))
        workload = LayerWorkload(phase, int(batch), int(length))
        if space.holds(workload):
            found[workload] = None
        if len(found) == count:
            break
    return tuple(found)


def this_cpu(threads: int) -> Device:
    """The device that the planner sees."""
    node = {"accelerators": {"CPU": 1}, "memory_gib": 8, "threads": threads}
    return ClusterSpec.from_dict({"name": "here", "nodes": [node]}).devices[0]


def rows_of(
    state: ProfileState, shape: ModelShape, phase: Phase, as_clocked: bool
) -> Iterator[ProfileRow]:
    """The measured times of one phase as rows of a profile, corrected by the pace or not."""
    for each in state.measured:
        if each.workload.phase == phase:
            seconds = each.raw_s if as_clocked else each.seconds
            found = profile_row("CPU", shape, each.workload, each.bits, seconds)
            attention_s = each.attention_s and each.attention_s * seconds / each.seconds
            yield replace(found, attention_s=attention_s)


def profile_row(
    device: str, shape: ModelShape, workload: LayerWorkload, bits: int, seconds: float
) -> ProfileRow:
    """A row that does not say for which kernel and number of threads it holds."""
    is_prefill = workload.phase == "prefill"
    return ProfileRow(
        device=device,
        model=shape.name,
        layer=LayerTerms.of(shape),
        intermediate_size=shape.intermediate_size,
        phase=workload.phase,
        bits=bits,
        batch_size=workload.batch_size,
        prompt_length=workload.length if is_prefill else 1,
        context_length=0 if is_prefill else workload.length,
        seconds=seconds,
    )


def cpu_table(options: argparse.Namespace) -> Iterator[str]:
    """Markdown rows: errors on unseen workloads by bitwidth and phase."""
    values = layer_values(options.hidden)
    shape = shape_from_config(f"LLaMA layer of width {options.hidden}", values)
    device = this_cpu(1)
    space = DesignSpace(max_length=options.max_length)
    yield (
        f"{shape.name} on {processor_name()}, 1 thread, bfloat16; {options.points} points fitted, "
        f"{options.workloads} unseen for each bitwidth and phase"
    )
    yield ""
    yield header("bits | phase | unseen | mean | 95th percentile | most | raw mean | spread")
    found: list[FitError] = []
    for bits in options.bits:
        known = tuple(w for phase in PHASES for w in design(space, phase, options.points))
        unseen = tuple(
            w
            for phase in PHASES
            for w in random_workloads(space, phase, options.workloads, options.seed + bits)
            if w not in known
        )
        profiled, fresh = measured_pair(values, bits, known, unseen, options.together)
        for phase in PHASES:
            error, raw = (
                unseen_error(
                    tuple(rows_of(profiled, shape, phase, as_clocked)),
                    tuple(rows_of(fresh, shape, phase, as_clocked)),
                    shape,
                    device,
                )
                for as_clocked in (False, True)
            )
            found.append(error)
            spreads = [m.spread for m in fresh.measured if m.workload.phase == phase]
            yield f"{_cells(error)} {raw.mean:.1%} | {float(np.median(spreads)):.1%} |"
    yield f"{_cells(all_together(found))} | |"


def measured_pair(
    values: dict[str, Any],
    bits: int,
    known: tuple[LayerWorkload, ...],
    unseen: tuple[LayerWorkload, ...],
    together: bool,
) -> tuple[ProfileState, ProfileState]:
    """Measure `known` and `unseen`, in turns or one set after the other."""
    task = ProfileTask(values, "bfloat16", {bits: known}, threads=1, seed=bits)
    if together:
        state = _measured(replace(task, todo={bits: (*known, *unseen)}))
        first, second = (
            replace(state, measured=tuple(m for m in state.measured if m.workload in part))
            for part in (known, unseen)
        )
        return first, second
    profiled = _measured(task)
    usual_s = profiled.usual_reference_s
    fresh = replace(task, todo={bits: unseen}, seed=bits + 1, usual_reference_s=usual_s)
    return profiled, _measured(fresh)


def _measured(task: ProfileTask) -> ProfileState:
    """Run a task in a process started as a stage's, and return all that it measures."""
    return list(measure_on_cluster(task, this_cpu(1)))[-1]


def unseen_error(
    known: Sequence[ProfileRow], unseen: Sequence[ProfileRow], shape: ModelShape, device: Device
) -> FitError:
    """The error of the fit on `known` rows of one bitwidth and phase, on the `unseen` ones."""
    model = FittedLatency(tuple(known), RooflineLatency(shape))
    errors = relative_errors(model, device, unseen, "bfloat16")
    return FitError(known[0].bits, known[0].phase, len(known), errors)


def _cells(error: FitError) -> str:
    bits = "all" if error.bits is None else error.bits
    return (
        f"| {bits} | {error.phase or ''} | {len(error.errors)} | {error.mean:.1%} | "
        f"{error.percentile_95:.1%} | {error.most:.1%} |"
    )


def gpu_table(folder: Path) -> Iterator[str]:
    """Markdown rows: fp16 times of LLaMA-30B layers, every second point fitted."""
    shape = model_shape("llama-30b")
    yield header("GPU | phase | fitted | left out | mean | 95th percentile | most")
    for short, name in HELIX.items():
        device = ClusterSpec.from_counts([name], [1]).devices[0]
        for phase in PHASES:
            word = "prompt" if phase == "prefill" else phase
            path = folder / f"llama1_30b_{short.lower()}_{word}.csv"
            rows = list(helix_rows(path, device, shape, phase))
            model = FittedLatency(tuple(rows[::2]), RooflineLatency(shape))
            errors = relative_errors(model, device, rows[1::2], "float16")
            error = FitError(16, phase, len(rows[::2]), errors)
            yield (
                f"| {short} | {phase} | {error.fitted} | {len(errors)} | {error.mean:.1%} | "
                f"{error.percentile_95:.1%} | {error.most:.1%} |"
            )


def helix_rows(path: Path, device: Device, shape: ModelShape, phase: Phase) -> Iterator[ProfileRow]:
    """The rows of one of Helix's files."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing; name the folder of Helix's layer times with --helix")
    with path.open(newline="") as stream:
        for values in csv.DictReader(stream):
            tokens, seconds = int(values["tokens_in_batch"]), float(values["ms_per_layer"]) / 1e3
            if not tokens:
                continue
            is_prefill = phase == "prefill"
            workload = LayerWorkload(
                phase,
                tokens // HELIX_PROMPT if is_prefill else tokens,
                HELIX_PROMPT if is_prefill else 0,
            )
            yield profile_row(device.accelerator.name, shape, workload, 16, seconds)


def memory_table(plans: int, seed: int) -> Iterator[str]:
    """Markdown rows: planned bytes of weights and KV cache against those of the tensors."""
    yield header("model | layers' bits | slots x tokens | planned (MB) | held (MB) | difference")
    draw = random.Random(seed)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        models = list(_small_models(Path(folder)))
        for number in range(plans):
            path, config = models[number % len(models)]
            line, difference = _memory_row(path, config, draw)
            worst = max(worst, abs(difference))
            yield line
    yield ""
    yield f"Largest difference of {plans} plans: {worst:.3%}"


def _small_models(folder: Path) -> Iterator[tuple[Path, PretrainedConfig]]:
    """Random checkpoints of three families."""
    common: dict[str, Any] = {"vocab_size": 2000, "max_position_embeddings": 512}
    rope = common | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs = (
        LlamaConfig(**rope, **heads),
        OPTConfig(**common, hidden_size=192, ffn_dim=768, num_hidden_layers=6,
                  num_attention_heads=3, word_embed_proj_dim=192),
        Qwen2Config(**rope, **heads, tie_word_embeddings=True),
    )  # fmt: skip
    for config in configs:
        path = folder / config.model_type
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        yield path, config


def _memory_row(path: Path, config: PretrainedConfig, draw: random.Random) -> tuple[str, float]:
    """A random plan of one to three stages, planned and held."""
    shape, device, dtype = model_shape(path), this_cpu(1), "bfloat16"
    bits = tuple(draw.choice(PAPER_BITS) for _ in range(shape.layers))
    cuts = sorted(draw.sample(range(1, shape.layers), draw.randrange(3)))
    bounds = [0, *cuts, shape.layers]
    slots, tokens = draw.randrange(1, 9), draw.randrange(16, 257)
    workload = Workload(slots, tokens - 8, 8)
    planned = held = 0
    for index, (start, end) in enumerate(pairwise(bounds)):
        spec = StageSpec(
            index, len(bounds) - 1, range(start, end), bits[start:end], dtype, slots, tokens,
            slots * tokens,
        )  # fmt: skip
        stats = Stage(spec, path, CPU, local_processor(CPU)).stats()
        held += stats.weight_bytes + stats.kv_cache_bytes
        planned += sum(layer_weight_bytes(shape, b, device, dtype) for b in spec.bitwidths)
        planned += len(spec.layers) * kv_cache_bytes_per_layer(shape, workload, 16, dtype)
        planned += embedding_bytes(shape, dtype) if spec.is_first else 0
        if spec.is_last:
            planned += norm_bytes(shape, dtype) + head_bytes(shape, dtype, spec.is_first)
    difference = planned / held - 1
    parts = "/".join(" ".join(map(str, bits[a:b])) for a, b in pairwise(bounds))
    return (
        f"| {config.model_type} | {parts} | {slots} x {tokens} | {planned / 1e6:.3f} | "
        f"{held / 1e6:.3f} | {difference:+.3%} |"
    ), difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cpu", "gpus", "memory"])
    parser.add_argument("--bits", type=int, nargs="+", default=PAPER_BITS, choices=PAPER_BITS)
    parser.add_argument("--hidden", type=int, default=1024, help="cpu: width of the layer")
    parser.add_argument("--max_length", type=int, default=1024, help="cpu: longest length")
    parser.add_argument(
        "--points", type=int, default=16, help="cpu: profiled, a bitwidth and phase"
    )
    parser.add_argument("--workloads", type=int, default=8, help="cpu: unseen ones")
    parser.add_argument(
        "--together", action="store_true", help="cpu: unseen ones in turns with the profile"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--helix", type=Path, default=Path("../shared/data/helix"))
    parser.add_argument("--plans", type=int, default=20, help="memory: how many")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tables = {
        "cpu": lambda: cpu_table(options),
        "gpus": lambda: gpu_table(options.helix),
        "memory": lambda: memory_table(options.plans, options.seed),
    }
    with ray_session("local") if options.what == "cpu" else nullcontext():
        for line in tables[options.what]():
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
