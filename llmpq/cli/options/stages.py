"""Options of stages that both `llmpq run` and `llmpq serve` have."""

from __future__ import annotations

from actors.messages import TRANSPORTS
from llmpq.cli.parser import OptionGroup


def add_cache(group: OptionGroup) -> None:
    """Add where each node keeps its packed layers."""
    add = group.option
    add(
        "--cache_dir",
        metavar="DIR",
        help="folder of packed layers for the next start (default: the user's cache)",
    )
    add(
        "--cache_limit_gib",
        type=float,
        metavar="GIB",
        help="most GiB in that folder (default: 100, at most half the free space)",
    )
    add("--no_cache", action="store_true", help="quantize anew, keep nothing")


def add_computing(group: OptionGroup) -> None:
    """Add how stages compute, and send to each other."""
    group.option(
        "--deterministic",
        action="store_true",
        help="tokens that do not depend on what is computed beside them, on CPUs, at a lower speed",
    )
    group.option(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="links between stages: gloo, Ray's objects, or auto: gloo where it connects",
    )
