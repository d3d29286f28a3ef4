"""Perplexity on windows of a text, one decoder layer at a time.

Windows do not overlap, and the first token of each is not scored, as nothing precedes it. Several
subjects are measured in one pass over the layers: each form of a layer is loaded once, and subjects
share hidden states as far as their first layers agree. Memory: one layer (or embedding or head);
hidden states of all tokens for every subject that differs, in host memory; logits of
`_LOGITS_AT_ONCE` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from actors.stage.layer_stream import LayerStream, Tail, compute_on
from llmpq.quality.perplexity import Perplexity, ReportProgress
from llmpq.quality.text_windows import Windows
from quant.common.errors import SpecError
from quant.importance.file import Importance
from quant.linear import dtype_name
from quant.loading.emulated_kernels import LayerScheme

_LOGITS_AT_ONCE = 1 << 24
"""Logits worked on at once: 64 MB in float32, and twice that for their logarithms."""

_MOST_NATS = 700.0
"""A mean beyond it has no perplexity in float64; an even guess over 2^32 tokens costs 22."""


@dataclass(frozen=True)
class Subject:
    """A form for each decoder layer, and the types of embedding and head.

    Types are None where they are those of the whole computation. `importance`: what weights are
    rounded by.
    """

    name: str
    layers: tuple[LayerScheme, ...]
    embedding_dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    importance: Importance | None = None


def evaluate(
    checkpoint: Path,
    windows: Windows,
    subjects: Sequence[Subject],
    device: torch.device,
    progress: ReportProgress | None = None,
) -> list[Perplexity]:
    """Perplexity of every subject, in their order.

    Raises `CheckpointError` for unusable weights, `SpecError` for subjects of another number of
    layers, ids beyond the vocabulary, windows beyond the model's positions, and logits that are
    not finite.
    """
    dtypes = {dtype for subject in subjects for dtype in _dtypes(subject)}
    storage = dtypes.pop() if len(dtypes) == 1 else torch.float32  # holds each of them exactly
    stream = LayerStream(checkpoint, compute_on(device, storage))
    for subject in subjects:
        if len(subject.layers) != stream.layers:
            raise SpecError(
                f"{subject.name}: {len(subject.layers)} bitwidths where the model has "
                f"{stream.layers} layers; give one number for all, or one for each layer"
            )
    token_ids = torch.from_numpy(windows.token_ids)
    represented: dict[tuple[int, LayerScheme], frozenset[str]] = {}
    branches = _embedded(stream, token_ids, subjects)
    for index in range(stream.layers):
        branches = list(_through(stream, index, branches, subjects, represented))
        if progress is not None:
            progress(index + 1, stream.layers)
    results: dict[int, Perplexity] = {}
    tails: dict[torch.dtype | None, Tail] = {}
    for branch in branches:
        for member in branch.members:
            subject = subjects[member]
            if subject.head_dtype not in tails:
                tails[subject.head_dtype] = stream.tail(subject.head_dtype)
            nll = _window_nll(stream, tails[subject.head_dtype], branch.hidden, windows)
            results[member] = _result(subject, windows, nll, represented)
    return [results[member] for member in range(len(subjects))]


_Form = tuple[LayerScheme, Importance | None]
"""The form of a layer, and what it is rounded by."""


@dataclass
class _Branch:
    """Subjects whose layers have been alike so far, and their hidden states."""

    hidden: Tensor
    members: tuple[int, ...]


def _embedded(stream: LayerStream, token_ids: Tensor, subjects: Sequence[Subject]) -> list[_Branch]:
    by_type: dict[torch.dtype | None, list[int]] = {}
    for member, subject in enumerate(subjects):
        by_type.setdefault(subject.embedding_dtype, []).append(member)
    return [
        _Branch(stream.embed(token_ids, dtype), tuple(members))
        for dtype, members in by_type.items()
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
            form = subjects[member].layers[index], subjects[member].importance
            parts.setdefault(form, []).append(member)
        uses[id(branch)] = len(parts)
        for form, alike in parts.items():
            wanted.setdefault(form, []).append((branch, tuple(alike)))
    for (scheme, importance), parts_of in wanted.items():
        own = None if importance is None else importance.layers[index]
        layer = stream.layer(index, parts_of[0][0].hidden, scheme, own)
        represented[index, scheme] = layer.represented
        for branch, members in parts_of:
            uses[id(branch)] -= 1
            is_last_use = uses[id(branch)] == 0
            layer.hidden = branch.hidden if is_last_use else branch.hidden.clone()
            layer.advance()
            yield _Branch(layer.hidden, members)


def _window_nll(
    stream: LayerStream, tail: Tail, hidden: Tensor, windows: Windows
) -> npt.NDArray[np.float64]:
    """Summed negative log-likelihood of each window's scored tokens, `[windows]`."""
    sums = np.zeros(len(hidden))
    step = stream.sequences_at_once(hidden.shape[1])
    rows_at_once = max(1, _LOGITS_AT_ONCE // stream.config.vocab_size)
    scored = np.arange(1, hidden.shape[1]) < windows.counts[:, None]  # [windows, length - 1]
    for first in range(0, len(hidden), step):
        part = slice(first, first + step)
        mask = torch.from_numpy(scored[part])
        normed = tail.normed(hidden[part])[:, :-1].cpu()[mask]  # [scored tokens, head_width]
        targets = torch.from_numpy(windows.token_ids[part, 1:])[mask]
        losses = [
            _losses(tail, some, wanted, stream.compute.device)
            for some, wanted in zip(
                normed.split(rows_at_once), targets.split(rows_at_once), strict=True
            )
        ]
        owner = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
        sums[part] = np.bincount(owner.numpy(), torch.cat(losses).numpy(), minlength=len(mask))
    return sums


def _losses(tail: Tail, normed: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    """Negative log-likelihoods float64 `[tokens]`, on the host."""
    logits = tail.logits(normed.to(device)).float()
    losses = functional.cross_entropy(logits, targets.to(device), reduction="none")
    return losses.double().cpu()


def _result(
    subject: Subject,
    windows: Windows,
    nll: npt.NDArray[np.float64],
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
        dtypes=_names(subject),
        represented={backend: tuple(layers) for backend, layers in stood_for.items()},
    )


def _dtypes(subject: Subject) -> set[torch.dtype]:
    found = {scheme.dtype for scheme in subject.layers}
    found |= {subject.embedding_dtype, subject.head_dtype}
    return {dtype or torch.float32 for dtype in found}


def _names(subject: Subject) -> tuple[str, ...]:
    return tuple(sorted(dtype_name(dtype) for dtype in _dtypes(subject)))
