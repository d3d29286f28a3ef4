"""Tests how well sensitivities predict what quantization costs: by layer, and as a promise.

    python -m benchmarks.sensitivity ranks
    python -m benchmarks.sensitivity promise

`ranks`: rank correlation of each form of the indicator with the measured increase of perplexity,
and with the KL divergence from the model at 16 bit, when one layer alone is quantized. `error`
learns from the divergence at 3 bit of each layer alone on calibration text; before it does so it
is `errors alone`. `promise`: perplexities measured on one half of the held-out
documents turn --max_ppl_delta into a bound; what the plans found within it cost is measured on
that half and on the other. Indicators see text of the training split alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from actors.stage.layer_stream import compute_on
from benchmarks.machine import processor_name
from benchmarks.quality import CPU, EXAMPLES, MODEL, importance_of, read_texts, weight_only
from benchmarks.quality_tables import Bits
from llmpq import Cluster, Plan, Workload
from llmpq.quality.options import EvaluationOptions, IndicatorOptions
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import evaluate
from llmpq.quality.sensitivity.indicator import measure_indicators
from llmpq.quality.sensitivity.omega_measurement import measure_omega, measure_points
from llmpq.quality.sensitivity.stored_error import Alone, stored_here
from llmpq.quality.text_windows import Windows, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.quality.sensitivity import save_omega
from quant.common.errors import InfeasibleError
from quant.importance.file import Importance
from quant.loading.emulated_kernels import LayerScheme
from quant.scheme import WEIGHTED
from quant.sensitivity.errors import ErrorStatistics, in_nats
from quant.sensitivity.indicators import (
    HessianStatistics,
    Indicator,
    VarianceStatistics,
    weight_noises,
)
from quant.sensitivity.variance_form import VarianceForm

SEQUENCES, LENGTH = 32, 512
ALONE = (3, 4)  # 8 bit in one layer costs less than the text can tell
PROMISES = (0.1, 0.3, 0.6, 1.0, 2.0)
MEMORY = (0.45, 0.5, 0.6, 0.8, 1.0)  # times the demo cluster's
WORKLOAD = Workload(global_batch=4, prompt_length=64, new_tokens=32)

Noise = Callable[[Tensor, int], float]


class Variant(VarianceStatistics):
    """The variance indicator with another D_W * S_W^2."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def omega(
        self, weights: Mapping[str, Tensor], source_of: Mapping[str, str], bitwidths: Sequence[int]
    ) -> list[float]:
        """The layer's indicator at each bitwidth."""
        gains = {name: self._inputs[source_of[name]].variance / 4 for name in weights}
        return [sum(self._noise(w, b) * gains[n] for n, w in weights.items()) for b in bitwidths]


def by_row(weight: Tensor, bits: int) -> float:
    """One scale for each row."""
    low, high = weight.double().aminmax(dim=1)
    return float((high - low).square().sum()) * weight.shape[1] / (2**bits - 1) ** 2


def by_inputs(form: VarianceForm) -> Noise:
    """D_W read as the number of inputs: the noise of one output."""
    return lambda weight, bits: weight_noises(form, weight, (bits,))[0] / weight.shape[0]


def forms() -> dict[str, Indicator]:
    """The forms of the indicator that are compared, by name."""
    groups = VarianceForm(scales="group")
    return {
        "Proposition 2: D_W all weights, one S_W a tensor": VarianceStatistics,
        "… stochastic": lambda: VarianceStatistics(VarianceForm("stochastic")),
        "… symmetric": lambda: VarianceStatistics(VarianceForm(scheme="symmetric")),
        "one S_W a row": lambda: Variant(by_row),
        "one S_W a group (`--scales group`)": lambda: VarianceStatistics(groups),
        "D_W inputs, one S_W a tensor": lambda: Variant(by_inputs(VarianceForm())),
        "D_W inputs, one S_W a group": lambda: Variant(by_inputs(groups)),
        "Hessian-based": HessianStatistics,
    }


def ranks() -> Iterator[str]:
    """Lines of the table of rank correlations."""
    calibration, held_out = read_texts()
    tokenizer = load_tokenizer(MODEL)
    windows = token_windows(calibration, tokenizer, LENGTH, SEQUENCES * LENGTH)
    compute = compute_on(CPU, torch.float32)
    stored = stored_here(WEIGHTED, compute)
    wanted = forms() | {"errors alone": lambda: ErrorStatistics(stored)}
    found = measure_indicators(MODEL, windows.token_ids, wanted, ALONE, compute)
    shape = model_shape(str(MODEL))
    layers, importance = shape.layers, importance_of(MODEL, shape)
    like = LayerScheme(dtype=torch.float32, rounding=WEIGHTED)
    own = Alone(MODEL, windows.token_ids, ALONE, like, importance)
    found["error"] = in_nats(found["errors alone"], own.divergence(CPU))
    alone = [
        tuple(bits if i == layer else 16 for i in range(layers))
        for bits in ALONE
        for layer in range(layers)
    ]
    full, *others = perplexities(
        [(16,) * layers, *alone], token_windows(held_out, tokenizer, LENGTH), importance
    )
    lost = np.array([each.above(full)[0] for each in others]).reshape(len(ALONE), layers)
    apart = np.array([each.divergence for each in others]).reshape(len(ALONE), layers)
    yield "Increase of perplexity with one layer alone quantized:\n"
    yield f"| bits | {' | '.join(map(str, range(layers)))} |"
    yield "|---" * (layers + 1) + "|"
    for bits, row in zip(ALONE, lost, strict=True):
        yield f"| {bits} | {' | '.join(f'{value:+.3f}' for value in row)} |"
    yield "\nDivergence with one layer alone quantized, 0.001 nats a token:\n"
    yield f"| bits | {' | '.join(map(str, range(layers)))} |"
    yield "|---" * (layers + 1) + "|"
    for bits, row in zip(ALONE, apart, strict=True):
        yield f"| {bits} | {' | '.join(f'{1000 * value:.2f}' for value in row)} |"
    yield "\n| indicator | perplexity: rank correlation at 3 bit | at 4 bit | KL: 3 bit | 4 bit |"
    yield "|---|---|---|---|---|"
    for name, matrix in found.items():
        columns = [
            spearmanr(matrix[:, k], measured[k])[0]
            for measured in (lost, apart)
            for k in range(len(ALONE))
        ]
        yield f"| {name} | {' | '.join(f'{value:.2f}' for value in columns)} |"


