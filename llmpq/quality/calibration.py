"""What weights are calibrated on, and the checkpoint that is calibrated before a run begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.messages import Request
from llmpq.jobs.inputs import JobInput, no_prompts
from llmpq.jobs.store import model_digest
from llmpq.model_check import checked_adapter
from llmpq.quality.options import SEQUENCE_LENGTH
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.text_windows import Document, TokenIds, Windows, read_documents, token_windows
from llmpq.rows.row import Row
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.run.options import RunOptions
from llmpq.tokenizing.prompting import Prompting
from llmpq.tokenizing.requests import opened_tokenizer, requests_of_any_length
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.stored_config import CONFIG_FILE
from quant.common.errors import InputError, SpecError
from quant.scheme import GPTQ, GptqOptions

MOST_ROWS = 4096
"""Rows that are tokenized, evenly spaced: at 16 tokens each they fill 128 sequences of 512."""


def drawn_windows(windows: Windows, sequences: int, seed: int) -> TokenIds:
    """At most `sequences` whole windows, drawn by `seed`, in their order: `[sequences, length]`."""
    length = windows.token_ids.shape[1]
    whole = np.flatnonzero(windows.counts == length)
    drawn = np.random.default_rng(seed).permutation(whole)[:sequences]
    found: TokenIds = windows.token_ids[np.sort(drawn)]
    return found


def token_digest(token_ids: TokenIds) -> str:
    """Digest of the token ids and of how they are cut."""
    shape = ",".join(map(str, token_ids.shape)).encode()
    content = token_ids.astype("<i8").tobytes()
    return hashlib.sha256(shape + b":" + content).hexdigest()[:16]


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
    chosen = (row for number, row in enumerate(rows) if number % step == 0)
    with opened_tokenizer(folder, prompting) as tokenizer:
        made = requests_of_any_length(chosen, tokenizer)
        found = [each.prompt_ids for each in made if isinstance(each, Request)]
    if not found:
        raise InputError(f"{named}: no prompt can be tokenized; give --calibration")
    return tuple(found)


FOLDER = "gptq"
"""The folder's name within the cache of packed layers."""

_SEQUENCES, _SEED = 32, 0
_OPTIONS = GptqOptions(narrow=True)


def with_calibrated(
    plan: PlanSpec,
    options: RunOptions,
    prompts: Callable[[Path], Sequence[Document]] | None = None,
    progress: ReportProgress | None = None,
) -> RunOptions:
    """`options` with the calibrated checkpoint as their model, where `plan` asks for one.

    The plan's bits are rounded into a folder beside the cache of packed layers, whole or not at
    all, so that a stage that starts again, or the next run, reads the same codes.
    `prompts` gives what to calibrate on, token ids of the job's prompts for the model in a folder;
    None: random ids. `progress` is told of the layers that are done. Nodes must see the folder
    under this path. Raises `SpecError` without a cache folder, and what quantizing raises.
    """
    if plan.rounding != GPTQ:
        return options
    reference = checkpoint_reference(plan, options.model)
    folder = resolve(reference)
    shape = shape_for_plan(plan, folder)
    adapter = checked_adapter(options.adapter, shape, folder)
    if not shape.is_original:
        return options
    if options.no_cache:
        raise SpecError(
            "rounding gptq keeps a calibrated checkpoint, which no_cache forbids; give a cache_dir "
            "that all nodes see, or quantize with llmpq quantize and pass its folder as --model"
        )
    choices = [each for stage in plan.stages for each in stage.choices]
    bits = tuple(each.bits for each in choices)
    experts = tuple(each.expert_bits for each in choices)
    apart = "" if experts == bits else f" {experts}"
    documents = () if prompts is None else prompts(folder)
    seen = hashlib.sha256(repr(documents).encode()).hexdigest() if documents else "random ids"
    key = hashlib.sha256(
        f"{model_digest(folder, reference, adapter)} {bits}{apart} {seen} {_OPTIONS}".encode()
    ).hexdigest()
    target = options.cache.path / FOLDER / key[:32]
    if not (target / CONFIG_FILE).is_file():
        _quantize((folder, adapter), target, (bits, experts), documents, progress)
    return replace(options, model=str(target), adapter=None)  # which the weights hold by now


def _quantize(
    model: tuple[Path, str | None],
    target: Path,
    bits: tuple[Sequence[int], Sequence[int]],
    documents: Sequence[Document],
    progress: ReportProgress | None,
) -> None:
    import torch

    from actors.importance import random_token_ids
    from actors.stage.model_config import read_config
    from llmpq.quality.quantize import Quantization, quantize_checkpoint
    from llmpq.quality.subjects import compute_of
    from planner.model.finding import model_shape
    from quant.checkpoint.reader import Checkpoint

    folder, adapter = model
    length = min(SEQUENCE_LENGTH, model_shape(str(folder)).max_positions)
    if documents:
        windows = token_windows(documents, None, length)
        token_ids = torch.from_numpy(drawn_windows(windows, _SEQUENCES, _SEED))
    else:
        token_ids = random_token_ids(read_config(folder), _SEQUENCES, length)
    compute = compute_of("auto", "auto")
    wanted = Quantization(bits[0], token_ids, compute, _OPTIONS, bits[1])
    quantize_checkpoint(Checkpoint(folder, adapter), target, wanted, progress=progress)
