"""Rotary positions in a GGUF file's metadata and tensors, as entries of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quant.checkpoint.gguf.header import Entries
from quant.common.errors import SpecError

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROTARY_TENSORS = (FACTORS, LONG, SHORT)
"""Tensors that become entries."""

_LLAMA3_LENGTH = 8192
"""The length with which llama 3 was first trained, also where the file does not say it."""

_TOLERANCE = 1e-3
"""Largest relative difference of factors: files may have them in 16 bit."""

_CLOSE_TO_END = 1e-4

Factors = np.ndarray[Any, np.dtype[np.float64]]
RotaryTensors = Mapping[str, Factors]
"""Those of `ROTARY_TENSORS` that a file has."""


def rotary_entries(entries: Entries, head_dim: int, tensors: RotaryTensors) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; `tensors` may have factors of the frequencies. SpecError for
    what transformers has no words for.
    """
    theta = entries.number("rope.freq_base", 10_000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    scaling, factors = _scaling(entries), tensors.get(FACTORS)
    if factors is not None and np.any(np.abs(factors - 1) > _TOLERANCE):
        if scaling is not None:
            raise SpecError(
                f"{entries.path}: it has both {FACTORS} and rope.scaling.type "
                f"{scaling['rope_type']}, which cannot be run; take another conversion of the model"
            )
        scaling = _llama3(entries, head_dim, theta, factors)
    if scaling is not None:
        found["rope_scaling"] = scaling
    return found


def check_long_factors(entries: Entries, factors: RotaryTensors) -> None:
    for name in (LONG, SHORT):
        if name in factors:
            raise SpecError(
                f"{entries.path}: it has {name}, rotary factors that change with the length "
                f"(longrope), which llmpq does not run in a {entries.architecture} model; choose "
                "another one"
            )


def _scaling(entries: Entries) -> dict[str, Any] | None:
    kind = entries.of_architecture("rope.scaling.type")
    factor = entries.number("rope.scaling.factor", entries.number("rope.scale_linear", 1.0))
    if kind is None:  # files of before there were types
        kind = "linear" if factor != 1 else "none"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise entries.refusal("rope.scaling.type", kind, "none, linear or yarn")
    found = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        key = f"rope.scaling.yarn_{name}"
        if entries.of_architecture(key) is not None:
            found[name] = entries.number(key)
    if entries.of_architecture("rope.scaling.original_context_length") is not None:
        length = entries.size("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = length
    return found


def _llama3(entries: Entries, head_dim: int, theta: float, factors: Factors) -> dict[str, Any]:
    """Find the parameters of `llama3` again: llama.cpp stores what they do to the frequencies, one
    factor for each pair of elements, in which only the ratios of the original length and the two
    frequency factors have a say.
    """
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)):
        raise SpecError(
            f"{entries.path}: {FACTORS} has {factors.size} factors; heads of {head_dim} elements "
            f"have {head_dim // 2} frequencies"
        )
    length = entries.size("rope.scaling.original_context_length", _LLAMA3_LENGTH)
    # `turns` within the original length: below `low` a frequency is divided by the whole factor,
    # above `high` it stays, and between them the inverse of what divides it is linear in `turns`.
    turns = length * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    factor = float(factors.max())
    for low, high in ((1.0, 4.0), _fitted(turns, factors, factor)):
        if high > low > 0 and np.allclose(
            _llama3_factors(turns, factor, low, high), factors, rtol=_TOLERANCE, atol=0.0
        ):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 6),
                "low_freq_factor": round(low, 9),
                "high_freq_factor": round(high, 9),
                "original_max_position_embeddings": length,
            }
    raise SpecError(
        f"{entries.path}: the rotary factors in {FACTORS} are not those of llama 3, which llmpq "
        "cannot run; give the original checkpoint, a Hugging Face folder of safetensors files"
    )


def _fitted(turns: Factors, factors: Factors, factor: float) -> tuple[float, float]:
    """`low` and `high` of the line through the factors between the two ends; (0, 0) for none."""
    share = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.zeros_like(factors)
    between = (share > _CLOSE_TO_END) & (share < 1 - _CLOSE_TO_END)
    if np.count_nonzero(between) < 2:
        return 0.0, 0.0
    slope, start = np.polyfit(turns[between], share[between], 1)
    return (0.0, 0.0) if slope <= 0 else (float(-start / slope), float((1 - start) / slope))


def _llama3_factors(turns: Factors, factor: float, low: float, high: float) -> Factors:
    share = np.clip((turns - low) / (high - low), 0, 1)
    divided: Factors = 1 / (share + (1 - share) / factor)
    return divided
