"""The two phases of generation (LLM-PQ section 2.1)."""

from __future__ import annotations

from typing import Literal

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
