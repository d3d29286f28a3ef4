"""Perplexity on windows of a text, one decoder layer at a time.

Windows do not overlap, and the first token of each is not scored, as nothing precedes it. Several
subjects are measured in one pass over the layers: each form of a layer is loaded once, and subjects
share hidden states as far as their first layers agree. Predictions are compared with those of the
reference (the first subject at 16 bit, else the first), by their Kullback-Leibler divergence, while
its logits of the same tokens are at hand: none are kept or computed twice. Memory: one layer (or
embedding or head); hidden states of all tokens for every subject that differs, in host memory;
logits of `_LOGITS_AT_ONCE` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.stage.layer_stream import LayerStream, Tail, compute_on
from llmpq.quality.perplexity import Perplexity, ReportProgress
from llmpq.quality.text_windows import Windows
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from quant.linear import dtype_name
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import Importance, InputStatistics
from quant.scheme import FULL_BITS, WEIGHTED

_LOGITS_AT_ONCE = 1 << 24
"""Logits worked on at once: 64 MB in float32, twice that for their logarithms, and twice that for
the probabilities of the reference."""

_MOST_NATS = 700.0
"""A mean beyond it has no perplexity in float64; an even guess over 2^32 tokens costs 22."""

_PLAIN = LayerScheme()


@dataclass(frozen=True)
class Subject:
    """A form for each decoder layer, and those of embedding and head.

    Their types are None where they are those of the whole computation. `importance`: what
    weights are rounded by.
    """

    name: str
    layers: tuple[LayerScheme, ...]
    embedding: LayerScheme = _PLAIN
    head: LayerScheme = _PLAIN
    importance: Importance | None = None

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """What it computes in; float32 stands for the type of the whole computation."""
        found = {scheme.dtype for scheme in (*self.layers, self.embedding, self.head)}
        return frozenset(dtype or torch.float32 for dtype in found)

    def head_inputs(self, scheme: LayerScheme) -> InputStatistics | None:
        """What an end of this `scheme` is rounded by, where it is by what the head gets."""
        if self.importance is None or not scheme.rounds or scheme.rounding != WEIGHTED:
            return None
        return self.importance.layers[-1].of_head

    def importance_of(self, index: int) -> Importance | None:
        """What layer `index` is rounded by; None where nothing in it is rounded."""
        scheme = self.layers[index]
        uses = scheme.rounds or scheme.kv_bits != FULL_BITS
        return self.importance if uses else None


def stream_of(
    checkpoint: Checkpoint | Path, subjects: Sequence[Subject], device: torch.device
) -> LayerStream:
    """The checkpoint's layers for all `subjects`, in a type that holds each of theirs exactly."""
    dtypes = frozenset[torch.dtype]().union(*(subject.dtypes for subject in subjects))
    storage = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    return LayerStream(checkpoint, compute_on(device, storage))


def evaluate(
    checkpoint: Checkpoint | Path,
    windows: Windows,
    subjects: Sequence[Subject],
    device: torch.device,
    progress: ReportProgress | None = None,
) -> list[Perplexity]:
    """Perplexity of every subject, in their order, and its divergence from the reference.

    Raises `CheckpointError` for unusable weights, `SpecError` for ids beyond the vocabulary,
    windows beyond the model's positions, and logits that are not finite.
    """
    stream = stream_of(checkpoint, subjects, device)
    token_ids = torch.from_numpy(windows.token_ids)
    represented: dict[tuple[int, LayerScheme], frozenset[str]] = {}
    branches = _embedded(stream, token_ids, subjects)
    for index in range(stream.layers):
        branches = list(_through(stream, index, branches, subjects, represented))
        if progress is not None:
            progress(index + 1, stream.layers)
    reference = _reference(subjects)
    outlets = _outlets(stream, branches, subjects)
    outlets.sort(key=lambda outlet: reference not in outlet.members)
    nats = _window_nats(stream, outlets, windows)
    results: dict[int, Perplexity] = {}
    for outlet, (nll, divergence) in zip(outlets, nats, strict=True):
        for member in outlet.members:
            apart = None if member == reference else divergence
            results[member] = _result(subjects[member], windows, nll, apart, represented)
    return [results[member] for member in range(len(subjects))]


