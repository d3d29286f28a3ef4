"""The terms to which seconds of a decoder layer, of its attention and of its rest are fitted.

Names for the paper's symbols: v requests of a micro-batch, s prompt tokens, t + s context tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from planner.costs.latency_model import LayerSeconds
from planner.profiles.rows import LayerTerms
from planner.scheduling import Phase

Vector = npt.NDArray[np.float64]
Workload = tuple[int, int]
"""Requests and the length of each; for what goes by tokens alone, 1 and the tokens."""

# Rows from which kernels restore weights instead of multiplying row by row: 24 at 8 bit, 96 at 3
# and 4 bit on CPUs, 25 on GPUs; other products are below their full rate up to these.
_KERNEL_ROWS = (24, 96)
# Elements of hidden states that fill, with the intermediate results of a layer, the caches of a
# processor: with more, rows took a fifth longer (hidden size 1024, 16 and 4 bit, 32 MiB of
# last-level cache).
_CACHED_ELEMENTS = 2**20


def layer_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer's time: float64 [terms]. Prefill has terms in v, s, vs, vs^2 and
    a constant (hidden states, lengths, products, attention, weights read), in rows up to those at
    which kernels change and beyond caches, for each pass of `tokens_at_once`. Decode: v, v(t+s),
    t+s and a constant.
    """
    if phase == "decode":
        v, s = float(batch_size), float(length)
        terms = [
            v * layer.linear_parameters,
            v * s * layer.kv_width,
            s * layer.hidden_size,
            float(layer.linear_parameters),
        ]
        return np.array(terms)

    def one_pass(requests: int) -> Vector:
        v, s = float(requests), float(length)
        terms = [
            v * layer.hidden_size,
            s * layer.hidden_size,
            v * s * layer.linear_parameters,
            v * s * s * layer.query_width,
            *_weight_terms(layer, v * s),
        ]
        return np.array(terms)

    return _in_passes(one_pass, batch_size, length, tokens_at_once)


ATTENTION_TERMS: Mapping[Phase, Vector] = {
    "prefill": np.array([1.0, 1, 0, 1, 0, 0, 0, 0]),
    "decode": np.array([0.0, 1, 1, 0]),
}
"""1 for the terms of `layer_features` that are attention's: those that tokens alone do not say."""


def attention_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of attention's time: float64 [terms]; prefill in a constant a pass, v, vs
    and vs^2, decode in a constant, v, t+s and v(t+s).
    """
    v, s, width = float(batch_size), float(length), float(layer.query_width)
    if phase == "decode":
        return np.array([width, v * width, s * width, v * s * layer.kv_width])

    def one_pass(requests: int) -> Vector:
        v = requests * width
        return np.array([width, v, v * s, v * s * s])

    return _in_passes(one_pass, batch_size, length, tokens_at_once)


def rest_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer without attention, by tokens of each pass: float64 [terms]."""

    def one_pass(tokens: float) -> Vector:
        return np.array([tokens * layer.linear_parameters, *_weight_terms(layer, tokens)])

    if phase == "decode":
        return one_pass(float(batch_size))
    return _in_passes(lambda v: one_pass(float(v * length)), batch_size, length, tokens_at_once)


def _weight_terms(layer: LayerTerms, tokens: float) -> list[float]:
    return [
        float(layer.linear_parameters),
        *(min(tokens, rows) * layer.linear_parameters for rows in _KERNEL_ROWS),
        max(0.0, tokens - _CACHED_ELEMENTS / layer.hidden_size) * layer.linear_parameters,
    ]


def _in_passes(
    one_pass: Callable[[int], Vector], batch_size: int, length: int, tokens_at_once: float
) -> Vector:
    if batch_size * length <= tokens_at_once:
        return one_pass(batch_size)
    together = int(min(max(tokens_at_once / length, 1), batch_size))
    full, rest = divmod(batch_size, together)
    terms_of_full = full * one_pass(together)
    return terms_of_full + one_pass(rest) if rest else terms_of_full


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer as it is fitted: terms, its seconds in a layer's, the workload by which it
    is corrected.
    """

    features: Callable[[Phase, LayerTerms, int, int, float], Vector]
    seconds_of: Callable[[LayerSeconds], float]
    workload: Callable[[Phase, int, int], Workload]


def _requests_and_length(phase: Phase, batch_size: int, length: int) -> Workload:
    return batch_size, length


def _tokens(phase: Phase, batch_size: int, length: int) -> Workload:
    return 1, batch_size * length if phase == "prefill" else batch_size


WHOLE = LayerPart(layer_features, lambda parts: parts.whole_s, _requests_and_length)
ATTENTION = LayerPart(attention_features, lambda parts: parts.attention_s, _requests_and_length)
REST = LayerPart(rest_features, lambda parts: parts.rest_s, _tokens)
