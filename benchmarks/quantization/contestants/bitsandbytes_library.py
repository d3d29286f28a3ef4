"""bitsandbytes: NF4 in blocks of 64, no text; with double quantization the scales are rounded too.

pip install bitsandbytes
"""

from __future__ import annotations

import sys
from functools import partial

from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

from benchmarks.quantization.contestants.exchange import Rounded, main, nbytes, weight_by_weight


def rounded(weight: Tensor, twice: bool) -> Rounded:
    """As `Linear4bit` stores it."""
    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=twice, quant_type="nf4")
    stored = nbytes(codes, state.absmax)
    if twice:
        stored += nbytes(state.offset, state.state2.absmax)
    return Rounded(dequantize_4bit(codes, state), stored)


SETTINGS = {
    "NF4": weight_by_weight(partial(rounded, twice=False)),
    "NF4, double quantization": weight_by_weight(partial(rounded, twice=True)),
}

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