def perplexities(
    assignments: Sequence[Bits], windows: Windows, importance: Importance
) -> list[Perplexity]:
    """Perplexity of each assignment, weights alone rounded."""
    subjects = [weight_only(bits, WEIGHTED, importance) for bits in assignments]
    return evaluate(MODEL, windows, subjects, CPU)


def bits_of(plan: Plan) -> Bits:
    """Bits of each layer."""
    return tuple(bits for stage in plan.stages for bits in stage.bitwidths)


def cluster_of(factor: float) -> Cluster:
    """The demo cluster with its memory multiplied."""
    spec = ClusterSpec.from_yaml(EXAMPLES.parent / "cluster_specs" / "demo_mixed_cpu.yaml")
    scaled = [replace(d, memory_bytes=int(d.memory_bytes * factor)) for d in spec.devices]
    return Cluster(replace(spec, devices=tuple(scaled)))


def promised_plans(omega_file: Path) -> tuple[dict[tuple[float, Bits], Plan], int]:
    """Plans by promise and bits, each once, over all clusters; and how often none keeps it."""
    found: dict[tuple[float, Bits], Plan] = {}
    refused = 0
    for promise in PROMISES:
        for factor in MEMORY:
            options = {
                "omega_file": omega_file,
                "max_ppl_delta": promise,
                "memory_margin": 0.0,
            }
            try:
                plan = cluster_of(factor).plan(MODEL, WORKLOAD, **options)
            except InfeasibleError:
                refused += 1
                continue
            found[promise, bits_of(plan)] = plan
    return found, refused


def promise() -> Iterator[str]:
    """Lines of the table of promises."""
    calibration, held_out = read_texts()
    tokenizer = load_tokenizer(MODEL)
    seen, unseen = (token_windows(held_out[k::2], tokenizer, LENGTH) for k in (0, 1))
    importance = importance_of(MODEL, model_shape(str(MODEL)))
    wanted = {
        f"variance, one S_W a {scales}": IndicatorOptions(
            method="variance", form=VarianceForm(scales=scales), dtype="float32"
        )
        for scales in ("tensor", "group")
    } | {"error": IndicatorOptions(method="error", dtype="float32")}
    for name, options in wanted.items():
        content = measure_omega(MODEL, calibration, options)
        settings = EvaluationOptions(dtype="float32")
        content = measure_points(content, MODEL, held_out[::2], settings)
        with tempfile.TemporaryDirectory() as folder:
            save_omega(Path(folder) / "omega.json", content)
            plans, refused = promised_plans(Path(folder) / "omega.json")
        yield (
            f"\nIndicator: {name}; {refused} of "
            f"{len(PROMISES) * len(MEMORY)} refused, as no plan keeps the promise in that memory:\n"
        )
        yield from promise_rows(plans, (seen, unseen), importance)


def promise_rows(
    plans: Mapping[tuple[float, Bits], Plan],
    texts: tuple[Windows, Windows],
    importance: Importance,
) -> Iterator[str]:
    """A row for each promise: the plans' forecasts, and what was measured on both texts."""
    full = (16,) * model_shape(str(MODEL)).layers
    assignments = sorted({bits for _, bits in plans} - {full})
    measured = []
    seen, unseen = texts
    for windows in texts:
        base, *others = perplexities([full, *assignments], windows, importance)
        increases = {b: each.above(base) for b, each in zip(assignments, others, strict=True)}
        measured.append(increases | {full: (0.0, 0.0)})
    yield f"| promised | plans | forecast | measured, {seen.scored} tokens seen | kept |"
    yield "|---" * 5 + "|"
    yield f"| | | | **{unseen.scored} tokens unseen** | |"
    for promised in sorted({each for each, _ in plans}):
        chosen = {bits: plan for (each, bits), plan in plans.items() if each == promised}
        forecasts = [plan.spec.perplexity.increase for plan in chosen.values()]  # type: ignore[union-attr]
        for increases in measured:
            costs = [increases[bits][0] for bits in chosen]
            kept = sum(cost <= promised for cost in costs)
            told = f"{min(forecasts):+.3f} to {max(forecasts):+.3f}"
            worst = max(chosen, key=lambda bits: increases[bits][0])
            yield (
                f"| {promised} | {len(chosen)} | {told} | {min(costs):+.3f} to {max(costs):+.3f} "
                f"(± {increases[worst][1]:.3f}) | {kept} of {len(costs)} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=("ranks", "promise"))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, torch {torch.__version__}, 1 thread\n")
    for line in {"ranks": ranks, "promise": promise}[chosen.what]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
