"""Compiled loops run on torch's own threads where numba can take them, and leave torch's count."""

from __future__ import annotations

import os
import subprocess
import sys

LOOP = """
import ctypes
import numba, numpy as np, torch
from quant.numba_loops import compiled_loop, torch_threads

def squares(numbers):
    for i in numba.prange(len(numbers)):
        numbers[i] = i * i

torch.set_num_threads(1)
loop, numbers = compiled_loop(squares, parallel=True), np.zeros(1000)
with torch_threads():
    loop(numbers)
assert (numbers == np.arange(1000) ** 2).all()
try:  # a machine may have torch's library of OpenMP alone
    own = bool(ctypes.CDLL("libgomp.so.1")) and hasattr(ctypes.CDLL(None), "GOMP_parallel")
except OSError:
    own = False
print(torch.get_num_threads(), numba.threading_layer(), own)
"""


def test_threads_are_torchs() -> None:
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    told = subprocess.run(
        [sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True, check=True
    )
    threads, layer, visible = told.stdout.split()
    assert threads == "1"
    assert layer == ("omp" if visible == "True" else "workqueue")
