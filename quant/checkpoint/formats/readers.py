"""The bits that those take for whom checkpoints are written: plans for them have no others."""

from __future__ import annotations

from collections.abc import Iterable

from quant.checkpoint.formats.writing import METHODS
from quant.scheme import BITWIDTHS, FULL_BITS, Processor

VLLM = "vllm"
FORMATS = (*METHODS, VLLM)

LEAST_CAPABILITY = (7, 5)
"""vLLM's Marlin and schemes of AWQ and compressed-tensors need it."""

VLLM_KERNELS = {
    "Marlin": (4, 8),
    "gptq_gemm": (3, 4, 8),
    "the CPU": (4,),
}
"""The bits, beside 16, of symmetric codes in groups: of kernels of vLLM 0.32 by its source
(`vllm/model_executor/kernels/linear`), and for older devices of `gptq_gemm`, which earlier releases
and forks for such devices have.
"""


def vllm_kernel(processor: Processor) -> str:
    if processor.is_cpu:
        return "the CPU"
    return "gptq_gemm" if is_old(processor) else "Marlin"


def is_old(processor: Processor) -> bool:
    capability = processor.compute_capability
    return capability is not None and capability < LEAST_CAPABILITY


def held_bits(format: str | None, processors: Iterable[Processor]) -> tuple[int, ...]:
    """All that a plan on these processors may have if it is to be written in `format`: those that
    each of the kernels takes that vLLM may have there.
    """
    if format is None:
        return BITWIDTHS
    kernels = [VLLM_KERNELS[vllm_kernel(each)] for each in processors] if format == VLLM else []
    held = [METHODS[format].bits] if format in METHODS else kernels
    return tuple(b for b in BITWIDTHS if b == FULL_BITS or all(b in bits for bits in held))
