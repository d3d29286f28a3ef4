"""ORCA's end-to-end experiments: iteration-level scheduling against request-level batching.

    python -m benchmarks.reproduction.orca PART [--help]

emulated    large models on modelled A100 pipelines, virtual time (fig. 10 and 11)
engine      batches of equal requests on the same pipelines (fig. 9)
http        llmpq serve beside vLLM's server
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from benchmarks.lab import run_part, table_part
from benchmarks.reproduction.orca import emulated, engine, http

PARTS = {
    "emulated": (emulated.add_arguments, emulated.run),
    "engine": table_part("engine", engine.table),
    "http": (http.add_arguments, http.run),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended all the same
    run_part("benchmarks.reproduction.orca", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
