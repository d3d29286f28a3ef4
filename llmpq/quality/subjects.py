"""Plans and bitwidths as subjects of an evaluation, on the device and in the types at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.importance import measure_layers
from actors.sample_text import what_is_seen
from actors.stage.layer_stream import compute_on
from llmpq.jobs.store import ModelNames
from llmpq.model_check import checked_adapter
from llmpq.quality.options import (
    AUTO,
    SEQUENCE_LENGTH,
    EvaluationOptions,
    checked_bitwidths,
)
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Document, Windows, as_documents, token_windows
from llmpq.run.checkpoint import (
    checked_fingerprint,
    checkpoint_reference,
    importance_store,
    measuring_store,
    shape_for_plan,
)
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec, StagePlan
from quant.backends.table import fallback_rule
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from quant.devices import local_processor, take_device
from quant.loading.cache_settings import cache_settings
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.importance import load_importance
from quant.rounding.importance_store import ImportanceStore
from quant.scheme import FULL_BITS, GPTQ, NEAREST, ROUNDINGS, WEIGHTED, Processor


def weighed(
    subject: Subject,
    model: ModelNames,
    options: EvaluationOptions,
    device: torch.device,
    plan: PlanSpec | None = None,
) -> Subject:
    """`subject` (of `plan`) with the importance that its layers are rounded by, if any is.

    Where importance has to be measured, `device`
    computes, and it is kept for stages and later evaluations. Raises as `importance_store`, and
    `CheckpointError` for weights that cannot be used.
    """
    folder, _, adapter = model
    shape = model_shape(str(folder))
    if plan is not None and plan.rounding == GPTQ and shape.is_original:
        raise SpecError(
            f"{subject.name} is calibrated before a run; make its checkpoint with llmpq quantize "
            "and pass that folder as --model"
        )
    needs = [_needs(scheme, shape.layer(i)) for i, scheme in enumerate(subject.layers)]
    ends = subject.embedding, subject.head
    if not any((*needs, *(each.rounds and each.rounding == WEIGHTED for each in ends))):
        return subject
    cache = cache_settings(options.cache_dir, None, False)
    if plan is not None:
        store = importance_store(plan, options.importance, cache, model, shape)
    elif options.importance is not None:
        checked_fingerprint(Path(options.importance), shape)
        store = ImportanceStore(known=load_importance(Path(options.importance)))
    else:
        store = measuring_store(cache, model, shape)
    store = store or ImportanceStore()  # a plan for keys and values alone needs none
    seen = what_is_seen(shape)
    found = store.find(seen)
    if found is None:
        own = [LayerScheme(each.bits, each.backend) for each in subject.layers]
        compute = compute_on(device, subject.embedding.dtype or torch.float32)
        _, layers = measure_layers(Checkpoint(folder, adapter), compute, range(len(own)), own)
        found = store.keep(layers, seen)
    return replace(subject, importance=found)


def _needs(scheme: LayerScheme, kind: ModelShape) -> bool:
    rounds = any(map(kind.rounds, (scheme.bits, scheme.of_experts.bits)))
    return (rounds and scheme.rounding == WEIGHTED) or scheme.kv_bits != FULL_BITS


def evaluate_plan(
    plan: PlanSpec,
    text: Document | Iterable[Document],
    model: str | None,
    options: EvaluationOptions,
) -> Perplexity:
    """Perplexity of `plan` on `text`; see `llmpq.Plan.evaluate`."""
    names = names_for(plan, model, options)
    device = device_of(options.device)
    windows = windows_of(as_documents(text), names[0], options)
    subject = weighed_plan(plan, names, options, device)
    (result,) = evaluate(Checkpoint(names[0], names[2]), windows, [subject], device)
    return result


def names_for(plan: PlanSpec, model: str | None, options: EvaluationOptions) -> ModelNames:
    """The checkpoint of `plan`, or `model` in its place, and the adapter, checked."""
    reference = checkpoint_reference(plan, model)
    folder = resolve(reference)
    return folder, reference, checked_adapter(options.adapter, shape_for_plan(plan, folder), folder)


def weighed_plan(
    plan: PlanSpec, names: ModelNames, options: EvaluationOptions, device: torch.device
) -> Subject:
    """`plan` as `device` computes it, with the importance that its layers are rounded by."""
    subject = plan_subject(plan, "plan", device, options.dtype)
    return weighed(subject, names, options, device, plan)


def windows_of(documents: Sequence[Document], folder: Path, options: EvaluationOptions) -> Windows:
    """The documents as windows of token ids of the model in `folder`."""
    length = options.sequence_length
    if length is None:
        length = min(SEQUENCE_LENGTH, model_shape(str(folder)).max_positions)
    return token_windows(documents, load_tokenizer(folder), length, options.max_tokens)


def plan_subject(plan: PlanSpec, name: str, device: torch.device, dtype: str) -> Subject:
    """`plan` with every layer as its stage's device would hold it; `dtype` as in the options."""
    kept = [_type_here(stage.dtype if dtype == AUTO else dtype, device) for stage in plan.stages]
    layers = [
        LayerScheme(
            each.bits,
            stage.backends.get(each.bits),
            computed,
            _planned_processor(stage),
            stage.dtype,
            plan.rounding,
            plan.kv_bits,
            None if each.expert_bits == each.bits else each.expert_bits,
        )
        for stage, computed in zip(plan.stages, kept, strict=True)
        for each in stage.choices
    ]
    head = 0 if plan.head_on_first else len(kept) - 1
    is_weighed = head == len(kept) - 1  # by what the last stage has measured
    embedding, held = (
        LayerScheme(
            plan.head_bits,
            None if place == head else fallback_rule(plan.head_bits).name,
            kept[place],
            _planned_processor(plan.stages[place]),
            plan.stages[place].dtype,
            plan.rounding if is_weighed else NEAREST,
        )
        for place in (0, head)
    )
    return Subject(name, tuple(layers), embedding, held)


