"""Options of evaluations and indicators; without torch, as command lines read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES, FULL_BITS, ROUNDINGS
from quant.sensitivity.variance_form import VarianceForm

SEQUENCE_LENGTH = 512
"""Tokens of a window where nothing else is asked: LLM-PQ's prompts (section 6.1)."""

AUTO = "auto"
DEVICES = (AUTO, "cpu", "cuda")
DTYPES = (AUTO, *DTYPE_BYTES)

KEPT_OPTIONS = ("importance", "cache_dir")
"""Options of an evaluation that say what weights are rounded by."""

ERROR = "error"
METHODS = ("variance", ERROR, "hessian", "random")
"""Ways of measuring sensitivity; see `quant.sensitivity`. `error` is scaled to nats."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation: how a text is cut, and where it is evaluated.

    `sequence_length` None: `SEQUENCE_LENGTH`, or the model's positions where these are fewer.
    `device` and `dtype`: `auto` is a GPU where there is one, and the planned type of each stage
    (for plain bitwidths float32 on a CPU, the GPU's 16-bit type on a GPU). `importance`: file of
    `llmpq-indicator` that weights are rounded by; None: the plan's, or else as stages measure it,
    kept in `cache_dir` (None: the user's) for them and for later evaluations.
    """

    sequence_length: int | None = None
    max_tokens: int | None = None
    device: str = AUTO
    dtype: str = AUTO
    importance: str | Path | None = None
    cache_dir: str | Path | None = None


@dataclass(frozen=True)
class IndicatorOptions:
    """Options of a measurement of sensitivities.

    `method`: one of `METHODS`; `form` is that of the variance indicator, `rounding` the one whose
    error is measured, as a plan would have it (`quant.scheme.ROUNDINGS`). `bits`: bitwidths to
    measure; 16, where nothing is lost, is always among the columns. `sequences` of
    `sequence_length` tokens (512, or as many as the model has positions) are drawn from the
    calibration text by `seed`, which seeds the random indicator too. `device`: auto, cpu or cuda;
    `dtype`: the type to compute in.
    """

    method: str = ERROR
    form: VarianceForm = VarianceForm()  # noqa: RUF009  (frozen)
    rounding: str = ROUNDINGS[0]
    bits: tuple[int, ...] = BITWIDTHS
    sequences: int = 32
    sequence_length: int | None = None
    seed: int = 0
    device: str = AUTO
    dtype: str = AUTO

    def __post_init__(self) -> None:
        """Sort `bits`, with 16 among them, and check names and ranges; raises `SpecError`."""
        object.__setattr__(self, "bits", tuple(sorted({*self.bits, FULL_BITS})))
        if self.method not in METHODS:
            raise SpecError(f"method {self.method!r} is not one of {', '.join(METHODS)}")
        if self.rounding not in ROUNDINGS:
            raise SpecError(f"rounding {self.rounding!r} is not one of {', '.join(ROUNDINGS)}")
        if not set(self.bits) <= set(BITWIDTHS):
            raise SpecError(f"bits is {self.bits}; it must be among {list(BITWIDTHS)}")
        if self.sequences < 1 or self.seed < 0:
            raise SpecError(
                f"sequences is {self.sequences} and seed {self.seed}; give at least 1 and 0"
            )

    @property
    def needs_text(self) -> bool:
        """Whether the indicator looks at a text."""
        return self.method != "random"
