"""llmpq's own roundings: nearest, weighted by the importance of random ids or of text, and GPTQ.

The groups are those of the product, 128 where they divide a row; with "groups of 64" none is wider.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from actors.stage.importance import measure_layers, random_token_ids
from actors.stage.layer_stream import LayerStream, compute_on
from benchmarks.quantization.contestants.exchange import Given, Quantizer, Rounded, main, nbytes
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from quant import scheme
from quant.backends.selection import fallback_rule
from quant.canonical import dequantize, quantize
from quant.checkpoint.reader import Checkpoint
from quant.gptq.format import read_gptq
from quant.gptq.options import GptqOptions
from quant.importance.statistics import LayerImportance
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.ways import Rounding
from quant.scheme import LinearShape

_COMPUTE = compute_on(torch.device("cpu"), torch.float32)
Measure = Callable[[Given], Sequence[LayerImportance]]


def rounded(
    given: Given, bits: int, mode: str, measure: Measure | None = None
) -> Iterator[tuple[str, Rounded]]:
    """Every linear as it is quantized while it is loaded."""
    layers = measure(given) if measure else ()
    for name, weight in given.linears():
        index, linear = name.partition(".layers.")[2].removesuffix(".weight").split(".", 1)
        inputs = layers[int(index)].inputs[linear] if layers else None
        found = quantize(weight, bits, rounding=Rounding.of_tensor(mode, name), inputs=inputs)
        yield name, Rounded(dequantize(found), _held(weight, bits))


def in_groups_of_64(quantizer: Quantizer) -> Quantizer:
    """The same with narrower groups."""

    def narrower(given: Given) -> Iterator[tuple[str, Rounded]]:
        with patch.object(scheme, "GROUP_SIZES", (64, 32)):
            yield from quantizer(given)

    return narrower


def calibrated(
    given: Given, bits: int, on_random_ids: bool = False
) -> Iterator[tuple[str, Rounded]]:
    """What `llmpq quantize` writes, and with random ids a run of rounding `gptq` without a text."""
    stream = LayerStream(given.model, _COMPUTE)
    layers, shape = stream.layers, given.token_ids.shape
    token_ids = torch.from_numpy(given.token_ids)
    if on_random_ids:
        token_ids = random_token_ids(stream.config, *shape)
    wanted = Quantization((bits,) * layers, token_ids, _COMPUTE, GptqOptions())
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "calibrated"
        quantize_checkpoint(given.model, target, wanted)
        checkpoint = Checkpoint(target)
        for name, weight in given.linears():
            shape = (weight.shape[0], weight.shape[1])
            found = read_gptq(checkpoint, name.removesuffix(".weight"), shape)
            held = weight.numel() * bits // 8 + nbytes(found.scale) + found.zero.numel() * bits // 8
            yield name, Rounded(found.dequantize(), held)


def from_random_ids(given: Given) -> Sequence[LayerImportance]:
    """The importance that a run measures where no file tells it."""
    return _measured(given, None)


def from_text(given: Given) -> Sequence[LayerImportance]:
    """The importance of the text to calibrate on."""
    token_ids = torch.from_numpy(given.token_ids)
    return _measured(given, LayerStream(given.model, _COMPUTE).embed(token_ids))


def _measured(given: Given, hidden: Tensor | None) -> Sequence[LayerImportance]:
    layers = LayerStream(given.model, _COMPUTE).layers
    schemes = [LayerScheme()] * layers
    return measure_layers(given.model, _COMPUTE, range(layers), schemes, hidden)[1]


def _held(weight: Tensor, bits: int) -> int:
    """Bytes of the kernel's form."""
    return fallback_rule(bits).nbytes(LinearShape(weight.shape[1], weight.shape[0]), "float16")


def _settings(bits: int) -> dict[str, Quantizer]:
    weighted = partial(rounded, bits=bits, mode="weighted")
    ways = {
        "nearest": partial(rounded, bits=bits, mode="nearest"),
        "least squares": weighted,
        "weighted": partial(weighted, measure=from_random_ids),
        "weighted by text": partial(weighted, measure=from_text),
        "GPTQ of random ids": partial(calibrated, bits=bits, on_random_ids=True),
        "GPTQ": partial(calibrated, bits=bits),
    }
    narrower = ("nearest", "weighted", "GPTQ")
    settings = {f"llmpq {bits} bit, {name}": way for name, way in ways.items()}
    return settings | {
        f"llmpq {bits} bit, {name}, groups of 64": in_groups_of_64(ways[name]) for name in narrower
    }


SETTINGS = _settings(4) | _settings(3)

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
