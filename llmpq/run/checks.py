"""What can be said of a run before torch and Ray, which are slow to load, are needed for it."""

from __future__ import annotations

from llmpq.lengths.sources import check_source
from llmpq.run.checkpoint import checkpoint_reference, sampling_for_run, shape_for_run
from llmpq.run.importance import importance_file
from llmpq.run.options import RunOptions
from planner.plan.spec import PlanSpec
from quant.checkpoint.model_reference import resolve


def check_run(plan: PlanSpec, options: RunOptions, source: str) -> None:
    """Raise what a run of `plan`, which is in the file `source`, raises for the model and the
    files that it is to use.
    """
    scheduling = options.scheduling(plan)
    folder = resolve(checkpoint_reference(plan, options.model or plan.stand_in), weights=False)
    sampling = sampling_for_run(plan, options, folder).sampling
    shape = shape_for_run(plan, sampling, folder, source)
    importance_file(plan, options.importance, options.cache, shape)
    if scheduling.name == "s3":
        check_source(options.predictor, folder, shape.vocab_size, options.save_predictor)
