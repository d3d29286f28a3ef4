"""Two stages on one GPU in one process: the very tokens that transformers generates, in float32.

In 16 bit, which our own kernels are for, the first stage's hidden states are held against those in
float32: of prompts, and of two decode steps.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import PretrainedConfig

from actors.stage.stage import Stage
from benchmarks.gpu.findings import Findings, Place, Table
from benchmarks.gpu.measurements.models import quiet
from quant.devices import local_processor
from tests.actors.batches import SLOT_TOKENS, batch_in_ranges
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, reference, save_tiny, specs_of

LENGTHS = (5, 11, 1, 8, 17, 2, 11)
NEW_TOKENS = 14
DRY_FAMILIES = ("llama", "opt")
CUT = 2
ERRORS_IN_UNITS = 4.0
"""Relative error (Frobenius norm) of hidden states that rounding in so few layers stays below, in
units of the type's `eps`."""


def run(findings: Findings, place: Place, _: str) -> None:
    """Every architecture that stages know, tiny and random."""
    quiet()
    torch.set_float32_matmul_precision("highest")
    table = findings.table(
        "", family="{}", requests="{}", tokens="{}", equal="{}", seconds="{:.1f}",
        in_16_bit="{:.3%}",
    )  # fmt: skip
    for name in CONFIGS:
        if place.dry_run and name not in DRY_FAMILIES:
            continue
        with findings.trying(name):
            _compare(findings, table, name, place)


def _compare(findings: Findings, table: Table, name: str, place: Place) -> None:
    began = time.perf_counter()
    expected, found = both(name, CONFIGS[name], place)
    seconds = time.perf_counter() - began
    equal = sum(a == b for a, b in zip(expected, found, strict=True))
    tokens = sum(map(len, expected))
    dtype = place.size("float16", "bfloat16")
    error = rounding_error(name, dtype, place)
    share = f"{equal} of {len(expected)}"
    findings.row(table, name, len(expected), tokens, share, seconds, error)
    if equal != len(expected):
        findings.complain(f"{name}: {len(expected) - equal} requests got other tokens")
    if not error <= ERRORS_IN_UNITS * torch.finfo(getattr(torch, dtype)).eps:
        findings.complain(f"{name}: hidden states in {dtype} are off by {error:.2%}")


def both(
    name: str, config: PretrainedConfig, place: Place
) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens of every prompt by `generate` and by two stages, both on the device."""
    folder, device = place.folder / f"tiny-{name}", place.device
    model = save_tiny(folder, config).to(device)
    prompts, longest = random_prompts(LENGTHS), max(LENGTHS) + NEW_TOKENS
    specs = specs_of((0, CUT, LAYERS), len(prompts), longest)
    stages = [Stage(spec, folder, device, local_processor(device)) for spec in specs]
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    return expected, generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3)


def rounding_error(name: str, dtype: str, place: Place) -> float:
    """The largest relative error of hidden states in `dtype`."""
    exact, rounded = (_hidden(name, each, place) for each in ("float32", dtype))
    return max(float((a - b).norm() / a.norm()) for a, b in zip(exact, rounded, strict=True))


def _hidden(name: str, dtype: str, place: Place) -> list[torch.Tensor]:
    """Hidden states of prompts and two decode steps after the first stage."""
    spec, _ = specs_of((0, CUT, LAYERS), len(LENGTHS), SLOT_TOKENS, dtype=dtype)
    stage = Stage(spec, place.folder / f"tiny-{name}", place.device, local_processor(place.device))
    counts, slots = np.array(LENGTHS), np.arange(len(LENGTHS))
    prompts = torch.tensor([token for prompt in random_prompts(LENGTHS) for token in prompt])
    steps = [batch_in_ranges(slots, counts + n, np.ones_like(slots)) for n in range(2)]
    found = [stage.step(batch_in_ranges(slots, 0 * counts, counts), prompts)]
    found += [stage.step(step, prompts[: len(slots)]) for step in steps]
    return [each.double().cpu() for each in found if isinstance(each, torch.Tensor)]
