"""The rules about options of `llmpq plan` that change nothing beside others."""

from __future__ import annotations

from planner.option_rules import Rule
from planner.options import FRONT_RULES, PLAN_RULES

_WORKLOAD_RULES = (
    Rule(("prompts",), "--input has the prompts; give one of them", beside="input"),
    *(
        Rule(
            (name,),
            f"--global_bz plans one batch as in the paper{why}; give one of them",
            beside="global_batch",
        )
        for name, why in (
            ("prompts", ", whatever comes after it"),
            ("in_flight", " with all its prompts in flight"),
            ("lengths", " of the longest prompt and output"),
            ("predictor", " of the longest prompt and output"),
            ("long_rows", " of the longest prompt and output"),
        )
    ),
    Rule(
        ("in_flight", "lengths", "predictor"),
        "it is about a job of many prompts; give --input FILE or --prompts COUNT",
        without=("input", "prompts"),
    ),
    Rule(
        ("prompt_length",),
        "the file has prompt lengths; give one of them",
        beside="lengths",
        without=("input",),
    ),
    Rule(
        ("long_rows", "percentile"), "only a file has rows; give --input FILE", without=("input",)
    ),
)
"""Options of what is planned for that others make useless."""

ALGO_RULES = (
    Rule(("model_size",), "give the size of the family of --model_name", without=("model_name",)),
    Rule(
        ("method",),
        "--shaq_efficient is --method transfer; give one of them",
        beside="shaq_efficient",
        honoured=("transfer",),
    ),
    *(
        Rule(("address",), f"--{name} says which devices there are; give one of them", beside=name)
        for name in ("cluster", "device_names")
    ),
    Rule(
        ("output", "trace", "compare"),
        "the front by itself makes no plan; add --report FILE, or leave it out",
        beside="pareto",
        without=("report",),
    ),
    Rule(
        ("report", "trace", "compare", "pareto"),
        "it is of one pipeline; leave it out, or plan without --replicas",
        beside="replicas",
    ),
    Rule(("compare",), "the plan's JSON holds the baselines; leave it out", beside="json"),
    *_WORKLOAD_RULES,
    *FRONT_RULES,
    *PLAN_RULES,
)
