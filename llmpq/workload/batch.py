"""Deriving a batch from files of prompts, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from llmpq.jobs.inputs import JobInput
from llmpq.workload.defaults import DEFAULT_WORKLOAD
from llmpq.workload.measuring import InputMeasure
from planner.workload import Workload


def workload_of_prompts(
    paths: Sequence[str | Path], model: str, given: Mapping[str, int]
) -> Workload:
    """The batch, longest prompt and most new tokens of the prompts behind paths, folders and globs;
    `given` values win.

    `model` must be a local folder or hub id when prompts are text, for its tokenizer. Raises
    `InputError` when no prompt can be used.
    """
    measure = InputMeasure(
        JobInput.find(paths), model, DEFAULT_WORKLOAD["new_tokens"], given.get("prompt_length")
    )
    rows = measure.measure()
    derived = {
        "global_batch": min(len(rows), DEFAULT_WORKLOAD["global_batch"]),
        "prompt_length": int(rows.prompts.max()),
        "new_tokens": int(rows.limits.max()),
    }
    return Workload(**(derived | dict(given)))
