"""What a message between stages may say: its sizes and addresses, held against the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from actors.messages import EVERY_KEY, MicroBatch, TokenIds
from quant.common.errors import StageLostError

MOST_ROWS = 2**62

ADMISSION_BYTES = 16 * 2**20
"""Most bytes of JSON for each request: ids, stop strings, and 256,000 tokens and biases take less.
"""


@dataclass(frozen=True)
class Limits:
    """The most that a message may hold: `requests`, `rows` (one for each new token) and `columns`
    of hidden states, the `slots` that the stages have for requests of at most `max_tokens` each,
    the `kv_tokens` slots for tokens that are in the KV cache, and the `parked_tokens` that may lie
    in host memory.
    """

    requests: int
    rows: int
    columns: int
    slots: int
    max_tokens: int
    kv_tokens: int
    parked_tokens: int = 0


def refuse(what: str) -> NoReturn:
    raise StageLostError(
        f"a message of another stage {what}; either the nodes have different versions of llmpq, or "
        "a stranger can reach the ports of the links: choose --transport ray then"
    )


def check_batch(batch: MicroBatch, rows: int, limits: Limits | None) -> None:
    """Raise `StageLostError` where the `batch` of a message with `rows` of hidden states is not one
    that stages within `limits` compute; there is a row for each token, or for each that the LM head
    computes.
    """
    limits = limits or Limits(*[MOST_ROWS] * 7)
    _check_requests(batch, limits)
    if batch.scored is not None and ((batch.scored < 0) | (batch.scored > batch.counts)).any():
        refuse("scores tokens that there are not")
    if rows not in (len(batch.head_rows), int(batch.counts.sum())):
        refuse(f"has {rows} rows for {int(batch.counts.sum())} tokens")
    order, ends = np.argsort(batch.begins), _own_ends(batch, limits)
    if (batch.begins[order][1:] < ends[order][:-1]).any():
        refuse("has two requests that share token slots")
    _check_parked(batch, limits)
    for move in batch.moves:
        most = limits.kv_tokens - move.tokens
        if move.tokens < 1 or not (0 <= move.begin <= most and 0 <= move.to <= most):
            refuse(
                f"moves {move.tokens} tokens from {move.begin} to {move.to} where there are "
                f"{limits.kv_tokens} token slots"
            )


def _check_requests(batch: MicroBatch, limits: Limits) -> None:
    slots, starts, counts, tokens = batch.slots, batch.starts, batch.counts, limits.max_tokens
    inside = (starts >= 0) & (starts <= tokens) & (counts >= 1) & (counts <= tokens)
    if not (inside & (starts <= tokens - counts)).all():
        refuse(f"has positions outside the {tokens} of a request")
    if (slots < 0).any() or (slots >= limits.slots).any() or len(np.unique(slots)) < len(slots):
        refuse(f"has slots that are none of {limits.slots}, or one twice")
    if not ((batch.begins >= 0) & (batch.begins <= limits.kv_tokens - batch.lengths)).all():
        refuse(f"has ranges outside the {limits.kv_tokens} token slots of the KV cache")


def _check_parked(batch: MicroBatch, limits: Limits) -> None:
    """Raise where tokens are parked or restored that there cannot be; the stage knows the rest."""
    for each in (*batch.parks, *batch.restores, *batch.keeps):
        inside = 0 <= each.begin <= limits.kv_tokens - each.tokens
        if each.key == EVERY_KEY or not 1 <= each.tokens <= limits.parked_tokens or not inside:
            refuse(
                f"parks {each.tokens} tokens from {each.begin} on as number {each.key}, where "
                f"there are {limits.kv_tokens} token slots and {limits.parked_tokens} may be parked"
            )


def _own_ends(batch: MicroBatch, limits: Limits) -> TokenIds:
    """Where each request's token slots end, `[requests]`; raises where tokens leave them."""
    ends: TokenIds = batch.begins + batch.lengths
    if batch.sizes is not None:
        own = batch.sizes
        if (own < batch.lengths).any() or (own > limits.kv_tokens - batch.begins).any():
            refuse(f"has ranges that do not hold their tokens, or are not in {limits.kv_tokens}")
        ends = batch.begins + own
    if not batch.admitted:
        return ends
    rows = {slot: row for row, slot in enumerate(batch.slots.tolist())}
    if len({admission.slot for admission in batch.admitted}) < len(batch.admitted):
        refuse("admits two requests to one slot")
    for admission in batch.admitted:
        row, room = rows.get(admission.slot), admission.room
        if row is None:
            refuse(f"admits a request to slot {admission.slot}, of which it has no tokens")
        is_told = batch.sizes is not None
        least, most = ends[row], ends[row] if is_told else limits.kv_tokens
        if room.begin != batch.begins[row] or not least <= room.end <= most:
            refuse(
                f"admits a request to {room.size} token slots from {room.begin} on, but its tokens "
                f"lie from {batch.begins[row]} up to {ends[row]} of {limits.kv_tokens}"
            )
        ends[row] = room.end
    return ends
