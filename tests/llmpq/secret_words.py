"""Secrets in all the places where people put them, and a look for them in what is left."""

from __future__ import annotations

import os
from pathlib import Path

HF_SECRET, RAY_SECRET = "hf_SeCrEt0123456789abcdef", "raytok-4711-SeCrEt"


def with_secrets(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps its caches in `folder`."""
    return os.environ | {
        "HF_TOKEN": HF_SECRET,
        "HUGGING_FACE_HUB_TOKEN": HF_SECRET,
        "RAY_AUTH_TOKEN": RAY_SECRET,
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
