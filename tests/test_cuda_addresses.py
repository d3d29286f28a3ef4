"""Emulated kernels with the address sanitizer, which needs a process that was started with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulation import environment_with_address_sanitizer, needs_compiler

pytestmark = [needs_compiler, pytest.mark.rare]

ROOT = Path(__file__).parents[1]
EMULATED = (
    "quant/backends/cuda/test_cuda_kernels.py",
    "quant/backends/cuda/test_cuda_w8a8.py",
    "actors/attention/test_cuda.py",
    "actors/attention/delta/test_cuda_delta.py",
    "actors/stage/test_own_layers.py",
    "actors/stage/test_layer_kernels.py",
)
"""Files whose tests run kernels by the emulator."""

A_ROW_TOO_FEW = """
import torch
from quant.backends.cuda.packed import Cuda8Bit
from quant.backends.cuda.products import KERNELS, SOURCE
from quant.rounding.canonical import quantize
from tests.cuda_emulation import emulated
kernels = emulated(SOURCE, KERNELS, BITS=8, BFLOAT16=0, CAPABILITY=60)
packed = Cuda8Bit.from_canonical(quantize(torch.randn(9, 4224), 8))
x, out = torch.randn(1, 4224).half(), torch.empty(1, 9).half()
for rows in (9, 8):
    held = packed.packed[:rows].clone()
    width = packed.codes.width
    kernels.launch("one_token", 2, x, held, packed.scales, None, out, 1, 9, width)
    print(rows, "rows are there")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment_with_address_sanitizer(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("path", EMULATED)
def test_kernels_stay_within_their_memory(path: str) -> None:
    result = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{path}")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "100%" in result.stdout


def test_a_row_too_few_is_caught() -> None:
    result = run("-c", A_ROW_TOO_FEW)
    assert result.stdout == "9 rows are there\n"
    assert "heap-buffer-overflow" in result.stderr
