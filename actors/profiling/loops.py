"""The loops that take longest to compile, each compiled by a process of its own.

A process that is about to compute imports what it needs meanwhile. It takes the loops from where
they are kept (`quant.kept_loops`), or waits there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from actors.attention.cpu import warm_up
from quant.devices import local_processor
from quant.linear import LayerForm, quantize_linear
from quant.numba_loops import has_numba
from quant.scheme import BITWIDTHS
from quant.warm_up import warm_up_kernels

_WIDTH = 1024
"""So many features that no kernel takes the work for too little to compile a loop."""


@contextmanager
def compiled_beside(dtype: torch.dtype) -> Iterator[None]:
    """Compile the loops of layers that compute in `dtype` on the CPU. This process may not have
    used threads of torch or numba before.
    """
    children: list[int] = []
    if has_numba():
        import numba  # noqa: F401  (once for all of them)

        children = [_forked(each) for each in (partial(warm_up, dtype), partial(_pack, dtype))]
    try:
        yield
    finally:
        for child in children:
            os.waitpid(child, 0)


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)  # what fails here fails again where it is told
    return child


def _pack(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    weight = torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)
    for bits in BITWIDTHS:
        form = LayerForm(bits, local_processor(cpu), dtype, cpu, rounding="nearest")
        warm_up_kernels(nn.Sequential(quantize_linear(weight, None, form)))
