"""ORCA's end-to-end experiments: iteration-level scheduling against request-level batching.

python -m benchmarks.orca emulated    # large models on modelled A100 pipelines, virtual time
python -m benchmarks.orca real        # a model of 168 million parameters on this machine's CPU
python -m benchmarks.orca chunks      # prompts in parts: which --prefill_chunk_tokens
python -m benchmarks.orca http        # llmpq serve beside vLLM's server
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from benchmarks.orca import chunks, emulated, http, real

PARTS = {"emulated": emulated, "real": real, "chunks": chunks, "http": http}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orca", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        module.add_arguments(parts.add_parser(name, description=module.__doc__))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended all the same
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
