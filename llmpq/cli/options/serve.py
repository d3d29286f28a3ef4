"""The options of `llmpq serve`."""

from __future__ import annotations

from llmpq.cli.options.prompting import add_prompting
from llmpq.cli.options.stages import add_cache, add_computing
from llmpq.cli.parser import OptionGroup, Parser
from llmpq.run.options import CACHE_RULE, PREDICTOR_RULE
from planner.scheduling import CPU_PREFILL_CHUNK_TOKENS, KV_TOKEN_POLICIES, PREFILL_CHUNK_TOKENS

PROG = "llmpq-serve"

NO_BATCHES = "none"
"""Value of `--batch_dir` for a server without files and batches."""

_DESCRIPTION = (
    "Answer OpenAI's HTTP requests from the stages of a plan: pip install 'llmpq[serve]'."
)
_EXAMPLES = (
    "%(prog)s --plan plan.json",
    "%(prog)s --plan plan.json --host 0.0.0.0 --api_key_file key.txt \\\n"
    "      --replicas auto --address auto",
)


def serve_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, (CACHE_RULE, PREDICTOR_RULE))
    _add_serving(parser.group("plan and clients"))
    _add_load(parser.group("load"))
    add_prompting(parser.group("prompts", "of requests that do not say"))
    _add_batches(parser.group("files and batches"))
    _add_stages(parser.group("cluster and weights"))
    _add_schedule(parser.group("schedule"))
    return parser


def _add_serving(group: OptionGroup) -> None:
    """Add what is served, where the server listens, and for whom."""
    add = group.option
    add(
        "--plan",
        "--strat_file_name",
        dest="strat_file_name",
        required=True,
        metavar="FILE",
        help="plan of llmpq plan, or fleet of llmpq plan --replicas",
    )
    add(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="to listen on, by itself for this machine alone",
    )
    add("--port", type=int, metavar="PORT", default=8000, help="to listen on, 0 for a free one")
    add(
        "--api_key_file",
        metavar="FILE",
        help="file with the key that clients must send (default: LLMPQ_API_KEY of the environment)",
    )
    add(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names by which clients call the model (default: the plan's)",
    )


def _add_load(group: OptionGroup) -> None:
    """Add how much the server takes on."""
    add = group.option
    add(
        "--replicas",
        default="1",
        metavar="N",
        help="copies of the plan to serve from, auto for as many as have free devices; a fleet has "
        "its own",
    )
    add(
        "--queue_limit",
        type=int,
        metavar="COUNT",
        default=256,
        help="answers that may wait for a slot",
    )
    add(
        "--drain_s",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="that running answers get to finish after SIGTERM",
    )


def _add_batches(group: OptionGroup) -> None:
    add = group.option
    add(
        "--batch_dir",
        metavar="DIR",
        help="folder of /v1/files and /v1/batches, none to serve without (default: PLAN.batches)",
    )
    add(
        "--file_limit_mib",
        type=float,
        metavar="MIB",
        default=200.0,
        help="most MiB of a file for a batch",
    )
    add(
        "--batch_dir_limit_gib",
        type=float,
        metavar="GIB",
        default=10.0,
        help="most GiB of all files, beyond which none is taken",
    )


def _add_stages(group: OptionGroup) -> None:
    """Add where stages run, their weights, cache and links."""
    add = group.option
    add(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to join, auto for the one on this machine (default: a local one)",
    )
    add(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id of the weights (default: the plan's own)",
    )
    add("--importance", metavar="FILE", help="what weights are rounded by (default: the plan's)")
    add_cache(group)
    add_computing(group)


def _add_schedule(group: OptionGroup) -> None:
    """Add what runs on the stages at once."""
    add = group.option
    add(
        "--policy",
        choices=sorted(KV_TOKEN_POLICIES),
        help="first come, first served, by expected lengths, or by the plan's schedule for a bound "
        "on latency (default: the plan's, or orca)",
    )
    add(
        "--predictor",
        metavar="FOLDER",
        help="what s3 expects of lengths: a folder of llmpq lengths, longest, or trace:FILE "
        "(default: longest)",
    )
    add(
        "--save_predictor",
        metavar="FOLDER",
        help="write what the predictor has learnt when the server ends",
    )
    add(
        "--max_batch_size",
        type=int,
        metavar="COUNT",
        help="most requests in a micro-batch (default: the plan's, or its decode micro-batch)",
    )
    add(
        "--prefill_chunk_tokens",
        type=int,
        metavar="TOKENS",
        help="tokens of a prompt that a micro-batch takes at most, 0 is all (default: the plan's, "
        f"or {PREFILL_CHUNK_TOKENS}, on CPUs {CPU_PREFILL_CHUNK_TOKENS})",
    )
