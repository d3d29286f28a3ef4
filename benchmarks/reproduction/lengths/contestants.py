"""What reserves KV memory, each in its best size: the longest answer, predictions, blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from actors.schedule.orca import OrcaScheduler
from actors.schedule.s3 import S3Scheduler
from actors.schedule.scheduler import QueueSizes, Scheduler
from benchmarks.reproduction.lengths.on_demand import OnDemandScheduler
from benchmarks.reproduction.lengths.rows import IntArray, Rows
from benchmarks.reproduction.lengths.virtual_job import CacheCosts, JobRun, run_job
from benchmarks.reproduction.orca.pipelines import ModelledPipeline
from planner.costs.memory import kv_token_bytes
from planner.model.finding import model_shape
from planner.workload import HOLES
from quant.scheme import FULL_BITS

MOST_BATCH_TOKENS = 2048
"""Tokens of a micro-batch: more prompt tokens wait, so that decode steps do not."""
HOST_BYTES = 64 << 30
"""Host memory of each stage for keys and values of requests that were preempted."""
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Sizes of micro-batches that are tried on pipelines, in even shares of the requests in flight."""


@dataclass(frozen=True, eq=False)
class Memory:
    """The KV memory of a pipeline, of which `kv_tokens` token slots are used."""

    pipeline: ModelledPipeline
    kv_tokens: int

    @cached_property
    def costs(self) -> CacheCosts:
        """Those of the stage that takes longest for each."""
        gpus = [stage.kind for stage in self.pipeline.plan.stages]
        held = self._token_bytes
        return CacheCosts(
            max(2 * b / gpu.memory_bytes_per_s for b, gpu in zip(held, gpus, strict=True)),
            max(b / gpu.host_link_bytes_per_s for b, gpu in zip(held, gpus, strict=True)),
        )

    @property
    def parked_tokens(self) -> int:
        """Tokens for which every stage has host memory."""
        return HOST_BYTES // max(self._token_bytes)

    @cached_property
    def _token_bytes(self) -> list[int]:
        """Bytes of a token's keys and values on each stage."""
        shape = model_shape(self.pipeline.setting.model)
        return [
            2 * kv_token_bytes(shape, FULL_BITS, stage.dtype) * len(stage.layers)
            for stage in self.pipeline.plan.stages
        ]


@dataclass(frozen=True)
class Contestant:
    """A way to reserve: "longest", "predicted" or "blocks".

    `park_tokens_from`: the least tokens of preempted requests that are parked in host memory; 0:
    all are computed again.
    """

    name: str
    kind: str
    expected: IntArray | None = None
    park_tokens_from: int = 1

    def best(self, memory: Memory, rows: Rows) -> JobRun:
        """The run of the job with the micro-batches that suit it best."""
        runs = (self._run(memory, rows, most) for most in self._sizes(memory, rows))
        return max(runs, key=lambda run: run.tokens_per_s)

    def _sizes(self, memory: Memory, rows: Rows) -> Iterator[int]:
        """Requests of a micro-batch: all on one stage; shares of those in flight on several."""
        stages = len(memory.pipeline.times)
        mean = float(rows.prompts.mean()) + (
            rows.limit if self.kind == "longest" else float(rows.answers.mean())
        )
        in_flight = min(len(rows), max(1, int(memory.kv_tokens / mean)))
        if stages == 1:
            yield min(len(rows), 2 * in_flight)
            return
        yield from sorted({max(1, round(share * in_flight / stages)) for share in SHARES})

    def _run(self, memory: Memory, rows: Rows, most: int) -> JobRun:
        scheduler = self.scheduler(memory, rows, most)
        return run_job(scheduler, memory.pipeline.times, rows, self.expected, memory.costs)

    def scheduler(self, memory: Memory, rows: Rows, most: int) -> Scheduler:
        """Its scheduler for micro-batches of at most so many requests."""
        stages, kv_tokens = len(memory.pipeline.times), memory.kv_tokens
        tokens = max(MOST_BATCH_TOKENS, 2 * most)
        if self.kind == "blocks":
            return OnDemandScheduler(kv_tokens, stages, most, tokens)
        alike = self.kind == "longest"
        longest = rows.longest
        sizes = QueueSizes(
            slots=stages * most,
            prefill_micro_batch=1,
            decode_micro_batch=most,
            slot_tokens=longest,
            policy="orca" if alike else "s3",
            kv_tokens=kv_tokens,
            n_slots=max(longest, int((1 - HOLES) * kv_tokens)),
            max_batch_size=most,
            max_batch_tokens=tokens,
            park_tokens_from=0 if alike else self.park_tokens_from,
            parked_tokens=0 if alike else memory.parked_tokens,
        )
        return OrcaScheduler(sizes, stages) if alike else S3Scheduler(sizes, stages)


def contestants(rows: Rows, predicted: Sequence[tuple[str, IntArray]]) -> list[Contestant]:
    """Reserving for the longest, by each prediction, by the truth, and on demand."""
    return [
        Contestant("longest (ORCA)", "longest"),
        *(Contestant(name, "predicted", expected) for name, expected in predicted),
        Contestant("Oracle", "predicted", rows.answers),
        Contestant("blocks on demand", "blocks"),
    ]
