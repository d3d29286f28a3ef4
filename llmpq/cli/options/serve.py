"""The options of `llmpq-serve`."""

from __future__ import annotations

from actors.messages import TRANSPORTS
from llmpq.cli.common import Parser
from planner.scheduling import CPU_PREFILL_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS, TOKEN_POLICIES

NO_BATCHES = "none"
"""Value of `--batch_dir` for a server without files and batches."""


def serve_parser(description: str | None) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog="llmpq-serve", description=description)
    parser.option(
        "--strat_file_name", "--plan", required=True, metavar="FILE", help="plan of llmpq-algo"
    )
    _add_serving(parser)
    _add_batches(parser)
    _add_stages(parser)
    return parser


def _add_serving(parser: Parser) -> None:
    """Where the server listens, for whom, and how much it takes on."""
    add = parser.option
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for a free one (8000)")
    add(
        "--api_key_file",
        metavar="FILE",
        help="file with the key that clients must send (else LLMPQ_API_KEY of the environment)",
    )
    add(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names by which clients call the model (the plan's)",
    )
    add(
        "--replicas",
        default="1",
        metavar="N",
        help="copies of the plan to serve from, auto for as many as have free devices (1)",
    )
    add("--queue_limit", type=int, default=256, help="answers that may wait for a slot (256)")
    add(
        "--drain_s",
        type=float,
        default=60.0,
        help="seconds that running answers get to finish after SIGTERM (60)",
    )


def _add_batches(parser: Parser) -> None:
    """Files and batches."""
    add = parser.option
    add(
        "--batch_dir",
        metavar="DIR",
        help="folder of /v1/files and /v1/batches, none to serve without (PLAN.batches)",
    )
    add(
        "--file_limit_mib",
        type=float,
        default=200.0,
        help="most MiB of a file for a batch (200)",
    )
    add(
        "--batch_dir_limit_gib",
        type=float,
        default=10.0,
        help="most GiB of all files, beyond which none is taken (10)",
    )


def _add_stages(parser: Parser) -> None:
    """Weights, cache and links of the stages, and what runs on them at once."""
    add = parser.option
    add("--model", help="folder, GGUF file or hub id of the weights (the plan's own)")
    add("--address", help="Ray cluster to join, auto for the one on this machine (a local one)")
    add("--cache_dir", metavar="DIR", help="folder of packed layers for the next start")
    add("--cache_limit_gib", type=float, help="most GiB in that folder")
    parser.add_argument(
        "--no-cache", "--no_cache", action="store_true", help="quantize anew, keep nothing"
    )
    add("--importance", metavar="FILE", help="what weights are rounded by (the plan's)")
    add("--transport", choices=TRANSPORTS, default="auto", help="links between stages (auto)")
    add(
        "--policy",
        choices=sorted(TOKEN_POLICIES),
        help="scheduling: first come, first served, or by expected lengths (the plan's, or orca)",
    )
    add(
        "--predictor",
        metavar="FOLDER",
        help="what s3 expects of lengths: a folder of llmpq-lengths, longest, or trace:FILE "
        "(longest)",
    )
    add(
        "--save_predictor",
        metavar="FOLDER",
        help="write what the predictor has learnt when the server ends",
    )
    add(
        "--max_batch_size",
        type=int,
        help="most requests in a micro-batch (the plan's, or its decode micro-batch)",
    )
    add(
        "--prefill_chunk_tokens",
        type=int,
        help="tokens of a prompt that a micro-batch takes at most, 0 is all (the plan's, or "
        f"{PREFILL_CHUNK_TOKENS}, on CPUs {CPU_PREFILL_CHUNK_TOKENS})",
    )
