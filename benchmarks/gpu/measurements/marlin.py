"""vLLM's Marlin, where this Python has vLLM: 4 bit in groups of 128, rounded to the nearest."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.findings import NotRunError
from benchmarks.speed.linear import Held, Product, Setting, sampled

GROUP = 128
CAPABILITY = (7, 5)


def check_marlin(device: torch.device) -> None:
    """Raise `NotRunError` where there is none."""
    try:
        from vllm.model_executor.layers.quantization.utils import (  # noqa: F401
            marlin_utils,
            marlin_utils_test,
        )
    except ImportError as error:
        raise NotRunError(f"vLLM's Marlin is not here: {error}") from error
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise NotRunError("vLLM's Marlin takes a GPU of compute capability 7.5 or more")


def hold_marlin(weight: torch.Tensor, setting: Setting) -> Held:
    """Hold `weight` as vLLM does; its functions are called by the names of their arguments, of
    which versions have more.
    """
    from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_test
    from vllm.scalar_type import scalar_types

    outputs, inputs = weight.shape
    kind: Any = scalar_types.uint4b8
    meant, codes, scales, groups, order, _ = marlin_utils_test.marlin_quantize(
        weight.t().contiguous(), kind, GROUP, False
    )
    fixed = {
        "weight_zp": marlin_utils.marlin_make_empty_g_idx(weight.device),
        "g_idx": groups,
        "g_idx_sort_indices": order,
        "workspace": marlin_utils.marlin_make_workspace_new(weight.device),
        "wtype": kind,
        "output_size_per_partition": outputs,
        "input_size_per_partition": inputs,
        "is_k_full": True,
    }

    def over(codes: torch.Tensor, scales: torch.Tensor) -> Product:
        return lambda x: marlin_utils.apply_gptq_marlin_linear(
            input=x, weight=codes, weight_scale=scales, **fixed
        )

    nbytes = codes.nbytes + scales.nbytes
    products = [over(codes.clone(), scales.clone()) for _ in range(setting.copies(nbytes))]
    return Held("marlin_4bit", 4, nbytes, products, meant.t()[sampled(outputs)].double())
