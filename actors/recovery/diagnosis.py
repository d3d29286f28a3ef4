"""Finding what ended a run, and a remedy where memory was short."""

from __future__ import annotations

import warnings
from dataclasses import replace

from actors.processes.health import BatchFailure
from actors.recovery.faults import Fault, StoppedRun
from actors.recovery.pipeline import StagePipeline
from actors.schedule.scheduler import QueueSizes


def requests_in(stopped: StoppedRun, run: int) -> dict[int, str] | None:
    """Return the request in each slot when `run` was stopped; None: the first stage is lost."""
    if stopped.tokens is None:
        return None
    if stopped.tokens.run != run:
        return {}
    return {slot: custom_id for slot, (custom_id, _) in stopped.tokens.slots.items()}


def diagnose(
    pipeline: StagePipeline, stopped: StoppedRun, error: Exception, in_flight: dict[int, str] | None
) -> Fault:
    """Return the fault that `error` told of; where memory was short, the micro-batches of
    `pipeline` are halved.
    """
    everyone = None if in_flight is None else frozenset(in_flight.values())
    for stage, loss in stopped.lost.items():
        return Fault(loss.kind, stage, f"{pipeline.stages[stage].name} {loss.text}", everyone)
    for stage, failure in stopped.failures.items():
        return _diagnose_failure(pipeline, stage, failure, in_flight or {})
    return Fault("broken", None, str(error), everyone)


def _diagnose_failure(
    pipeline: StagePipeline, stage: int, failure: BatchFailure, in_flight: dict[int, str]
) -> Fault:
    name, size = pipeline.stages[stage].name, len(failure.slots)
    ids = frozenset(in_flight[slot] for slot in failure.slots if slot in in_flight) or None
    if failure.kind != "memory":
        text = f"{name} failed at a {failure.batch_kind} of {size} requests: {failure.text}"
        return Fault("failed", stage, text, ids)
    text = (
        f"{name} ran out of memory at a {failure.batch_kind} of {size} requests: it held "
        f"{failure.held_bytes} bytes and asked for {failure.asked_bytes or 'more'}"
    )
    if size == 1:
        return Fault("memory", stage, text, ids)
    pipeline.sizes = halved(pipeline.sizes, failure)
    text += f"; its micro-batches are halved to {size // 2}"
    warnings.warn(text, stacklevel=2)
    return Fault("memory", stage, text, ids, has_remedy=True)


def halved(sizes: QueueSizes, failure: BatchFailure) -> QueueSizes:
    """Return `sizes` with half of the failed micro-batch for the phases that it had."""
    half = max(1, len(failure.slots) // 2)
    prefill, decode = sizes.prefill_micro_batch, sizes.decode_micro_batch
    if sizes.max_batch_size:
        return replace(sizes, max_batch_size=min(half, sizes.max_batch_size))
    if failure.batch_kind == "mixed":  # its share of each is not known
        return replace(
            sizes, prefill_micro_batch=max(1, prefill // 2), decode_micro_batch=max(1, decode // 2)
        )
    if failure.batch_kind == "prefill":
        return replace(sizes, prefill_micro_batch=min(half, prefill))
    return replace(sizes, decode_micro_batch=min(half, decode))
