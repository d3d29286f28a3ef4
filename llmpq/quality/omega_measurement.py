"""Measurement of an omega file: sensitivities of a model, and perplexities to read them by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from actors.stage.layer_stream import compute_on
from llmpq.quality.bitwidth_mixtures import assignments_to_measure
from llmpq.quality.indicator import Calibration, measure_indicators
from llmpq.quality.options import ERROR, EvaluationOptions, IndicatorOptions
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.scoring import evaluate
from llmpq.quality.stored_error import divergence_alone, stored_here
from llmpq.quality.subjects import bits_subject, compute_dtype, device_of, windows_of
from llmpq.quality.text_windows import Document
from llmpq.version import llmpq_version
from planner.model.finding import model_shape
from planner.quality.sensitivity import MeasuredPoint, OmegaContent
from quant.common.errors import SpecError
from quant.loading.emulated_kernels import Compute
from quant.sensitivity.errors import ErrorStatistics, in_nats
from quant.sensitivity.indicators import (
    HessianStatistics,
    Indicator,
    Matrix,
    VarianceStatistics,
    random_indicator,
)


def measure_omega(
    folder: Path,
    calibration: Sequence[Document],
    options: IndicatorOptions,
    progress: ReportProgress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> OmegaContent:
    """Sensitivities of the model in `folder`, with where they come from.

    Raises `SpecError`, `InputError` and `CheckpointError` for options, text and weights that cannot
    be used.
    """
    began, shape = clock(), model_shape(str(folder))
    provenance: dict[str, str | int | float] = {"method": options.method}
    if options.needs_text:
        device = device_of(options.device)  # refused before the text is tokenized
        compute = compute_on(device, compute_dtype(options.dtype, device))
        windows = windows_of(calibration, folder, EvaluationOptions(options.sequence_length))
        sample = Calibration.sample(windows, options.sequences, options.seed)
        matrix, measured = _measured(folder, sample, options, compute, progress)
        provenance |= measured
    else:
        matrix = random_indicator(shape.layers, options.bits, options.seed)
    provenance |= {"seed": options.seed, "seconds": clock() - began, "llmpq": llmpq_version()}
    return OmegaContent(options.bits, shape.fingerprint(), matrix, provenance)


def _measured(
    folder: Path,
    sample: Calibration,
    options: IndicatorOptions,
    compute: Compute,
    progress: ReportProgress | None,
) -> tuple[Matrix, dict[str, str | int | float]]:
    """The indicator on a text, and its provenance."""
    indicators = {options.method: _indicator(options, compute)}
    found = measure_indicators(
        folder, sample.token_ids, indicators, options.bits, compute, progress
    )
    matrix = found[options.method]
    if options.method == ERROR:
        alone = divergence_alone(
            folder, sample.token_ids, options.bits, options.rounding, compute, progress
        )
        matrix = in_nats(matrix, alone)
    sequences, length = sample.token_ids.shape
    return _falling(matrix), _form(options) | {
        "calibration_tokens": sequences * length,
        "calibration": sample.fingerprint,
        "sequences": sequences,
        "sequence_length": length,
        "device": compute.device.type,
        "dtype": str(compute.dtype).removeprefix("torch."),
    }


def measure_points(
    content: OmegaContent,
    folder: Path,
    held_out: Sequence[Document],
    options: EvaluationOptions,
    progress: ReportProgress | None = None,
) -> OmegaContent:
    """`content` with perplexities of a text: at 16 bit, at each lower bitwidth, and for mixtures.

    Measured with this machine's kernels, as by `llmpq-eval --bits`. Raises as `measure_omega`.
    """
    device = device_of(options.device)
    layers = len(content.matrix)
    chosen = assignments_to_measure(content.matrix, content.bits)
    subjects = [bits_subject(bits, layers, device, options.dtype) for bits in chosen]
    windows = windows_of(held_out, folder, options)
    full, *others = evaluate(folder, windows, subjects, device, progress)
    if full.windows < 2:
        raise SpecError(
            f"the held-out text has {full.tokens} tokens in one window, which tells no error; give "
            "a longer one, or a smaller sequence length"
        )
    points = [MeasuredPoint(full.bitwidths, full.perplexity, 0.0)]
    points += [
        MeasuredPoint(other.bitwidths, other.perplexity, other.above(full)[1] or 0.0)
        for other in others
    ]
    text = {"perplexity_tokens": full.tokens, "perplexity_windows": full.windows}
    return replace(content, points=tuple(points), provenance={**content.provenance, **text})


def _falling(matrix: Matrix) -> Matrix:
    """The matrix with each layer losing at least as much at a lower bitwidth as at a higher one.

    Where 8 bit scales whole rows that hold an outlier, it may lose more than 4 bit; a planner must
    not prefer the lower one for that.
    """
    return np.maximum.accumulate(matrix[:, ::-1], axis=1)[:, ::-1]


def _form(options: IndicatorOptions) -> dict[str, str | int | float]:
    """The provenance of what a method measures."""
    if options.method == ERROR:
        return {"rounding": options.rounding, "unit": "nats a token"}
    return asdict(options.form) if options.method == "variance" else {}


def _indicator(options: IndicatorOptions, compute: Compute) -> Indicator:
    """The statistics that are gathered in each layer."""
    if options.method == ERROR:
        return partial(ErrorStatistics, stored_here(options.rounding, compute))
    if options.method == "hessian":
        return HessianStatistics
    return partial(VarianceStatistics, options.form)
