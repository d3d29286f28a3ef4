"""How long passes of a text through a model take on this machine, told before they begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmpq.quality.indicator import ALONE_TOKENS
from llmpq.quality.omega import SHARES
from llmpq.quality.options import ERROR, IndicatorOptions
from planner.model.shape import ModelShape
from quant.loading.emulated_kernels import Compute
from quant.scheme import FULL_BITS

MEASURE_S = 0.2
"""Seconds of products by which a machine's speed is measured."""

PASS_SHARE = 0.8
"""Share of that speed that a layer reaches with its attention, norms and loading."""

SOLVING_SHARE = 0.15
"""Share that GPTQ reaches: its loop over columns is mostly small operations."""

ROUNDING_OPERATIONS = 2000
"""Operations for a weight and bitwidth of rounding under importance: it tries some scales."""

_TOKENS, _WIDTH = 512, 1024


def operations_per_s(compute: Compute, clock: Callable[[], float] = time.perf_counter) -> float:
    """Floating-point operations per second of matrix products as large as a layer's."""
    left = torch.ones(_TOKENS, _WIDTH, dtype=compute.dtype, device=compute.device)
    right = torch.ones(_WIDTH, _WIDTH, dtype=compute.dtype, device=compute.device)
    _wait(left @ right)  # the first one also starts threads and kernels
    began_s, count = clock(), 0
    while (passed_s := clock() - began_s) < MEASURE_S or not count:
        _wait(left @ right)
        count += 1
    return 2.0 * count * _TOKENS * _WIDTH * _WIDTH / passed_s


def _wait(result: torch.Tensor) -> None:
    if result.device.type == "cuda":
        torch.cuda.synchronize(result.device)


@dataclass(frozen=True)
class Effort:
    """Expected seconds of work on the model of `shape` at this many products a second."""

    shape: ModelShape
    operations_per_s: float

    def passes_s(self, tokens: int, layer_passes: int, head_passes: int = 0) -> float:
        """Seconds in which `tokens` pass `layer_passes` layers and `head_passes` heads."""
        shape = self.shape
        idle = shape.total_parameters - shape.active_parameters
        weights = layer_passes * (sum(shape.parameters_by_layer) - idle) / shape.layers
        weights += head_passes * shape.head_parameters
        return 2.0 * tokens * weights / (self.operations_per_s * PASS_SHARE)

    def evaluation_s(self, tokens: int, layers: Sequence[Sequence[object]]) -> float:
        """Seconds to evaluate models of these `layers`; equal beginnings are computed once."""
        forms = {tuple(each[: end + 1]) for each in layers for end in range(len(each))}
        return self.passes_s(tokens, len(forms), len(layers))

    def gptq_s(self, tokens: int, bitwidths: Sequence[int]) -> float:
        """Seconds to calibrate a checkpoint of these bits: a pass for each of four inputs of a
        layer, two for experts, and one with its new weights, X^T X of each input, and the rounding.
        """
        passes, operations = self.shape.layers, 0.0
        for layer, bits in enumerate(bitwidths):
            if bits == FULL_BITS:
                continue
            own = self.shape.layer(layer)
            wide = own.intermediate_size if own.experts is None else own.experts.shared_width
            inputs = (own.hidden_size,) * 3 + (wide,) * (wide > 0)
            rows = sum(linear.parameters for linear in own.layer_linears) / sum(inputs)
            each = [(1, 1.0, width, rows) for width in inputs]
            if own.experts is not None:
                count, asked = own.experts.count, own.experts.per_token / own.experts.count
                each += [(count, asked, e.in_features, e.out_features) for e in own.expert_linears]
                passes += 2
            passes += 4
            for count, seen, width, outputs in each:
                solving = 2.0 * width**3 + 2.0 * outputs * width**2
                gram = 2.0 * seen * tokens * width**2
                operations += count * (gram / PASS_SHARE + solving / SOLVING_SHARE)
        return self.passes_s(tokens, passes) + operations / self.operations_per_s

    def indicator_s(self, tokens: int, options: IndicatorOptions) -> float:
        """Seconds to measure the sensitivity of every layer on at most so many tokens."""
        shape = self.shape
        seconds = self.passes_s(tokens, shape.layers)
        if options.method != ERROR:
            return seconds
        bits = [each for each in options.bits if each != FULL_BITS]
        weights = len(bits) * sum(shape.parameters_by_layer)
        seconds += ROUNDING_OPERATIONS * weights / self.operations_per_s
        parts = sum(1 + (shape.layer(each).experts is not None) for each in range(shape.layers))
        models = min(2, len(bits)) * parts  # with one part of a layer quantized, which share those
        few, passes = min(tokens, ALONE_TOKENS), models * (shape.layers + 1) // 2  # before it
        return seconds + self.passes_s(few, passes, models)

    def points_s(self, tokens: int, options: IndicatorOptions) -> float:
        """Seconds to measure the perplexities beside an indicator."""
        models = len(options.bits) + len(SHARES)
        return self.passes_s(tokens, models * self.shape.layers, models)
