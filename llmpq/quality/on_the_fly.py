"""Calibrating a checkpoint for a plan of rounding `gptq`, before its stages start.

The plan's bits are rounded with GPTQ into a folder beside the cache of packed layers, whole or not
at all, and the run goes on with that checkpoint: a stage that starts again, or the next run, reads
the same codes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmpq.jobs.job_files import model_digest
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.text_windows import Document, token_windows
from llmpq.run.checkpoint import checkpoint_reference, shape_for_plan
from llmpq.run.options import RunOptions
from planner.plan.spec import PlanSpec
from quant.checkpoint.gptq_config import CONFIG_FILE
from quant.checkpoint.model_reference import resolve
from quant.common.errors import SpecError
from quant.scheme import GPTQ

FOLDER = "gptq"
"""The folder's name within the cache of packed layers."""

_SEQUENCES, _LENGTH, _SEED = 32, 512, 0


def with_calibrated(
    plan: PlanSpec,
    options: RunOptions,
    prompts: Callable[[Path], Sequence[Document]] | None = None,
    progress: ReportProgress | None = None,
) -> RunOptions:
    """`options` with the calibrated checkpoint as their model, where `plan` asks for one.

    `prompts` gives what to calibrate on, token ids of the job's prompts for the model in a folder;
    None: random ids. `progress` is told of the layers that are done. Nodes must see the folder
    under this path. Raises `SpecError` without a cache folder, and what quantizing raises.
    """
    if plan.rounding != GPTQ:
        return options
    reference = checkpoint_reference(plan, options.model)
    folder = resolve(reference)
    if shape_for_plan(plan, folder).stored is not None:
        return options
    if options.no_cache:
        raise SpecError(
            "rounding gptq keeps a calibrated checkpoint, which no_cache forbids; give a cache_dir "
            "that all nodes see, or quantize with llmpq quantize and pass its folder as --model"
        )
    bits = tuple(bits for stage in plan.stages for bits in stage.bitwidths)
    documents = () if prompts is None else prompts(folder)
    seen = hashlib.sha256(repr(documents).encode()).hexdigest() if documents else "random ids"
    key = hashlib.sha256(f"{model_digest(folder, reference)} {bits} {seen}".encode()).hexdigest()
    target = options.cache.path / FOLDER / key[:32]
    if not (target / CONFIG_FILE).is_file():
        _quantize(folder, target, bits, documents, progress)
    return replace(options, model=str(target))


def _quantize(
    folder: Path,
    target: Path,
    bits: Sequence[int],
    documents: Sequence[Document],
    progress: ReportProgress | None,
) -> None:
    import torch

    from actors.stage.importance import random_token_ids
    from actors.stage.layer_stream import compute_on
    from actors.stage.model_config import read_config
    from llmpq.quality.quantize import Quantization, quantize_checkpoint
    from llmpq.quality.sensitivity.indicator import Calibration
    from llmpq.quality.subjects import compute_dtype, device_of
    from planner.model.finding import model_shape
    from quant.gptq.options import GptqOptions

    length = min(_LENGTH, model_shape(str(folder)).max_positions)
    if documents:
        windows = token_windows(documents, None, length)
        token_ids = torch.from_numpy(Calibration.sample(windows, _SEQUENCES, _SEED).token_ids)
    else:
        token_ids = random_token_ids(read_config(folder), _SEQUENCES, length)
    device = device_of("auto")
    compute = compute_on(device, compute_dtype("auto", device))
    wanted = Quantization(bits, token_ids, compute, GptqOptions())
    quantize_checkpoint(folder, target, wanted, progress=progress)
