"""The prompts of a job as a text to calibrate on: as the model will see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from actors.messages import Request, Sampling
from llmpq.jobs.inputs import JobInput, no_prompts
from llmpq.quality.text_windows import Document, read_documents
from llmpq.rows.row import Row
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import RequestMaker, start_tokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits
from planner.workload import MAX_TOKENS, Workload
from quant.common.errors import InputError

MOST_ROWS = 4096
"""Rows that are tokenized, evenly spaced: at 16 tokens each they fill 128 sequences of 512."""


def calibration_documents(
    texts: Sequence[str],
    paths: Sequence[str],
    folder: Path,
    prompting: Prompting | None = None,
) -> tuple[Document, ...]:
    """The documents in the files `texts`, and the prompts of the job in `paths`.

    All are found before any is tokenized. Raises as `read_documents` and `prompts_of_input`.
    """
    if paths:
        JobInput.find(paths)
    documents = read_documents(texts)
    return documents + prompts_of_input(paths, folder, prompting) if paths else documents


def prompts_of_input(
    paths: Sequence[str], folder: Path, prompting: Prompting | None = None
) -> tuple[Document, ...]:
    """Token ids of prompts of the job in `paths`, with chat template, of evenly spaced rows.

    `folder` has the model's tokenizer; `prompting` is for rows that do not say. Rows that cannot be
    used are left out. Raises `InputError` where none can, and for files that cannot be read.
    """
    source = JobInput.find(paths)
    named = ", ".join(map(str, source.files))
    usable = sum(isinstance(row, Row) for row, _ in source.rows())
    if not usable:
        raise no_prompts(named)
    step = -(-usable // MOST_ROWS)
    rows = (row for row, _ in source.rows() if isinstance(row, Row))
    chosen = (replace(row, sampling={}) for number, row in enumerate(rows) if number % step == 0)
    tokenizer = start_tokenizer(folder, RowLimits(), prompting)
    try:
        if tokenizer is not None:
            tokenizer.wait()
        maker = RequestMaker(Workload(1, MAX_TOKENS, MAX_TOKENS), MAX_TOKENS, Sampling(), tokenizer)
        found = [each.prompt_ids for each in maker.requests(chosen) if isinstance(each, Request)]
    finally:
        if tokenizer is not None:
            tokenizer.close()
    if not found:
        raise InputError(f"{named}: no prompt can be tokenized; give --calibration")
    return tuple(found)
