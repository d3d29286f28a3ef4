"""What is planned for, found in files: batches and jobs of prompts, their lengths, long rows.

Defaults and choices stand here, as a command's help needs them and nothing else of this room.
"""

from __future__ import annotations

from collections.abc import Mapping

# LLM-PQ section 6.1: the paper's default workload, and the batch that longer files are cut into.
DEFAULT_WORKLOAD: Mapping[str, int] = {"global_batch": 32, "prompt_length": 512, "new_tokens": 100}

SEPARATE, ERROR, LEAVE = LONG_ROWS = ("separate", "error", "leave")
"""What is done about rows that are much longer than the others."""
