"""Policies that take turns on the same stages: the first stage asks a file which one comes next.

So weights, KV cache and links are the same for all, and every live run may have another policy. The
product's table of policies gets one entry more, in the processes of this benchmark only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ray.actor import ActorHandle

from actors.messages import Progress
from actors.processes.stage_actor import StageActor
from actors.schedule.orca import OrcaScheduler, orca_sizes
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import POLICIES, Policy
from actors.stage_group import StageGroup
from benchmarks.orca.request_level import RequestLevelScheduler
from planner.scheduling import PolicyName

VARIABLE = "LLMPQ_BENCHMARK_POLICY"
"""Environment variable with the file's path, which Ray's processes inherit."""

BY_FILE = cast(PolicyName, "by file")


@dataclass(frozen=True)
class Contestant:
    """A policy of a live run: orca with `max_batch_size` and parts of prompts, or, where
    `micro_batch_size` is not 0, request-level batching.
    """

    max_batch_size: int
    micro_batch_size: int = 0
    prefill_chunk_tokens: int = 0

    @property
    def label(self) -> str:
        """The paper's label in fig. 10, and the parts."""
        if self.micro_batch_size:
            return f"ft({self.max_batch_size}, {self.micro_batch_size})"
        parts = f", parts of {self.prefill_chunk_tokens}" if self.prefill_chunk_tokens else ""
        return f"orca({self.max_batch_size}{parts})"

    def comes_next(self) -> None:
        """Have the next live run use it."""
        Path(os.environ[VARIABLE]).write_text(json.dumps(asdict(self)))

    def scheduler(self, sizes: QueueSizes, stages: int) -> Scheduler:
        """Its scheduler, whose requests have at most the slots and tokens of `sizes`."""
        most = self.max_batch_size
        if self.micro_batch_size:
            return RequestLevelScheduler(
                most, self.micro_batch_size, sizes.slot_tokens, sizes.kv_tokens
            )
        parts = self.prefill_chunk_tokens
        return OrcaScheduler(
            replace(sizes, policy="orca", max_batch_size=most, prefill_chunk_tokens=parts), stages
        )


def _scheduler_of_file(sizes: QueueSizes, stages: int) -> Scheduler:
    values = json.loads(Path(os.environ[VARIABLE]).read_text())
    return Contestant(**values).scheduler(sizes, stages)


class TurnsActor(StageActor):
    """A stage actor whose live runs have the policy that the file names."""

    def lead(self, sizes: QueueSizes, following: Sequence[ActorHandle[StageActor]] | None) -> None:
        """Make the pipeline, as `StageActor.lead`, with a policy more in this process's table."""
        cast(dict[str, Any], POLICIES)[BY_FILE] = Policy(_scheduler_of_file, orca_sizes)
        super().lead(replace(sizes, policy=BY_FILE), following)


class TurnsGroup(StageGroup):
    """The stages of a plan whose live runs may have another policy each."""

    actor_class = TurnsActor


Told = tuple[float, Progress]
"""The second at which something was told of a request, and what."""
