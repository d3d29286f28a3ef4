"""The rules about options of `llmpq plan` that change nothing beside others."""

from __future__ import annotations

from llmpq.cli.options.prompting import prompting_rule
from planner.option_rules import Rule
from planner.planning_rules import FRONT_RULES, PLAN_RULES

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
        ("in_flight", "predictor"),
        "it is about a job of many prompts; give --input FILE or --prompts COUNT",
        without=("input", "prompts"),
    ),
    Rule(
        ("lengths",),
        "it is about a job of many prompts, or a bound on their latency; give --input FILE or "
        "--prompts COUNT",
        without=("input", "prompts", "max_request_latency_s"),
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
    prompting_rule(without="input"),
)
"""Options of what is planned for that others make useless."""

_BOUND_RULES = (
    Rule(
        ("global_batch",),
        "a batch is done as a whole, the bound is on each request; give --prompts COUNT, --lengths "
        "FILE or --input PATH",
        beside="max_request_latency_s",
    ),
    Rule(
        ("replicas",),
        "the bound is kept by one pipeline, or one that prefills beside one that decodes; leave it "
        "out",
        beside="max_request_latency_s",
    ),
    Rule(
        ("compare",),
        "the paper's baselines are made for a batch; leave it out",
        beside="max_request_latency_s",
    ),
    Rule(
        ("long_rows", "percentile"),
        "requests take only the room that each needs, long ones too; leave it out",
        beside="max_request_latency_s",
    ),
    Rule(
        ("prompt_lengths", "output_lengths"),
        "it is about a bound on the latency of requests; give one (inf: any)",
        without=("max_request_latency_s",),
    ),
    Rule(
        ("prompt_lengths", "output_lengths"),
        "the file has both; give one of them",
        beside="lengths",
    ),
    Rule(("prompt_lengths",), "the input has the prompts; give one of them", beside="input"),
    Rule(("prompt_length",), "give one of them", beside="prompt_lengths"),
    Rule(("new_tokens",), "its MAX is the limit; give one of them", beside="output_lengths"),
)
"""Options that contradict a bound on the latency of requests, and those that need one."""

PLAN_COMMAND_RULES = (
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
    *_BOUND_RULES,
    *_WORKLOAD_RULES,
    *FRONT_RULES,
    *PLAN_RULES,
)
