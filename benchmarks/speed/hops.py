"""Time of a micro-batch from one stage's process to the next, by gloo and by Ray references.

    python -m benchmarks.speed.hops [--turns 300]

Half of a round trip between two processes of one node, packing and unpacking included, as
`llmpq profile` times it, and the line that the planner fits to the medians.
"""

from __future__ import annotations

import argparse

import ray
import torch

from actors.processes.placement import Placement
from actors.profiling.links import MeasuredHop, measure_hops
from benchmarks.lab import header, processor_name
from llmpq.remote.session import ray_session
from planner.profiles.links import LinkRow, fit_links


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=300)
    options = parser.parse_args()
    here = Placement({}, num_gpus=0.0, num_cpus=1.0, threads=1)
    with ray_session("local"):
        hops = measure_hops([here, here], "node", options.turns)
    print(f"{processor_name()}, torch {torch.__version__}, Ray {ray.__version__}\n")
    print(header("payload | way | median, ms | interquartile range | fitted, ms"))
    for way in ("gloo", "ray"):
        rows = [_row(hop) for hop in hops if hop.way == way]
        for link in fit_links(rows):
            for row in rows:
                fitted_s = link.latency_s + row.payload_bytes / link.bytes_per_s
                print(
                    f"| {row.payload_bytes >> 10} KiB | {way} | {row.seconds * 1e3:.3f} | "
                    f"{row.spread:.0%} | {fitted_s * 1e3:.3f} |"
                )
            print(
                f"| a link of {link.latency_s * 1e6:.0f} us and {link.bytes_per_s / 1e9:.2f} GB/s |"
                f" {way} | | | |"
            )


def _row(hop: MeasuredHop) -> LinkRow:
    return LinkRow("CPU", "CPU", "node", **vars(hop))


if __name__ == "__main__":
    main()
