"""Measurement of an omega file: sensitivities of a model, and perplexities to read them by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from llmpq.quality.calibration import drawn_windows, token_digest
from llmpq.quality.indicator import LayerAlone, measure_indicators, stored_here
from llmpq.quality.options import ERROR, EvaluationOptions, IndicatorOptions, refuse_stored
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.scoring import evaluate
from llmpq.quality.subjects import bits_subject, compute_of, device_of, weighed, windows_of
from llmpq.quality.text_windows import Document, TokenIds
from llmpq.version import llmpq_version
from planner.model.finding import model_shape
from planner.profiles.sensitivity import FINGERPRINT_ENTRY, NATS, MeasuredPoint, OmegaContent
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.importance import Importance, save_importance
from quant.rounding.indicators import (
    ErrorStatistics,
    HessianStatistics,
    Indicator,
    Matrix,
    VarianceStatistics,
    in_nats,
    random_indicator,
)
from quant.scheme import FULL_BITS, ROUNDINGS

SHARES = (0.7, 0.4, 0.23, 0.13, 0.07, 0.04)
"""Shares of the sensitivity at the lowest bitwidth at which mixtures are measured, evenly spread on
the logarithmic scale on which the curve is fitted."""

Bits = tuple[int, ...]


def assignments_to_measure(matrix: Matrix, bitwidths: Sequence[int]) -> list[Bits]:
    """16 bit, every lower bitwidth for all layers, and mixtures; each once, 16 bit first.

    `matrix` [L, K], K ascending `bitwidths`. The mixtures are those of least sensitivity, as a
    planner's are: choosing by an indicator prefers the layers that it underestimates, and such
    mixtures cost more than others of the same sum (a fifth to a half more on the demo model).
    """
    layers = len(matrix)
    found: dict[Bits, None] = {(FULL_BITS,) * layers: None}
    found |= {(bits,) * layers: None for bits in reversed(bitwidths) if bits != FULL_BITS}
    found |= dict.fromkeys(_mixtures(matrix, bitwidths))
    return list(found)


def _mixtures(matrix: Matrix, bitwidths: Sequence[int]) -> Iterator[Bits]:
    """Assignments at which the sum first is within each of `SHARES`.

    From the lowest bitwidth on, that layer is raised whose next step saves most sensitivity for a
    bit a weight.
    """
    rows = np.arange(len(matrix))
    gain = (matrix[:, :-1] - matrix[:, 1:]) / np.diff(bitwidths)
    gain = np.column_stack([gain, np.full(len(matrix), -np.inf)])  # no step from the last
    choice = np.zeros(len(matrix), dtype=np.int64)
    for share in SHARES:
        while (
            matrix[rows, choice].sum() > share * matrix[:, 0].sum()
            and np.isfinite(gain[rows, choice]).any()
        ):
            choice[gain[rows, choice].argmax()] += 1
        yield tuple(bitwidths[index] for index in choice.tolist())


def measure_omega(
    folder: Path,
    calibration: Sequence[Document],
    options: IndicatorOptions,
    progress: ReportProgress | None = None,
    importance_file: Path | None = None,
) -> OmegaContent:
    """Sensitivities of the model in `folder`, with where they come from.

    The importance that the pass sees is written to `importance_file`. Raises `SpecError`,
    `InputError` and `CheckpointError` for options, text and weights that cannot be used.
    """
    began, shape = time.perf_counter(), model_shape(str(folder))
    experts = head = None
    provenance: dict[str, str | int | float] = {"method": options.method}
    refuse_stored(shape, folder)
    if options.needs_text:
        compute = compute_of(options.device, options.dtype)  # refused before the text is tokenized
        windows = windows_of(calibration, folder, EvaluationOptions(options.sequence_length))
        sample = drawn_windows(windows, options.sequences, options.seed)
        checkpoint = Checkpoint(folder, options.adapter)
        parts, head, measured, importance = _measured(
            checkpoint, sample, options, compute, progress
        )
        provenance |= measured
        matrix, experts = parts.sum(axis=0), parts[1] if parts[1].any() else None
        if importance_file is not None:
            save_importance(importance_file, importance)
            provenance[FINGERPRINT_ENTRY] = importance.fingerprint
    else:
        matrix = random_indicator(shape.layers, options.bits, options.seed)
    if options.adapter is not None:
        provenance["adapter"] = str(options.adapter)
    provenance |= {
        "seed": options.seed,
        "seconds": time.perf_counter() - began,
        "llmpq": llmpq_version(),
    }
    return OmegaContent(
        options.bits, shape.fingerprint(), matrix, provenance, experts=experts, head=head
    )


def _measured(
    checkpoint: Checkpoint,
    sample: TokenIds,
    options: IndicatorOptions,
    compute: Compute,
    progress: ReportProgress | None,
) -> tuple[Matrix, dict[int, float] | None, dict[str, str | int | float], Importance]:
    """The indicator on a text as of `measure_indicators`, never rising with the bits, what
    embedding and head lose, if that is measured, its provenance, and the importance of all layers.
    """
    indicators = {options.method: _indicator(options, compute)}
    found, layers = measure_indicators(
        checkpoint, sample, indicators, options.bits, compute, progress
    )
    fingerprint = token_digest(sample)
    seen = f"{sample.size} tokens, digest {fingerprint}"
    importance = Importance(tuple(layers), seen, model_shape(str(checkpoint.folder)).fingerprint())
    parts, head = found[options.method], None
    if options.method == ERROR:
        like = LayerScheme(dtype=compute.dtype, rounding=options.rounding)
        alone = LayerAlone(checkpoint, sample, options.bits, like, importance)
        parts = in_nats(parts, alone.divergence(compute.device, progress))
        head = alone.divergence_of_ends(compute.device)
    sequences, length = sample.shape
    provenance = _form(options) | {
        "calibration_tokens": sample.size,
        "calibration": fingerprint,
        "sequences": sequences,
        "sequence_length": length,
        "device": compute.device.type,
        "dtype": str(compute.dtype).removeprefix("torch."),
    }
    # Where 8 bit scales whole rows that hold an outlier, it may lose more than 4 bit; a planner
    # must not prefer the lower one for that.
    falling = np.maximum.accumulate(parts[..., ::-1], axis=-1)[..., ::-1]
    return falling, head, provenance, importance


def measure_points(
    content: OmegaContent,
    folder: Path,
    held_out: Sequence[Document],
    options: EvaluationOptions,
    progress: ReportProgress | None = None,
) -> OmegaContent:
    """`content` with perplexities of a text: at 16 bit, at each lower bitwidth, and for mixtures.

    Measured with this machine's kernels, as by `llmpq eval --bits`. Raises as `measure_omega`.
    """
    device = device_of(options.device)
    layers = len(content.matrix)
    chosen = assignments_to_measure(content.matrix, content.bits)
    is_error = content.provenance.get("method") == ERROR
    rounding = str(content.provenance["rounding"]) if is_error else ROUNDINGS[0]
    subjects = [bits_subject(bits, layers, device, options.dtype, rounding) for bits in chosen]
    adapter = None if options.adapter is None else str(options.adapter)
    lowest = weighed(subjects[-1], (folder, str(folder), adapter), options, device)
    subjects = [replace(subject, importance=lowest.importance) for subject in subjects]
    windows = windows_of(held_out, folder, options)
    full, *others = evaluate(Checkpoint(folder, adapter), windows, subjects, device, progress)
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


def _form(options: IndicatorOptions) -> dict[str, str | int | float]:
    """The provenance of what a method measures."""
    if options.method == ERROR:
        return {"rounding": options.rounding, "unit": NATS}
    return asdict(options.form) if options.method == "variance" else {}


def _indicator(options: IndicatorOptions, compute: Compute) -> Indicator:
    """The statistics that are gathered in each layer."""
    if options.method == ERROR:
        return partial(ErrorStatistics, stored_here(options.rounding, compute))
    if options.method == "hessian":
        return HessianStatistics
    return partial(VarianceStatistics, options.form)
