"""How far weights are from what a checkpoint stores, where a plan rounds them again:

    python -m benchmarks.quantization.rounded_again

Weights of SmolLM2, whose channels are in another order, are stored in each format, decoded, and
rounded to the bits of plans to the nearest. The error is that of all of them beside what was
decoded (root of the mean square).
`planner.model.stored_bits.ADDED_ERRORS` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.quantization.models import smollm2
from quant.checkpoint.reader import Checkpoint
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import BITWIDTHS, FULL_BITS
from tests.quant.stored_formats import affine, compress, meant, of_table

LAYERS = (0, 7, 14, 21, 29)
BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8(weight: Tensor) -> Tensor:
    """FP8 in blocks, of which the last may be smaller."""
    found = torch.empty_like(weight)
    for rows in torch.arange(len(weight)).split(BLOCK):
        for columns in torch.arange(weight.shape[1]).split(BLOCK):
            part = weight[rows][:, columns]
            scale = part.abs().max() / _LARGEST
            found[rows[:, None], columns] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    return found


def _by_library(**arguments: object) -> Callable[[Tensor], Tensor]:
    return lambda weight: compress(weight, type="float", symmetric=True, **arguments)[1].float()


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": fp8,
    "mxfp8": _by_library(num_bits=8, strategy="group", group_size=32),
    "mxfp4": _by_library(num_bits=4, strategy="group", group_size=32),
    "nvfp4": _by_library(num_bits=4, strategy="tensor_group", group_size=16),
    "nf4": lambda weight: of_table(weight)[1],
    "codes of 4 bit": lambda weight: meant(*affine(weight, 64)).float(),
}


def weights() -> Iterator[Tensor]:
    checkpoint = Checkpoint(smollm2())
    for name in checkpoint.names():
        if name.endswith("_proj.weight") and int(name.split(".layers.")[1].split(".")[0]) in LAYERS:
            yield checkpoint.read(name).float()


def main() -> None:
    every = list(weights())
    print(f"relative error of {sum(map(torch.numel, every)):,} weights")
    for name, encode in FORMATS.items():
        stored = [encode(each) for each in every]
        total = sum(float(each.square().sum()) for each in stored)
        errors = []
        for bits in (each for each in BITWIDTHS if each < FULL_BITS):
            lost = (dequantize(quantize(each, bits)) - each for each in stored)
            error = math.sqrt(sum(float(each.square().sum()) for each in lost) / total)
            errors.append(f"{bits} bit {error:.3f}")
        print(f"{name}: {', '.join(errors)}", flush=True)


if __name__ == "__main__":
    main()
