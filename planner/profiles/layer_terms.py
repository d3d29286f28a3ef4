"""The terms by which a layer's time scales: its sizes, and what they make of a workload."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from planner.model.shape import ModelShape
from planner.scheduling import Phase

Vector = npt.NDArray[np.float64]

STATE = "state"
HEAD = "head"
"""The kind of rows of LM heads, which are no layers."""

_WINDOW = re.compile(r"window (\d+)")
_EXPERTS = re.compile(r"experts (\d+)x(\d+), asked (\d+)")


@dataclass(frozen=True)
class LayerTerms:
    """The sizes of a layer, in elements, with which its time scales. `kind`: what it has in place
    of attention to all tokens and of one MLP, as the column of that name says it.
    """

    hidden_size: int
    linear_parameters: int
    query_width: int
    kv_width: int
    kind: str = ""

    @classmethod
    def of(cls, shape: ModelShape) -> LayerTerms:
        """Those of layers of one kind; the keys that a layer reads count as its own."""
        reading = replace(shape, reads_earlier_keys=False)
        return cls(
            shape.hidden_size,
            shape.layer_linear_parameters,
            shape.query_width,
            reading.kv_width,
            kind_words(shape),
        )

    @classmethod
    def of_head(cls, shape: ModelShape) -> LayerTerms:
        """Those of the LM head, without attention, so that the widths of this say nothing."""
        width = shape.word_embedding_size
        return cls(width, width * shape.vocab_size, width, width, HEAD)

    def seen(self, length: int) -> float:
        """How many of so many tokens attention sees."""
        found = _WINDOW.search(self.kind)
        return float(length if found is None else min(length, int(found[1])))

    @property
    def experts(self) -> tuple[int, int, int] | None:
        """Number and width of the experts, and how many a token asks; None without."""
        found = _EXPERTS.search(self.kind)
        if found is None:
            return None
        count, width, asked = map(int, found.groups())
        return count, width, asked


def kind_words(shape: ModelShape) -> str:
    """What a layer has in place of attention to all tokens and of one MLP. The window of a model
    whose layers are all alike is left out, as rows of before kinds do.
    """
    words = []
    if shape.delta is not None:
        own = shape.delta
        heads = f"{own.key_heads}x{own.key_dim} to {own.value_heads}x{own.value_dim}"
        words.append(f"{STATE} {heads}, convolution {own.conv_width}")
    elif shape.kind and shape.sliding_window is not None:
        words.append(f"window {shape.sliding_window}")
    if shape.experts is not None:
        asked = f"experts {shape.experts.count}x{shape.experts.width}, "
        words.append(f"{asked}asked {shape.experts.per_token}")
    return "; ".join(words)


# Rows from which kernels restore weights instead of multiplying them packed: 24 at 8 bit, 96 at 3
# and 4 bit on CPUs, 25 or 129 on GPUs; other products are below their full rate up to these.
_KERNEL_ROWS = (24, 96)
# Elements of hidden states that fill, with the intermediate results of a layer, the caches of a
# processor: with more, rows took a fifth longer (hidden size 1024, 16 and 4 bit, 32 MiB of
# last-level cache).
_CACHED_ELEMENTS = 2**20


def layer_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer's time: float64 [terms], in the paper's symbols: v requests of a
    micro-batch, s prompt tokens, t + s context tokens. Prefill has terms in v, s, vs, vs^2 and a
    constant (hidden states, lengths, products, attention, weights read), in rows up to those at
    which kernels change and beyond caches, for each pass of `tokens_at_once`. Decode: v, v(t+s),
    t+s and a constant.
    """
    if phase == "decode":
        v, s = float(batch_size), layer.seen(length)
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
            v * _scores(layer, length) * layer.query_width,
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
        s = layer.seen(length)
        return np.array([width, v * width, s * width, v * s * layer.kv_width])

    def one_pass(requests: int) -> Vector:
        v = requests * width
        return np.array([width, v, v * s, v * _scores(layer, length)])

    return _in_passes(one_pass, batch_size, length, tokens_at_once)


def _scores(layer: LayerTerms, length: int) -> float:
    """Twice the scores of a prompt: the square of its length, less beyond a window."""
    seen = layer.seen(length)
    return seen * (2 * length - seen)


def rest_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of a layer without attention, by tokens of each pass: float64 [terms]."""

    def one_pass(tokens: float) -> Vector:
        return np.array([tokens * layer.linear_parameters, *_weight_terms(layer, tokens)])

    if phase == "decode":
        return one_pass(float(batch_size))
    return _in_passes(lambda v: one_pass(float(v * length)), batch_size, length, tokens_at_once)


def experts_features(
    phase: Phase, layer: LayerTerms, batch_size: int, length: int, tokens_at_once: float = inf
) -> Vector:
    """Compute the terms of the time of experts of which all are as likely to be asked, by tokens of
    each pass: float64 [terms], a constant, weights of the experts that are read, products.
    """
    assert layer.experts is not None, "a layer without experts has no such part"
    count, width, asked = layer.experts
    weights = 3.0 * layer.hidden_size * width

    def one_pass(tokens: float) -> Vector:
        read = count * (1 - (1 - asked / count) ** tokens)
        return np.array([weights, read * weights, tokens * asked * weights])

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
