"""Options of planning that others make useless, and what to do instead."""

from __future__ import annotations

from planner.optimiser.names import BASELINE_METHODS, METHOD_NAMES, SOLVER_METHODS
from planner.option_rules import Rule
from planner.scheduling import BOUNDED, POLICY_NAMES, PREDICTING

BOUNDS = ("max_omega", "max_latency_s", "max_ppl_delta")

PLAN_RULES = (
    Rule(
        ("quality",),
        "theta is the price of quality in seconds, by which plans are ranked; give one of them",
        beside="theta",
    ),
    *(
        Rule(("quality",), "the bound says what is wanted; give one of them", beside=bound)
        for bound in BOUNDS
    ),
    Rule(
        ("quality",),
        "the paper's baselines decide without it; leave it out, or use method auto",
        beside="method",
        values=BASELINE_METHODS,
    ),
    *(
        Rule(("theta",), "it is found so that the bound holds; give one of them", beside=bound)
        for bound in BOUNDS
    ),
    Rule(
        ("solver",),
        f"only methods {' and '.join(SOLVER_METHODS)} solve an integer programme; use one of "
        "these, or leave it out",
        beside="method",
        values=tuple(name for name in METHOD_NAMES if name not in SOLVER_METHODS),
    ),
    Rule(
        ("group", "all_orders", "ilp_time_limit", "relative_gap"),
        "the paper's baselines decide without it; leave it out, or use method auto",
        beside="method",
        values=BASELINE_METHODS,
    ),
    Rule(
        ("head",),
        "the paper's baselines have the LM head on the last stage; leave it out, or use method "
        "auto",
        beside="method",
        values=BASELINE_METHODS,
        honoured=("last",),
    ),
    Rule(
        ("prefill_micro_batch", "decode_micro_batch"),
        "it divides the batch by the number of stages (LLM-PQ section 6.1); leave it out, or use "
        "method uniform or auto",
        beside="method",
        values=("pipeedge",),
    ),
    Rule(
        ("tensor_parallel",),
        "the baselines of the paper have stages of one device; leave it out, or use method auto",
        beside="method",
        values=BASELINE_METHODS,
    ),
    Rule(
        ("profile_use",),
        "name the CSV of measured times, or leave it (--fit, --use_profiler_prediction) out",
        without=("profiles",),
    ),
    Rule(("strict_profiles",), "name the CSV of measured times", without=("profiles",)),
    Rule(
        ("predictor",),
        "only policy s3 reserves by predicted lengths; choose it, or leave the predictor out",
        beside="policy",
        values=("auto", *(name for name in POLICY_NAMES if name not in PREDICTING)),
    ),
    Rule(
        ("predictor",),
        "only policy s3 reserves by predicted lengths; choose it, or leave the predictor out",
        without=("policy",),
    ),
    Rule(
        ("quantile", "schedule"),
        "it is about a bound on the latency of requests; give one (inf: any latency)",
        without=("max_request_latency_s",),
    ),
    Rule(
        ("policy",),
        f"the schedules of {BOUNDED} are made for a bound; give one (inf: any latency)",
        without=("max_request_latency_s",),
        honoured=("auto", *(name for name in POLICY_NAMES if name != BOUNDED)),
    ),
    Rule(
        ("policy",),
        f"what keeps it is policy {BOUNDED}; leave the other one out",
        beside="max_request_latency_s",
        honoured=(BOUNDED,),
    ),
    Rule(
        ("max_latency_s",),
        "it bounds the seconds of a whole batch or job, max_request_latency_s those of each "
        "request; give one of them",
        beside="max_request_latency_s",
    ),
    Rule(
        (
            "in_flight",
            "prefill_micro_batch",
            "decode_micro_batch",
            "max_batch_size",
            "prefill_chunk_tokens",
            "objective",
        ),
        "the schedule that keeps the bound decides it; leave it out",
        beside="max_request_latency_s",
    ),
    Rule(
        ("method",),
        "the paper's baselines know no bound; leave it out",
        beside="max_request_latency_s",
        honoured=tuple(name for name in METHOD_NAMES if name not in BASELINE_METHODS),
    ),
)
"""Planning options that others make useless."""

FRONT_RULES = (
    Rule(
        ("pareto",),
        "a baseline of the paper is one plan and has no front; leave one of them out",
        beside="method",
        values=BASELINE_METHODS,
    ),
    Rule(
        ("pareto",),
        "auto compares two plans, and a front has many; choose a policy",
        beside="policy",
        values=("auto",),
    ),
    Rule(
        ("theta", "quality", *BOUNDS),
        "the front has the plans of all thetas and bounds; leave it out, or ask for one plan too "
        "(report)",
        beside="pareto",
        without=("report", "max_request_latency_s"),
    ),
)
"""Planning options that a front of latency against quality makes useless."""
