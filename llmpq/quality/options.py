"""Options of evaluations and indicators; without torch, as command lines read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.model.shape import ModelShape
from planner.option_rules import option
from quant.common.errors import InputError, SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES, FULL_BITS, ROUNDINGS, VarianceForm

SEQUENCE_LENGTH = 512
"""Tokens of a window where nothing else is asked: LLM-PQ's prompts (section 6.1)."""

AUTO = "auto"
DEVICES = (AUTO, "cpu", "cuda")
DTYPES = (AUTO, *DTYPE_BYTES)

KEPT_OPTIONS = ("importance", "cache_dir", "adapter")
"""Options of an evaluation that say what weights are, and what they are rounded by."""

ERROR = "error"
METHODS = ("variance", ERROR, "hessian", "random")
"""Ways of measuring sensitivity; see `quant.rounding.indicators`. `error` is scaled to nats."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation: how a text is cut, and where it is evaluated.

    `device` and `dtype`: `auto` is a GPU where there is one, and the planned type of each stage
    (for plain bitwidths float32 on a CPU, the GPU's 16-bit type on a GPU). `importance` None: the
    plan's, or else as stages measure it, kept in `cache_dir` (None: the user's) for them and for
    later evaluations. Raises `SpecError` and `InputError` for names and ranges.
    """

    sequence_length: int | None = option(
        "TOKENS",
        f"length of a window (default: {SEQUENCE_LENGTH}, or all positions of a model with fewer)",
    )
    max_tokens: int | None = option("COUNT", "most tokens of the text to use (default: all)")
    device: str = option(DEVICES, "where to compute", AUTO)
    dtype: str = option(DTYPES, "type to compute in; auto: each stage's own", AUTO)
    importance: str | Path | None = option(
        "FILE",
        "file of llmpq indicator that weights are rounded by (default: the plan's, else it is "
        "measured)",
    )
    cache_dir: str | Path | None = option("DIR", "folder where stages keep what they measure")
    adapter: str | Path | None = option(
        "FOLDER", "LoRA adapter of PEFT that is merged into the weights"
    )

    def __post_init__(self) -> None:
        check_compute(self.device, self.dtype)
        check_lengths(self.sequence_length, self.max_tokens)


@dataclass(frozen=True)
class IndicatorOptions:
    """Options of a measurement of sensitivities.

    `form` is that of the variance indicator, `rounding` the one whose error is measured, as a plan
    would have it (`quant.scheme.ROUNDINGS`). `bits` are sorted; 16, where nothing is lost, is
    always among them. `sequences` are drawn from the calibration text by `seed`, which seeds the
    random indicator too. Raises `SpecError` and `InputError` for names and ranges.
    """

    method: str = option(
        METHODS,
        "error: of the weights really stored, in nats; variance: LLM-PQ's Proposition 2; hessian, "
        "random: to compare with",
        ERROR,
    )
    form: VarianceForm = VarianceForm()
    rounding: str = ROUNDINGS[0]
    bits: tuple[int, ...] = option(BITWIDTHS, "bitwidths", BITWIDTHS)
    sequences: int = option("COUNT", "sequences to calibrate on", 32)
    sequence_length: int | None = option(
        "TOKENS",
        f"length of each (default: {SEQUENCE_LENGTH}, or the model's positions where these are "
        "fewer)",
    )
    seed: int = option("SEED", "of the draw of sequences, and of the method random", 0)
    device: str = option(DEVICES, "where to compute", AUTO)
    dtype: str = option(DTYPES, "type to compute in", AUTO)
    adapter: str | Path | None = option(
        "FOLDER", "LoRA adapter of PEFT that is merged into the weights"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", tuple(sorted({*self.bits, FULL_BITS})))
        if self.method not in METHODS:
            raise SpecError(f"method {self.method!r} is not one of {', '.join(METHODS)}")
        if self.rounding not in ROUNDINGS:
            raise SpecError(f"rounding {self.rounding!r} is not one of {', '.join(ROUNDINGS)}")
        if not set(self.bits) <= set(BITWIDTHS):
            raise SpecError(f"bits is {self.bits}; it must be among {list(BITWIDTHS)}")
        check_compute(self.device, self.dtype)
        check_lengths(self.sequence_length)
        check_draw(self.sequences, self.seed)

    @property
    def needs_text(self) -> bool:
        return self.method != "random"


def check_compute(device: str, dtype: str) -> None:
    if device not in DEVICES:
        raise SpecError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise SpecError(f"compute type {dtype!r} is not one of {', '.join(DTYPES)}")


def check_lengths(sequence_length: int | None, max_tokens: int | None = None) -> None:
    """Raise `InputError` for lengths in which no token could predict another."""
    for name, value in (("sequence_length", sequence_length), ("max_tokens", max_tokens)):
        if value is not None and value < 2:
            raise InputError(f"{name} is {value}; give at least 2, one token to predict another")


def check_draw(sequences: int, seed: int) -> None:
    if sequences < 1:
        raise SpecError(f"sequences is {sequences}; give at least 1")
    if seed < 0:
        raise SpecError(f"seed is {seed}; give at least 0")


def refuse_stored(shape: ModelShape, folder: Path) -> None:
    """Raise `SpecError` for a checkpoint whose weights are not those that are rounded."""
    if not shape.is_original:
        raise SpecError(
            f"{folder} is quantized already; measure the 16-bit checkpoint that it was made of, "
            "whose --omega_file plans of both take, or plan for it without one"
        )


def checked_bitwidths(bitwidths: Sequence[int], layers: int) -> Sequence[int]:
    """`bitwidths`; raises `SpecError` for one that is none, and where they are not one a layer."""
    for bits in bitwidths:
        if bits not in BITWIDTHS:
            raise SpecError(f"bitwidth {bits} is not one of {', '.join(map(str, BITWIDTHS))}")
    if len(bitwidths) not in (1, layers):
        raise SpecError(
            f"{len(bitwidths)} bitwidths where the model has {layers} layers; give one number for "
            "all, or one for each layer"
        )
    return bitwidths
