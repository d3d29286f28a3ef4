"""The program that stands for Ray's agent of metrics in nodes of tests that want none: it imports
nothing, and gathers nothing as long as the node lives.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "llmpq" / "remote"))

import waiting_agent  # type: ignore[import-not-found]

if __name__ == "__main__":
    waiting_agent.METRICS_S = None  # it waits for ever
    waiting_agent.main(sys.argv[1:])
