"""The options of `llmpq plan`, beside those of planning, and the rules on them."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.cli.parser import Parser
from llmpq.tokenizing.prompting import PromptingOptions, prompting_rule
from llmpq.workload import DEFAULT_WORKLOAD, LONG_ROWS, SEPARATE
from planner.option_rules import Rule, flag, option
from planner.options import PlanOptions
from planner.planning_rules import FRONT_RULES, PLAN_RULES

PROG = "llmpq-algo"

_DESCRIPTION = """
Decide how many prompts are in flight, the bits and the device of every layer, the order of the
devices, and the micro-batch sizes. Needs no GPU and no weights.
"""
_EXAMPLES = (
    "%(prog)s --model opt-30b --cluster cluster.yaml --prompts 3000 -o plan.json",
    "%(prog)s --model /models/opt-30b --cluster cluster.yaml \\\n"
    "      --input prompts.jsonl --report plan.html -o plan.json",
    "%(prog)s --model opt-30b --device_names T4 V100-32GB --device_numbers 3 1 \\\n"
    "      --global_bz 32 --s 512 --n 100",
    "%(prog)s --model opt-13b --cluster cluster.yaml --lengths lengths.csv \\\n"
    "      --max_request_latency_s 20 --quantile 0.99 -o plan.json",
)
_GROUPS = {
    "what to plan": "model model_name model_size adapters",
    "prompts": "input prompts prompt_length new_tokens global_batch in_flight lengths long_rows "
    "percentile shared_tokens chat_template chat_template_kwargs add_special_tokens tool_parser",
    "cluster": "cluster device_names device_numbers address write_cluster memory_margin "
    "tensor_parallel replicas keep_all_devices",
    "speed against quality": "quality theta max_omega max_ppl_delta max_latency_s",
    "latency of each request": "max_request_latency_s quantile schedule prompt_lengths "
    "output_lengths",
    "output": "output report trace pareto compare json",
    "bits and types": "bits format head_bits kv_bits dtype rounding omega_file importance",
    "measured times": "profiles strict_profiles no_measuring "
    "profile_use|fit|use_profiler_prediction",
    "schedule": "policy predictor max_batch_size prefill_chunk_tokens prefill_micro_batch "
    "decode_micro_batch",
    "search": "method shaq_efficient solver objective group head all_orders search_time_limit "
    "ilp_time_limit relative_gap",
}


@dataclass(frozen=True)
class PlanCommand(PromptingOptions):
    model: str | None = option(
        "MODEL", "folder, GGUF file, config.json, built-in name (opt-30b) or hub id"
    )
    model_name: str | None = option("NAME", "family, as in the paper: opt, bloom")
    model_size: str | None = option("SIZE", "size, as in the paper: 30b")
    input: list[str] | None = option(
        "PATH",
        "plan the job of these prompts: JSON or CSV (also .gz, .zst) or Parquet files, folders, "
        "globs; with --global_bz they only give lengths",
        more={"action": "extend"},
    )
    prompts: int | None = option("COUNT", "plan a job of so many prompts of --s tokens")
    prompt_length: int | None = option(
        "TOKENS",
        f"tokens of every prompt (default: {DEFAULT_WORKLOAD['prompt_length']}, or those of "
        "--input)",
        names=("--s", "--prompt_length"),
    )
    new_tokens: int | None = option(
        "TOKENS",
        "tokens to generate; of --input for rows without max_new_tokens (default: "
        f"{DEFAULT_WORKLOAD['new_tokens']})",
        names=("--n", "--new_tokens"),
    )
    global_batch: int | None = option(
        "COUNT",
        "plan one batch of so many prompts, as in the paper (default: "
        f"{DEFAULT_WORKLOAD['global_batch']})",
        names=("--global_bz", "--global_batch"),
    )
    lengths: str | None = option(
        "FILE",
        "measured lengths: CSV prompt_tokens,output_tokens, or the output of llmpq run, also of a "
        "job that is not done (this with --input)",
    )
    long_rows: str | None = option(
        LONG_ROWS,
        "rows that are much longer than the others get a plan of their own, are an error, or are "
        f"left out of the plan (default: {SEPARATE})",
    )
    percentile: float | None = option(
        "PERCENT",
        "plan for so many per cent of the rows by their tokens, such as 99; longer ones are "
        "handled as --long_rows says, and with --global_bz left out",
    )
    cluster: str | None = option(
        "FILE", "cluster YAML; without one the GPUs of this machine or of Ray are used"
    )
    device_names: list[str] | None = option("NAME", "device types: T4 V100")
    device_numbers: list[int] | None = option("COUNT", "how many of each: 3 1")
    address: str | None = option("ADDRESS", "Ray cluster to detect devices on")
    write_cluster: str | None = option("FILE", "write the cluster that was used, as YAML")
    replicas: int | str | None = option(
        "COUNT",
        "divide the cluster into so many pipelines that share the prompts, or auto, which finds "
        "how many and what of (default: one pipeline)",
    )
    prompt_lengths: list[float] | None = option(
        "TOKENS",
        "tokens of prompts: a normal distribution, cut to 1 to MAX",
        more={"nargs": 3, "metavar": ("MEAN", "STD", "MAX")},
    )
    output_lengths: list[float] | None = option(
        "TOKENS",
        "the same of answers, in place of the limits of --input too",
        more={"nargs": 3, "metavar": ("MEAN", "STD", "MAX")},
    )
    output: str | None = option("FILE", "write the plan as JSON", names=("-o", "--output"))
    report: str | None = option("FILE", "write the plan and its reasons as an HTML page")
    trace: str | None = option(
        "FILE",
        "the simulated batch, or the first fills of a job's slots: .svg is a Gantt picture, else "
        "JSON for Perfetto",
    )
    pareto: str | None = option(
        "FILE",
        "show the front of latency against perplexity, or with --max_request_latency_s requests "
        "per second over bounds (with --report in the page); FILE also takes it, as .svg or .json",
        more={"nargs": "?", "const": ""},
    )
    compare: bool = flag("print the paper's baselines beside the plan")
    json: bool = flag("print the plan as JSON")
    fit: bool = flag(
        "--profile_use fit, as in the paper", more={"dest": "profile_use", "const": "fit"}
    )
    use_profiler_prediction: bool = flag(
        "--profile_use measured, as in the paper", more={"dest": "profile_use", "const": "measured"}
    )
    shaq_efficient: bool = flag(
        "bitwidth transfer (LLM-PQ Alg. 2): --method transfer, as in the paper"
    )


def plan_parser(prog: str | None = PROG) -> Parser:
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, _RULES)
    parser.usage = "%(prog)s --model MODEL [--cluster FILE] [--input PATH ...] [-o FILE] [options]"
    parser.declare(_GROUPS, PlanCommand, PlanOptions)
    return parser


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
    prompting_rule("input"),
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

_RULES = (
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
