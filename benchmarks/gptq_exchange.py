"""Checkpoints exchanged with GPTQModel, held weight by weight against how GPTQModel reads them.

    BUILD_CUDA_EXT=0 pip install gptqmodel      # in an environment of its own, for its torch
    python -m benchmarks.gptq_exchange

The demo model is quantized by `llmpq quantize`'s code and by GPTQModel, each with the same
calibration text; GPTQModel's torch kernel then loads every checkpoint on the CPU, and its
dequantized weights (float16) are compared with ours. Perplexity is that of our stages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "GPTQMODEL_CPU_WORKERS", "2"
)  # its loader asks for two, however few the cores

import gptqmodel
import torch
from torch import Tensor

from actors.stage.layer_stream import compute_on
from benchmarks.machine import processor_name
from benchmarks.quality import MODEL, read_texts, weight_only
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from llmpq.quality.scoring import evaluate
from llmpq.quality.sensitivity.indicator import Calibration
from llmpq.quality.text_windows import token_windows
from llmpq.tokenizing.requests import load_tokenizer
from quant.checkpoint.reader import Checkpoint
from quant.gptq.format import read_gptq
from quant.gptq.options import GptqOptions

CPU = torch.device("cpu")
SEQUENCES, LENGTH = 64, 512
LAYERS = 12
MIXED = (16, 3, 4, 8, 4, 4, 3, 3, 4, 8, 4, 16)
OURS = {
    "4 bit": ((4,) * LAYERS, GptqOptions()),
    "3 bit, symmetric": ((3,) * LAYERS, GptqOptions(symmetric=True)),
    "8 bit, columns in order": ((8,) * LAYERS, GptqOptions(act_order=False)),
    "mixed": (MIXED, GptqOptions()),
}
THEIRS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "4 bit": ((4,) * LAYERS, {"bits": 4, "group_size": 128, "desc_act": True, "sym": False}),
    "3 bit, symmetric": ((3,) * LAYERS, {"bits": 3, "group_size": 128, "desc_act": True}),
    "8 bit, columns in order": ((8,) * LAYERS, {"bits": 8, "group_size": 64, "desc_act": False}),
    "mixed": (
        MIXED,
        {
            "bits": 4,
            "group_size": 128,
            "desc_act": True,
            "sym": False,
            "dynamic": {
                r"+:.*\.(3|9)\..*": {"bits": 8},
                r"+:.*\.(1|6|7)\..*": {"bits": 3},
                r"-:.*\.(0|11)\..*": {},
            },
        },
    ),
}


def checkpoints(
    folder: Path, calibration: Calibration
) -> Iterator[tuple[str, str, Path, tuple[int, ...]]]:
    """Who wrote it, what, where, and the bits of its layers."""
    for what, (bits, options) in OURS.items():
        target = folder / f"ours {what}"
        token_ids = torch.from_numpy(calibration.token_ids)
        wanted = Quantization(bits, token_ids, compute_on(CPU, torch.float32), options)
        quantize_checkpoint(MODEL, target, wanted)
        yield "llmpq", what, target, bits
    examples = [
        {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)}
        for ids in calibration.token_ids
    ]
    for what, (bits, settings) in THEIRS.items():
        target = folder / f"theirs {what}"
        model = gptqmodel.GPTQModel.load(str(MODEL), gptqmodel.QuantizeConfig(**settings))
        model.quantize(examples, batch_size=1)
        model.save(str(target))
        yield "GPTQModel", what, target, bits


def read_by_gptqmodel(folder: Path) -> dict[str, tuple[int, Tensor]]:
    """Bits and the dequantized weight `[out, in]` of every quantized linear."""
    model = gptqmodel.GPTQModel.load(
        str(folder), backend=gptqmodel.BACKEND.TORCH, device="cpu", dtype=torch.float16
    )
    return {
        name: (module.bits, module.dequantize_weight().detach().float().t())
        for name, module in model.model.named_modules()
        if hasattr(module, "dequantize_weight")
    }


def compare(folder: Path) -> tuple[Counter[int], float]:
    """Linears by bits, and the largest difference of a weight relative to its tensor's largest."""
    checkpoint, linears, largest = Checkpoint(folder), Counter[int](), 0.0
    for name, (bits, theirs) in read_by_gptqmodel(folder).items():
        weight = read_gptq(checkpoint, name, (theirs.shape[0], theirs.shape[1]))
        if weight.bits != bits:
            raise SystemExit(f"{name} has {bits} bits for GPTQModel and {weight.bits} for llmpq")
        ours = weight.dequantize()
        largest = max(largest, float((ours - theirs).abs().max() / ours.abs().max()))
        linears[bits] += 1
    return linears, largest


def main() -> None:
    """Print one row a checkpoint."""
    calibration_text, held_out = read_texts()
    tokenizer = load_tokenizer(MODEL)
    calibration = Calibration.sample(
        token_windows(calibration_text, tokenizer, LENGTH, 4 * SEQUENCES * LENGTH), SEQUENCES, 0
    )
    windows = token_windows(held_out, tokenizer, LENGTH)
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # GPTQModel writes logs
        for who, what, path, bits in checkpoints(Path(folder), calibration):
            linears, largest = compare(path)
            (score,) = evaluate(path, windows, [weight_only(bits)], CPU)
            counts = ", ".join(f"{count} of {bit} bit" for bit, count in sorted(linears.items()))
            rows.append(f"| {who} | {what} | {counts} | {largest:.1e} | {score.perplexity:.3f} |")
    print(f"{processor_name()}, GPTQModel {gptqmodel.__version__}, torch {torch.__version__}\n")
    print("| written by | what | linears | largest difference | perplexity |")
    print("|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
