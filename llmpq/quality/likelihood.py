"""Log-likelihoods of given continuations under a plan, as evaluations by tasks ask for them.

Computed as perplexity is (`llmpq.quality.scoring`): one decoder layer at a time, with each layer's
bits. A layer is loaded once for all continuations whose hidden states fit into host memory
together; those of like length go through it side by side, padded on their right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.stage.layer_stream import LayerStream, Tail
from llmpq.quality.options import EvaluationOptions
from llmpq.quality.scoring import Subject, stream_of
from llmpq.quality.subjects import device_of, names_for, weighed_plan
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.plan.spec import PlanSpec
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import InputError, SpecError

_TOKENS_HELD = 1 << 18
"""Tokens whose hidden states are held at once: 4 GiB of hidden size 4096 in float32."""

_LENGTHS_ALIKE = 16
"""Sequences whose lengths differ by less may be padded to one."""

_LOGITS_AT_ONCE = 1 << 24


class Continuation(NamedTuple):
    """Token ids whose likelihood is asked for, and those before them, of which there is one."""

    context: Sequence[int]
    token_ids: Sequence[int]


class Likelihood(NamedTuple):
    """The log-probability of a continuation in nats, and whether each of its tokens is the most
    probable one.
    """

    logprob: float
    is_greedy: bool


def plan_likelihoods(
    plan: PlanSpec,
    continuations: Sequence[Continuation],
    model: str | None = None,
    options: EvaluationOptions | None = None,
) -> list[Likelihood]:
    """What `plan` gives each of `continuations`, in their order.

    Of contexts that are too long for the model's positions, or the options' `sequence_length`, the
    last tokens count. Raises `InputError` for empty contexts and continuations that are too long,
    and as `Plan.evaluate`.
    """
    options = options or EvaluationOptions()
    names = names_for(plan, model, options)
    shape = model_shape(str(names[0]))
    cut = [_cut(each, shape, options.sequence_length) for each in continuations]
    device = device_of(options.device)
    subject = weighed_plan(plan, names, options, device)
    return likelihoods(stream_of(Checkpoint(names[0], names[2]), [subject], device), subject, cut)


def _cut(asked: Continuation, shape: ModelShape, wanted: int | None) -> Continuation:
    context, token_ids = asked
    if not context:
        raise InputError("a continuation has no token before it; begin with the model's BOS or EOS")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < shape.vocab_size:
        raise InputError(
            f"a continuation has token ids from {min(token_ids)} to {max(token_ids)} where the "
            f"vocabulary has {shape.vocab_size}; it is of another tokenizer"
        )
    if shape.alibi and wanted is None:
        return asked
    positions = wanted or shape.max_positions
    if len(token_ids) > positions:
        raise InputError(
            f"a continuation has {len(token_ids)} tokens, but {positions} are seen at once; cut it "
            "into parts"
        )
    # The last token is only predicted, so that it needs no position.
    return Continuation(context[-max(1, positions + 1 - len(token_ids)) :], token_ids)


@dataclass
class _Group:
    """Sequences of like length, by their number; `token_ids` and `targets` are
    `[sequences, length]`, the next token of each and whether it is asked for in `scored`.
    """

    numbers: Sequence[int]
    token_ids: Tensor
    targets: Tensor
    scored: Tensor


def likelihoods(
    stream: LayerStream, subject: Subject, continuations: Sequence[Continuation]
) -> list[Likelihood]:
    """The likelihood of each of `continuations` by the layers of `subject`.

    Each has a context and fits into the model's positions. Raises `SpecError` for ids beyond the
    vocabulary and logits that are not finite, and `CheckpointError` for unusable weights.
    """
    found = [Likelihood(0.0, True)] * len(continuations)
    for groups in _passes(continuations):
        first = subject.embedding, subject.head_inputs(subject.embedding)
        hidden = [stream.embed(group.token_ids, *first) for group in groups]
        for index in range(stream.layers):
            importance = subject.importance_of(index)
            own = importance.layers[index] if importance is not None else None
            layer = stream.layer(index, hidden[0], subject.layers[index], own)
            for layer.hidden in hidden:
                layer.advance()
        tail = stream.tail(subject.head, subject.head_inputs(subject.head))
        for group, states in zip(groups, hidden, strict=True):
            for number, likelihood in _of_group(stream, tail, group, states):
                found[number] = likelihood
    return found


def _passes(continuations: Sequence[Continuation]) -> Iterator[list[_Group]]:
    """Groups that go through the layers together, the longest last: for models whose frequencies
    depend on it, that one counts.
    """
    lengths = [len(context) + len(token_ids) - 1 for context, token_ids in continuations]
    asked = [number for number, each in enumerate(continuations) if each.token_ids]
    alike: dict[int, list[int]] = {}
    held = 0
    for number in sorted(asked, key=lengths.__getitem__):
        rounded = -(-lengths[number] // _LENGTHS_ALIKE) * _LENGTHS_ALIKE
        if held and held + rounded > _TOKENS_HELD:
            yield [_group(continuations, numbers) for numbers in alike.values()]
            alike, held = {}, 0
        alike.setdefault(rounded, []).append(number)
        held += rounded
    if alike:
        yield [_group(continuations, numbers) for numbers in alike.values()]


def _group(continuations: Sequence[Continuation], numbers: Sequence[int]) -> _Group:
    rows = [
        [*continuations[number].context, *continuations[number].token_ids] for number in numbers
    ]
    longest = max(map(len, rows))
    padded = np.zeros((len(rows), longest), dtype=np.int64)  # no token sees those to its right
    scored = np.zeros((len(rows), longest - 1), dtype=np.bool_)
    for place, (number, row) in enumerate(zip(numbers, rows, strict=True)):
        padded[place, : len(row)] = row
        scored[place, len(continuations[number].context) - 1 : len(row) - 1] = True
    token_ids, targets = torch.from_numpy(padded[:, :-1]), torch.from_numpy(padded[:, 1:])
    return _Group(numbers, token_ids, targets, torch.from_numpy(scored))


@torch.no_grad()
def _of_group(
    stream: LayerStream, tail: Tail, group: _Group, hidden: Tensor
) -> Iterator[tuple[int, Likelihood]]:
    step = stream.sequences_at_once(hidden.shape[1])
    rows_at_once = max(1, _LOGITS_AT_ONCE // stream.config.vocab_size)
    for first in range(0, len(hidden), step):
        part = slice(first, first + step)
        mask = group.scored[part]
        normed = tail.normed(hidden[part]).cpu()[mask]
        blocks = zip(
            normed.split(rows_at_once), group.targets[part][mask].split(rows_at_once), strict=True
        )
        scores = torch.cat([_scores(stream, tail, rows, wanted) for rows, wanted in blocks], dim=1)
        counts = mask.sum(dim=1).tolist()
        for number, own in zip(group.numbers[part], scores.split(counts, dim=1), strict=True):
            logprob = float(own[0].sum())
            if not np.isfinite(logprob):
                raise SpecError(
                    "the model's logits are not finite: its values overflow their type, or the "
                    "weights are damaged; evaluate in float32"
                )
            yield number, Likelihood(logprob, bool(own[1].all()))


def _scores(stream: LayerStream, tail: Tail, rows: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target and whether it is the most probable, float64 `[2, rows]`."""
    logits = tail.logits(rows.to(stream.compute.device)).float()
    wanted = targets.to(logits.device)
    own = logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0]
    greedy = logits.argmax(dim=-1) == wanted
    return torch.stack([own.double(), greedy.double()]).cpu()
