"""What a quantizer's process is given and what it leaves: dequantized weights and their true bytes.

    python -m benchmarks.quantization.contestants.hqq MODEL CALIBRATION.npy FOLDER [--only NAME …]

writes `FOLDER/NAME.safetensors` for each of its settings. It needs no package of this repository's
but those of `benchmarks.quantization.models`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.quantization.models import linear_names


@dataclass(frozen=True)
class Rounded:
    """A weight `[out, in]`, dequantized, and the bytes of its codes, scales and zeros."""

    weight: Tensor
    nbytes: int


@dataclass(frozen=True)
class Given:
    """The model's folder, and text to calibrate on: token ids `[sequences, length]`."""

    model: Path
    token_ids: npt.NDArray[np.int64]

    def linears(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights, float32 `[out, in]`, of the linears of the decoder layers."""
        tensors = load_file(self.model / "model.safetensors")
        for name in linear_names(self.model):
            yield name, tensors[name].float()


Quantizer = Callable[[Given], Iterator[tuple[str, Rounded]]]


@dataclass(frozen=True)
class Outcome:
    """A quantizer's weights by name, and their bytes a weight times eight."""

    weights: dict[str, Tensor]
    bits: float


def weight_by_weight(rounded: Callable[[Tensor], Rounded]) -> Quantizer:
    """A quantizer that looks at one weight at a time, and at no text."""

    def quantizer(given: Given) -> Iterator[tuple[str, Rounded]]:
        for name, weight in given.linears():
            yield name, rounded(weight)

    return quantizer


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the tensors that there are."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def main(settings: Mapping[str, Quantizer], arguments: Sequence[str] | None = None) -> int:
    """Quantize by every setting; 1 where one failed, its reason on the standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(settings), metavar="NAME")
    options = parser.parse_args(arguments)
    given = Given(options.model, np.load(options.calibration))
    failed = 0
    for name in settings:
        target = options.folder / f"{name}.safetensors"
        if name not in options.only or target.exists():
            continue
        began = time.perf_counter()
        try:
            found = dict(settings[name](given))
        except Exception:  # a library's failure is a row of the table; the others still run
            failed = 1
            print(f"{name}:", file=sys.stderr)
            traceback.print_exc()
            continue
        weights = {key: each.weight.float().contiguous() for key, each in found.items()}
        stored = {"nbytes": str(sum(each.nbytes for each in found.values()))}
        save_file(weights, target.with_suffix(".part"), stored)
        os.replace(target.with_suffix(".part"), target)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return failed


def read_outcome(file: Path) -> Outcome:
    """What a quantizer wrote."""
    with safe_open(file, "pt") as opened:
        stored = int(opened.metadata()["nbytes"])
    weights = load_file(file)
    return Outcome(weights, 8 * stored / sum(each.numel() for each in weights.values()))
