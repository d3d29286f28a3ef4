"""Two stages on one GPU in one process: the very tokens that transformers generates, in float32."""

from __future__ import annotations

import time

import torch
from transformers import PretrainedConfig

from actors.stage.stage import Stage
from benchmarks.gpu.findings import Findings, Place, Table
from benchmarks.gpu.measurements.models import quiet
from quant.devices import local_processor
from tests.actors.models import (
    CONFIGS,
    LAYERS,
    generate,
    random_prompts,
    reference,
    save_tiny,
    specs_of,
)

LENGTHS = (5, 11, 1, 8, 17, 2, 11)
NEW_TOKENS = 14
DRY_FAMILIES = ("llama", "opt")
CUT = 2


def run(findings: Findings, place: Place, _: str) -> None:
    """Every architecture that stages know, tiny and random."""
    quiet()
    torch.set_float32_matmul_precision("highest")
    table = findings.table(
        "", family="{}", requests="{}", tokens="{}", equal="{}", seconds="{:.1f}"
    )
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
    findings.row(table, name, len(expected), tokens, f"{equal} of {len(expected)}", seconds)
    if equal != len(expected):
        findings.complain(f"{name}: {len(expected) - equal} requests got other tokens")


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