_Form = tuple[LayerScheme, str | None]
"""The form of a layer, and the fingerprint of the importance that it is rounded by."""

_End = tuple[LayerScheme, InputStatistics | None]
"""The form of embedding or head, and what it is rounded by."""


@dataclass
class _Branch:
    """Subjects whose layers have been alike so far, and their hidden states."""

    hidden: Tensor
    members: tuple[int, ...]


def _embedded(stream: LayerStream, token_ids: Tensor, subjects: Sequence[Subject]) -> list[_Branch]:
    alike: dict[_End, list[int]] = {}
    for member, subject in enumerate(subjects):
        scheme = subject.embedding
        alike.setdefault((scheme, subject.head_inputs(scheme)), []).append(member)
    return [
        _Branch(stream.embed(token_ids, *end), tuple(members)) for end, members in alike.items()
    ]


def _through(
    stream: LayerStream,
    index: int,
    branches: Sequence[_Branch],
    subjects: Sequence[Subject],
    represented: dict[tuple[int, LayerScheme], frozenset[str]],
) -> Iterator[_Branch]:
    """The branches after layer `index`, which is loaded once in every form that one asks for."""
    wanted: dict[_Form, list[tuple[_Branch, tuple[int, ...]]]] = {}
    uses: dict[int, int] = {}
    for branch in branches:
        parts: dict[_Form, list[int]] = {}
        for member in branch.members:
            form = _form(subjects[member], index)
            parts.setdefault(form, []).append(member)
        uses[id(branch)] = len(parts)
        for form, alike in parts.items():
            wanted.setdefault(form, []).append((branch, tuple(alike)))
    for (scheme, fingerprint), parts_of in wanted.items():
        importance = subjects[parts_of[0][1][0]].importance
        own = importance.layers[index] if importance and fingerprint else None
        layer = stream.layer(index, parts_of[0][0].hidden, scheme, own)
        represented[index, scheme] = layer.represented
        for branch, members in parts_of:
            uses[id(branch)] -= 1
            is_last_use = uses[id(branch)] == 0
            layer.hidden = branch.hidden if is_last_use else branch.hidden.clone()
            layer.advance()
            yield _Branch(layer.hidden, members)


def _form(subject: Subject, index: int) -> _Form:
    """The form of layer `index`; what is not rounded is alike by any importance."""
    importance = subject.importance_of(index)
    return subject.layers[index], None if importance is None else importance.fingerprint


def _reference(subjects: Sequence[Subject]) -> int:
    """The first subject with all layers at 16 bit; the first one where there is none."""
    is_full = (
        not any(
            scheme.rounds or scheme.kv_bits != FULL_BITS
            for scheme in (*subject.layers, subject.embedding, subject.head)
        )
        for subject in subjects
    )
    return next((number for number, full in enumerate(is_full) if full), 0)


@dataclass
class _Outlet:
    """Hidden states after the last layer, with the head that they go through."""

    hidden: Tensor
    tail: Tail
    members: tuple[int, ...]


def _outlets(
    stream: LayerStream, branches: Sequence[_Branch], subjects: Sequence[Subject]
) -> list[_Outlet]:
    """Every branch with each head that its subjects ask for."""
    tails: dict[_End, Tail] = {}
    found = []
    for branch in branches:
        alike: dict[_End, list[int]] = {}
        for member in branch.members:
            scheme = subjects[member].head
            alike.setdefault((scheme, subjects[member].head_inputs(scheme)), []).append(member)
        for end, members in alike.items():
            if end not in tails:
                tails[end] = stream.tail(*end)
            found.append(_Outlet(branch.hidden, tails[end], tuple(members)))
    return found


Nats = npt.NDArray[np.float64]


