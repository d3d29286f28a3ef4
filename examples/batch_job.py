"""A job of prompts as a Ray job: plan for the devices of the cluster it runs on, generate, write
results.

    ray job submit --address http://HEAD:8265 --working-dir . \
        --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' -- \
        python examples/batch_job.py --model examples/demo_model \
        --input examples/demo_prompts.jsonl --output /shared/results.jsonl \
        --cluster cluster_specs/demo_mixed_cpu.yaml

Without --cluster the job plans for the GPUs that Ray reports. What follows --run goes to
`llmpq run`, other options to `llmpq plan`. Paths are those of the head; relative ones lie in the
uploaded working directory, so the output must be absolute. Exit codes are those of `llmpq run`.
`ray job stop ID` commits what is finished, and the same command again goes on from there.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli


def main() -> int:
    """Plan, then run."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder or hub id of the weights")
    parser.add_argument("--input", required=True, type=Path, help="prompts.jsonl")
    parser.add_argument("--output", required=True, help="/shared/results.jsonl")
    parser.add_argument("--cluster", help="cluster YAML (the cluster's own GPUs)")
    parser.add_argument("--address", default="auto", help="Ray cluster")
    parser.add_argument(
        "--run", nargs=argparse.REMAINDER, default=[], help="the rest is for llmpq run"
    )
    options, planning = parser.parse_known_args()
    if not Path(options.output).is_absolute():
        parser.error(f"--output {options.output} would be lost with the job; give an absolute path")
    with tempfile.TemporaryDirectory() as folder:
        prompts = options.input
        if prompts.is_file() and not prompts.is_absolute():
            # Ray nodes of one machine unpack the working directory over each other's
            prompts = Path(shutil.copy(prompts, folder))
        plan, prompts = str(Path(folder) / "plan.json"), str(prompts)
        where = (
            ["--cluster", options.cluster] if options.cluster else ["--address", options.address]
        )
        code = plan_cli.main(
            ["--model", options.model, "--input", prompts, "-o", plan, *where, *planning]
        )
        if code:
            return code
        job = ["--plan", plan, "--input", prompts, "--output", options.output]
        return run_cli.main([*job, "--address", options.address, *options.run])


if __name__ == "__main__":
    sys.exit(main())
