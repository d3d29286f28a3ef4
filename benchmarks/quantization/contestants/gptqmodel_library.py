"""GPTQModel: its calibrated GPTQ, with activation order, ranges by its search, and newer options.

BUILD_CUDA_EXT=0 pip install --no-build-isolation gptqmodel    # wants a setuptools of today
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two, however few the cores

import gptqmodel
import torch

from benchmarks.quantization.contestants.exchange import Given, Rounded, main, nbytes

NARROWED = {"mse": 2.4}
"""Narrows ranges by the sum of errors to this power, what its documentation advises."""


def quantized(given: Given, settings: dict[str, Any]) -> Iterator[tuple[str, Rounded]]:
    """Calibrate, save, and read back by its torch kernel."""
    examples = [
        {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in given.token_ids
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # it writes logs
        config = gptqmodel.QuantizeConfig(sym=False, group_size=64, **settings)
        model = gptqmodel.GPTQModel.load(str(given.model.absolute()), config, device="cpu")
        model.quantize(examples, batch_size=1)
        model.save(str(Path(folder) / "saved"))
        loaded = gptqmodel.GPTQModel.load(
            str(Path(folder) / "saved"),
            backend=gptqmodel.BACKEND.TORCH,
            device="cpu",
            dtype=torch.float16,
        )
        for name, module in loaded.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                weight = module.dequantize_weight().detach().float().t()
                held = nbytes(module.qweight, module.qzeros, module.scales)
                order = module.g_idx if settings["desc_act"] else None
                yield f"{name}.weight", Rounded(weight, held + nbytes(order))


SETTINGS = {
    f"GPTQModel {bits} bit{', ' * bool(what)}{what}": partial(
        quantized, settings={"bits": bits, **options}
    )
    for bits in (4, 3)
    for what, options in {
        "": {"desc_act": True, "act_group_aware": False},
        "narrowed ranges": {"desc_act": True, "act_group_aware": False, **NARROWED},
        "group-aware order": {"desc_act": False, "act_group_aware": True, **NARROWED},
    }.items()
}

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
