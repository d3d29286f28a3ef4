"""The scheduling policy of a run, and what can be chosen about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quant.common.errors import SpecError

PolicyName = Literal["static", "orca", "s3"]
"""`static`: the plan's micro-batches of either phase; `orca`: whoever came first, for every
iteration anew, both phases in one micro-batch; `s3`: as `orca`, but each request reserves room for
the answer that is expected of it, and the longest that fits joins first. `actors.schedule.table`
has a scheduler for each."""

POLICY_NAMES: tuple[PolicyName, ...] = ("static", "orca", "s3")
STATIC: PolicyName = "static"
TOKEN_POLICIES: frozenset[PolicyName] = frozenset({"orca", "s3"})
"""Those that count KV memory in tokens and mix both phases in a micro-batch."""
PREDICTING: PolicyName = "s3"
"""The one whose requests reserve by predicted lengths."""

PREFILL_CHUNK_TOKENS = 64
"""Tokens of a part of a prompt that `orca` gives where nobody says otherwise.

In simulations of jobs with real lengths (`benchmarks.token_slots`) they gave 1.2 to 1.3 times the
tokens per second of whole prompts, as stages wait less for long ones, and with prompts all alike
0.94 to 0.99 times; parts of 32 gave more to the former and less to the latter."""


@dataclass(frozen=True)
class PolicyOptions:
    """The policy by its `name`, and for one of `TOKEN_POLICIES` the most requests in a micro-batch
    (None: as many as the plan's decode micro-batch has) and the tokens of a prompt that one
    micro-batch takes at most (0: a prompt is never parted).

    Raises `SpecError` for a policy that does not exist, a number out of range, and for options that
    the policy does not have.
    """

    name: PolicyName = "static"
    max_batch_size: int | None = None
    prefill_chunk_tokens: int = 0

    @property
    def mixed_requests(self) -> int:
        """Most requests of a micro-batch that mixes the phases, where that is known; else 0."""
        return self.max_batch_size or 0

    def __post_init__(self) -> None:
        """Check the name, the numbers, and whether the policy has them."""
        if self.name not in POLICY_NAMES:
            raise SpecError(f"policy is {self.name!r}; it must be one of {', '.join(POLICY_NAMES)}")
        for option, value, least, unset in (
            ("max_batch_size", self.max_batch_size, 1, None),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens, 0, 0),
        ):
            if value == unset:
                continue
            if type(value) is not int or value < least:
                raise SpecError(f"{option} is {value!r}; it must be a whole number from {least}")
            if self.name not in TOKEN_POLICIES:
                raise SpecError(
                    f"{option} has no effect with policy {self.name}; leave it out, or choose "
                    "policy orca or s3"
                )


def policy_options(
    name: PolicyName, max_batch_size: int | None, prefill_chunk_tokens: int | None
) -> PolicyOptions:
    """The policy with what a user has said of it; None stands for what was not said."""
    if prefill_chunk_tokens is None:
        prefill_chunk_tokens = PREFILL_CHUNK_TOKENS if name in TOKEN_POLICIES else 0
    return PolicyOptions(name, max_batch_size, prefill_chunk_tokens)
