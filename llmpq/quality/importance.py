"""The importance that evaluations round by: what stages would, measured here where none is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.stage.importance import measure_layers, what_is_seen
from actors.stage.layer_stream import compute_on
from llmpq.quality.options import EvaluationOptions
from llmpq.quality.scoring import Subject
from llmpq.run.importance import checked_importance, importance_store, measuring_store
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec
from quant.cache.settings import cache_settings
from quant.common.errors import SpecError
from quant.importance.file import ImportanceStore
from quant.loading.emulated_kernels import LayerScheme
from quant.scheme import FULL_BITS, GPTQ, WEIGHTED


@dataclass(frozen=True)
class Weighing:
    """Where the importance of the model in `folder`, called `reference`, is found and kept."""

    folder: Path
    reference: str
    options: EvaluationOptions

    def store(self, shape: ModelShape, plan: PlanSpec | None) -> ImportanceStore:
        """That of `plan`, or of plain bitwidths; raises as `importance_store`."""
        file = self.options.importance
        cache = cache_settings(self.options.cache_dir, None, False)
        model = (self.folder, self.reference)
        if plan is not None:
            return importance_store(plan, file, cache, model, shape)
        if file is not None:
            return ImportanceStore(known=checked_importance(Path(file), shape))
        return measuring_store(cache, model, shape)


def weighed(
    subject: Subject, weighing: Weighing, device: torch.device, plan: PlanSpec | None = None
) -> Subject:
    """`subject` (of `plan`) with the importance that its layers are rounded by, if any is.

    Where it has to be measured, `device` computes.

    Raises as `importance_store`, and `CheckpointError` for weights that cannot be used.
    """
    shape = model_shape(str(weighing.folder))
    if plan is not None and plan.rounding == GPTQ and shape.stored is None:
        raise SpecError(
            f"{subject.name} is calibrated before a run; make its checkpoint with llmpq quantize "
            "and pass that folder as --model"
        )
    if not any(_needs(scheme, shape.stored is not None) for scheme in subject.layers):
        return subject
    store = weighing.store(shape, plan)
    seen = what_is_seen(shape)
    found = store.find(seen)
    if found is None:
        own = [LayerScheme(each.bits, each.backend) for each in subject.layers]
        compute = compute_on(device, subject.embedding_dtype or torch.float32)
        _, layers = measure_layers(weighing.folder, compute, range(len(own)), own)
        found = store.keep(layers, seen)
    return replace(subject, importance=found)


def _needs(scheme: LayerScheme, stored: bool) -> bool:
    rounds = scheme.bits != FULL_BITS and not stored and scheme.rounding == WEIGHTED
    return rounds or scheme.kv_bits != FULL_BITS
