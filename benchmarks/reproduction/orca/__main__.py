"""ORCA's end-to-end experiments: iteration-level scheduling against request-level batching.

    python -m benchmarks.reproduction.orca PART [--help]

emulated    large models on modelled A100 pipelines, virtual time
http        llmpq serve beside vLLM's server
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from benchmarks.reproduction.orca import emulated, http

PARTS = {"emulated": emulated, "http": http}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduction.orca", description=__doc__
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        module.add_arguments(parts.add_parser(name, description=module.__doc__))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended all the same
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
