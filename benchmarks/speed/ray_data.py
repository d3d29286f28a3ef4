"""Tokens a second of a plan as a stage of Ray Data beside those of a session, on the model that is
committed. Of each the first batch is left out, so that loading does not count.
"""

from __future__ import annotations

import sys
import time
from itertools import islice

from benchmarks.lab import header, processor_name, table_row
from llmpq import Cluster, Plan, Workload
from llmpq.ray_data import BATCH_SIZE, processor

NEW_TOKENS = 16
BATCHES = 4


def plan_here() -> Plan:
    cluster = Cluster.from_yaml("tests/llmpq/one_device.yaml")
    workload = Workload(32, 16, NEW_TOKENS)
    return cluster.plan("examples/demo_model", workload, theta=1.0, no_measuring=True)


def rows(batches: int) -> list[dict[str, object]]:
    count = batches * BATCH_SIZE
    return [{"prompt": [5 + n % 997] * 8, "ignore_eos": True} for n in range(count)]


def of_session(plan: Plan, batches: int) -> float:
    """Seconds of all batches but the first, one run each, as the stage runs them."""
    given, ends_s = iter(rows(batches)), []
    with plan.session() as session:
        while batch := list(islice(given, BATCH_SIZE)):
            for _ in session.run(batch):
                pass
            ends_s.append(time.perf_counter())
    return ends_s[-1] - ends_s[0]


def of_one_run(plan: Plan, batches: int) -> float:
    """Seconds of as many rows in one run, which has no batches, behind one batch."""
    given = rows(batches)
    with plan.session() as session:
        for _ in session.run(given[:BATCH_SIZE]):
            pass
        begin_s = time.perf_counter()
        for _ in session.run(given[BATCH_SIZE:]):
            pass
        return time.perf_counter() - begin_s


def of_stage(plan: Plan, batches: int) -> float:
    """Seconds from the first batch of answers to the last one."""
    from ray import data

    blocks = data.from_items(rows(batches), override_num_blocks=batches)
    made = processor(plan)(blocks).iter_batches(batch_size=BATCH_SIZE, batch_format="pyarrow")
    ends_s = [time.perf_counter() for _ in made]
    return ends_s[-1] - ends_s[0]


def main() -> None:
    import ray

    batches = int(sys.argv[1]) if len(sys.argv) > 1 else BATCHES
    ray.init(address="local", log_to_driver=False)
    plan = plan_here()
    count = (batches - 1) * BATCH_SIZE
    print(f"{processor_name()}; {count:,} rows of {NEW_TOKENS} new tokens each\n")
    print(header("rows by | seconds | tokens/s"))
    ways = {"one run": of_one_run, "a run a batch": of_session, "Ray Data": of_stage}
    for name, seconds_of in ways.items():
        taken_s = seconds_of(plan, batches)
        print(
            table_row([name, f"{taken_s:.1f}", f"{count * NEW_TOKENS / taken_s:,.0f}"]), flush=True
        )


if __name__ == "__main__":
    main()
