"""Loops are compiled by other processes, which are done when a measurement is."""

from __future__ import annotations

import os
import subprocess
import sys

from quant.kept_loops import loops_folder
from tests.paths import ROOT

COMPILE = """
import sys, torch
from actors.profiling import loops
loops.BITWIDTHS = (4, 16)  # of loops for others there are as many
with loops.compiled_beside(torch.bfloat16):
    assert "transformers" not in sys.modules  # which is imported meanwhile
"""


def test_what_is_compiled_beside_is_kept() -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(loops_folder())}
    subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, check=True)
    assert any(loops_folder().glob("decode-*.nbi"))