def _window_nats(
    stream: LayerStream, outlets: Sequence[_Outlet], windows: Windows
) -> list[tuple[Nats, Nats]]:
    """Summed negative log-likelihood and divergence from the first outlet of each window's scored
    tokens, `[windows]` both, by outlet.
    """
    sums = np.zeros((len(outlets), 2, len(windows.counts)))
    length = windows.token_ids.shape[1]
    step = stream.sequences_at_once(length)
    rows_at_once = max(1, _LOGITS_AT_ONCE // stream.config.vocab_size)
    scored = np.arange(1, length) < windows.counts[:, None]  # [windows, length - 1]
    for first in range(0, len(windows.counts), step):
        part = slice(first, first + step)
        mask = torch.from_numpy(scored[part])
        normed = [o.tail.normed(o.hidden[part])[:, :-1].cpu()[mask] for o in outlets]
        targets = torch.from_numpy(windows.token_ids[part, 1:])[mask].split(rows_at_once)
        # by outlet and block: the rows [tokens, head_width] that a head takes at once
        blocks = [rows.split(rows_at_once) for rows in normed]
        parts = [
            _block_nats(stream, outlets, rows, wanted)
            for *rows, wanted in zip(*blocks, targets, strict=True)
        ]
        owner = torch.arange(len(mask))[:, None].expand_as(mask)[mask].numpy()
        for own, values in zip(sums, torch.cat(parts, dim=-1), strict=True):
            for total, nats in zip(own, values, strict=True):
                total[part] = np.bincount(owner, nats.numpy(), minlength=len(mask))
    return [(nll, divergence) for nll, divergence in sums]


@torch.no_grad()
def _block_nats(
    stream: LayerStream, outlets: Sequence[_Outlet], rows: Sequence[Tensor], targets: Tensor
) -> Tensor:
    """Negative log-likelihoods and divergences of a block of tokens, float64 `[outlets, 2, tokens]`
    on the host.

    `rows`: for each outlet what goes into the head, `[tokens, head_width]`.
    """
    device = stream.compute.device
    wanted = targets.to(device)[:, None]
    expected = weights = None
    found = torch.zeros(len(outlets), 2, len(targets), dtype=torch.float64)
    for outlet, normed, nats in zip(outlets, rows, found, strict=True):
        logits = outlet.tail.logits(normed.to(device)).float()
        own = torch.log_softmax(logits, dim=-1)
        del logits
        nats[0] = own.gather(1, wanted)[:, 0].neg()
        if expected is None or weights is None:
            expected = own
            weights = own.exp() if len(outlets) > 1 else own
            continue
        apart = torch.sub(expected, own, out=own)
        nats[1] = torch.linalg.vecdot(weights, apart)
    return found


def _result(
    subject: Subject,
    windows: Windows,
    nll: Nats,
    divergence: Nats | None,
    represented: Mapping[tuple[int, LayerScheme], frozenset[str]],
) -> Perplexity:
    mean = float(nll.sum() / windows.scored)
    if not mean < _MOST_NATS:
        raise SpecError(
            f"{subject.name}: the model's logits are not finite: its values overflow "
            f"{' and '.join(_names(subject))}, or the weights are damaged; evaluate with --dtype "
            "float32"
        )
    stood_for: dict[str, list[int]] = {}
    for index, scheme in enumerate(subject.layers):
        for backend in sorted(represented[index, scheme]):
            stood_for.setdefault(backend, []).append(index)
    return Perplexity(
        name=subject.name,
        bitwidths=tuple(scheme.bits for scheme in subject.layers),
        window_nll=tuple(nll.tolist()),
        window_tokens=tuple((windows.counts - 1).tolist()),
        window_divergence=None if divergence is None else tuple(divergence.tolist()),
        dtypes=_names(subject),
        represented={backend: tuple(layers) for backend, layers in stood_for.items()},
    )


def _names(subject: Subject) -> tuple[str, ...]:
    return tuple(sorted(dtype_name(dtype) for dtype in subject.dtypes))
