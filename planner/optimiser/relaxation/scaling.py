"""Units of linear and integer programmes, chosen so that solvers' tolerances do no harm.

Solvers keep to 1e-6 (1e-7 in linear programmes) of a model's unit, whatever that is.
"""

from __future__ import annotations

import numpy as np

from planner.optimiser.latency import latency_form
from planner.optimiser.problem import AssignmentProblem, FloatArray

OBJECTIVE_UNITS = 10.0  # about what the objective is in a scaled model
MEMORY_UNITS = 1000.0  # about what each memory is


def typical_objective_s(problem: AssignmentProblem) -> float:
    """A positive number of seconds of the objective's size: layers spread evenly; 1 if zero."""
    each = problem.layers / problem.stages
    prefill_s = float(each * problem.prefill_s.mean() + problem.fixed_prefill_s.max())
    decode_s = float(each * problem.decode_s.mean() + problem.fixed_decode_s.max())
    stages = problem.stages
    latency_s = latency_form(problem).seconds(
        prefill_s, decode_s, stages * prefill_s, stages * decode_s
    )
    quality_s = problem.theta * float(problem.sensitivity.mean(axis=1).sum())
    seconds = float(latency_s) + quality_s
    return seconds if seconds > 0 else 1.0


def memory_unit_bytes(layer_bytes: FloatArray, memory_bytes: FloatArray) -> FloatArray:
    """Bytes of a unit of each memory [N], for layers of `layer_bytes` [N, K]."""
    greatest = np.maximum(memory_bytes, layer_bytes.max(axis=-1))
    unit: FloatArray = np.maximum(greatest, 1.0) / MEMORY_UNITS
    return unit