def _planned_processor(stage: StagePlan) -> Processor:
    """That of the device, or where it is emulated of a host's CPU, which computes."""
    return Processor() if stage.emulated else stage.kind.processor


def bits_subject(
    bitwidths: Sequence[int],
    layers: int,
    device: torch.device,
    dtype: str,
    rounding: str = ROUNDINGS[0],
) -> Subject:
    """This machine's kernels at one bitwidth for all layers, or at one for each.

    Raises `SpecError` for bitwidths that are none, or not one a layer.
    """
    checked_bitwidths(bitwidths, layers)
    uniform = len(bitwidths) == 1
    computed = compute_dtype(dtype, device)
    schemes = [LayerScheme(bits, dtype=computed, rounding=rounding) for bits in bitwidths]
    name, ends = f"{bitwidths[0]} bit" if uniform else "mixed", LayerScheme(dtype=computed)
    return Subject(name, tuple(schemes * layers if uniform else schemes), ends, ends)


def device_of(name: str) -> torch.device:
    """The device of that name on this machine; raises `DeviceError` where there is no GPU."""
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = take_device(name)
    local_processor(device)
    return device


def compute_of(device: str, dtype: str) -> Compute:
    """The device and the type of these names, as `device_of` and `compute_dtype` find them."""
    found = device_of(device)
    return compute_on(found, compute_dtype(dtype, found))


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type of that name, or with `auto` float32 on a CPU and a GPU's 16-bit type."""
    return _type_here(_usual_dtype(device) if dtype == AUTO else dtype, device)


def _usual_dtype(device: torch.device) -> str:
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def _type_here(dtype: str, device: torch.device) -> torch.dtype:
    """`dtype`, or float32 where this device could only emulate it."""
    if dtype == "float16" and device.type == "cpu":
        return torch.float32
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if dtype == "bfloat16" and old:
        return torch.float32
    found: torch.dtype = getattr(torch, dtype)
    return found
