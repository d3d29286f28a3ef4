"""A batch as a Ray job: plan for the devices of the cluster it runs on, generate, write results.

    ray job submit --address http://HEAD:8265 --working-dir . -- \
        python examples/batch_job.py --model examples/demo_model \
        --input examples/demo_prompts.jsonl --output results.jsonl \
        --cluster cluster_specs/demo_mixed_cpu.yaml

Without --cluster the job plans for the GPUs that the Ray cluster reports. Paths are those of the
node that runs the job's driver; relative ones lie in the uploaded working directory, so give an
absolute --output to keep the results. The exit code is that of `llmpq-dist`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from llmpq.cli import algo, dist


def main() -> int:
    """Plan, then run; arguments that are not named here go to `llmpq-algo`."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or hub id of the weights")
    parser.add_argument("--input", required=True, help="prompts.jsonl")
    parser.add_argument("--output", required=True, help="results.jsonl")
    parser.add_argument("--cluster", help="cluster YAML (the cluster's own GPUs)")
    parser.add_argument("--address", default="auto", help="Ray cluster")
    options, planning = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.json")
        where = (
            ["--cluster", options.cluster] if options.cluster else ["--address", options.address]
        )
        code = algo.main(
            ["--model", options.model, "--input", options.input, "-o", plan, *where, *planning]
        )
        if code:
            return code
        return dist.main(
            [
                *("--strat_file_name", plan),
                *("--input", options.input),
                *("--output", options.output),
                *("--address", options.address),
            ]
        )


if __name__ == "__main__":
    sys.exit(main())
