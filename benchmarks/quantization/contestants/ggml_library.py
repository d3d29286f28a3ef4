"""llama.cpp's block types by `ggml_quantize_chunk`, with and without an importance matrix.

    pip install llama-cpp-python gguf

The K types have blocks of 256 weights, and rows of SmolLM2 have 576: there `llama_model_quantize`
takes a larger type. To see the K types at their own size, rows are laid end to end, as many as
fill whole blocks; a column's importance goes with it. That importance is E[x²] on the text, which
is what `llama-imatrix` collects.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from benchmarks.quantization.contestants.exchange import Given, Rounded, main
from benchmarks.quantization.contestants.inputs import mean_squares

TYPES = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "Q5_K", "Q3_K", "IQ3_S")
FLOATS = ctypes.POINTER(ctypes.c_float)


def quantized(given: Given, kind: str, by_importance: bool) -> Iterator[tuple[str, Rounded]]:
    """Every linear in blocks of one type."""
    importance = mean_squares(given) if by_importance else {}
    for name, weight in given.linears():
        yield name, rounded(weight, gguf.GGMLQuantizationType[kind], importance.get(name))


def rounded(weight: Tensor, kind: gguf.GGMLQuantizationType, importance: Tensor | None) -> Rounded:
    """One weight `[out, in]`; `importance` `[in]`."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    joined = math.lcm(block, weight.shape[1]) // weight.shape[1]
    source = weight.reshape(-1, joined * weight.shape[1]).contiguous().numpy()
    rows, columns = source.shape
    weights = None
    if importance is not None:
        tiled = np.tile(importance.numpy(), joined)
        weights = tiled.ctypes.data_as(FLOATS)
    target = np.empty((rows, columns // block * block_bytes), dtype=np.uint8)
    library = _library()
    library.ggml_quantize_chunk(
        kind.value, source.ctypes.data_as(FLOATS), target.ctypes.data, 0, rows, columns, weights
    )
    found = torch.from_numpy(gguf.quants.dequantize(target, kind).astype(np.float32))
    return Rounded(found.reshape(weight.shape), target.nbytes)


@cache
def _library() -> ctypes.CDLL:
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("llama_cpp is not installed: pip install llama-cpp-python")
    folder = Path(found.origin).parent / "lib"
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    call = library.ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    sizes = [ctypes.c_int64] * 3
    call.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p, *sizes, FLOATS]
    return library


SETTINGS = {
    f"llama.cpp {kind}{', importance matrix' * by_importance}": partial(
        quantized, kind=kind, by_importance=by_importance
    )
    for kind in TYPES
    for by_importance in (False, True)
}

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
