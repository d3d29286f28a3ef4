"""The engine alone (fig. 9): seconds of batches whose requests are alike, without a scheduler.

Both engines have the planner's times, so that what differs is memory: FasterTransformer reserves
as many tokens for each request as the model has positions, this one what the request needs.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.lab import header, table_row
from benchmarks.reproduction.gpts import GPTS, POSITIONS
from benchmarks.reproduction.orca.pipelines import (
    SETTINGS,
    ModelledPipeline,
    modelled_pipeline,
)
from benchmarks.reproduction.orca.request_level import RequestLevelScheduler
from benchmarks.reproduction.orca.traces import Arrival, Lengths
from benchmarks.reproduction.orca.virtual_time import outcomes

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS, NEW = (32, 128), 32
PAPER_MOST = {"13B": "4", "101B": "8"}
"""Requests of the largest batch that FasterTransformer had room for (section 6.1)."""
PAPER_S = {("175B", 128): f"{NEW * 0.095:.1f}"}
"""Of `orca(128)`: half of 190 ms is its time a token (section 6.2)."""


def table() -> Iterator[str]:
    """Yield the lines of the table: seconds of a batch by its requests."""
    sizes = " | ".join(map(str, BATCHES))
    yield header(
        f"model | stages | prompt | {sizes} | one, the paper | room: FT | the paper | ours"
    )
    for setting in (each for each in SETTINGS if each.model in GPTS):
        whole = modelled_pipeline(setting, Lengths(POSITIONS - NEW, NEW))
        for prompt in PROMPTS:
            pipeline = modelled_pipeline(setting, Lengths(prompt, NEW))
            yield table_row(
                [
                    setting.model,
                    f"{len(whole.times)} of {setting.degree}",
                    prompt,
                    *(f"{batch_s(pipeline, size, prompt):.2f}" for size in BATCHES),
                    PAPER_S.get((setting.model, prompt), "–"),
                    whole.kv_tokens // POSITIONS,
                    PAPER_MOST.get(setting.model, "–"),
                    whole.kv_tokens // (prompt + NEW),
                ]
            )


def batch_s(pipeline: ModelledPipeline, requests: int, prompt: int) -> float:
    """Seconds of a batch that is one micro-batch on all stages."""
    slot = prompt + NEW
    scheduler = RequestLevelScheduler(requests, requests, slot, requests * slot)
    trace = [Arrival(0.0, Lengths(prompt, NEW))] * requests
    return max(each.ended_s for each in outcomes(scheduler, pipeline.times, trace))
