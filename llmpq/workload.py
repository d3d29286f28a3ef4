"""Deriving a workload from a file of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path

from actors.messages import Request, Sampling
from llmpq.jobs.inputs import read_rows
from llmpq.rows.row import Row
from llmpq.tokenizing.requests import RequestMaker, load_tokenizer
from llmpq.tokenizing.tokenizer_process import Limits
from planner.workload import MAX_TOKENS, Workload
from quant.common.errors import CheckpointError, InputError, SpecError

# LLM-PQ section 6.1: the paper's default workload, and the batch that longer files are cut into.
DEFAULT_WORKLOAD: Mapping[str, int] = {"global_batch": 32, "prompt_length": 512, "new_tokens": 100}


def workload_of_prompts(path: Path, model: str, given: Mapping[str, int]) -> Workload:
    """The batch, longest prompt and most new tokens of the prompts in `path`; `given` values win.

    `model` must be a local folder or hub id when prompts are text, for its tokenizer. Raises
    `InputError` when no prompt can be used.
    """
    rows = [row for row in read_rows(path) if isinstance(row, Row)]
    if not rows:
        raise InputError(f"{path}: no row can be used; llmpq-dist would write only errors")
    derived = {
        "global_batch": min(len(rows), DEFAULT_WORKLOAD["global_batch"]),
        "new_tokens": max(
            row.sampling.get("max_new_tokens") or DEFAULT_WORKLOAD["new_tokens"] for row in rows
        ),
    }
    if "prompt_length" not in given:
        derived["prompt_length"] = _longest(rows, model)
    return Workload(**(derived | dict(given)))


def _longest(rows: list[Row], model: str) -> int:
    tokenizer = None
    if any(row.token_ids is None for row in rows):
        from quant.checkpoint.model_reference import resolve

        try:
            tokenizer = load_tokenizer(resolve(model, weights=False), Limits())
        except CheckpointError as error:
            raise SpecError(f"the prompts cannot be measured: {error}; or give --s") from error
        if tokenizer is None:
            raise SpecError(f"{model} has no tokenizer to measure the prompts; give --s")
    room = Workload(1, MAX_TOKENS, MAX_TOKENS)
    maker = RequestMaker(room, MAX_TOKENS, Sampling(), tokenizer)
    with closing(tokenizer) if tokenizer is not None else nullcontext():
        made = maker.requests(rows)
        lengths = [len(each.prompt_ids) for each in made if isinstance(each, Request)]
    if not lengths:
        raise InputError("no prompt could be tokenized; give --s")
    return max(lengths)
