"""Choosing the next token of every request in one batched call, and seeing that a request has
ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from actors.messages import Admission, FinishReason, MicroBatch, Sampled, Sampling, TokenIds
from quant.errors import CheckpointError


class Decoder(Protocol):
    """The part of a tokenizer that finding stop strings needs."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Text of `token_ids`."""


@dataclass
class _Running:
    """A request in a slot, and the tokens it has been given."""

    admission: Admission
    token_ids: list[int] = field(default_factory=list)


class Sampler:
    """Keeps the running requests of the last stage by slot.

    `eos_token_ids` end a request unless its sampling says `ignore_eos`; `tokenizer` is only needed
    for stop strings and is loaded by `for_checkpoint` when the first request brings one.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        tokenizer: Decoder | None = None,
        folder: Path | None = None,
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._folder = folder
        self._running: dict[int, _Running] = {}

    @classmethod
    def for_checkpoint(cls, folder: Path, config: PretrainedConfig) -> Sampler:
        """A sampler with the checkpoint's own end-of-sequence tokens."""
        return cls(eos_token_ids(folder, config), folder=folder)

    def sample(self, batch: MicroBatch, logits: Tensor) -> Sampled:
        """One token for each request of `batch`; `logits`: `[requests, vocabulary]`."""
        for admission in batch.admitted:
            self._running[admission.slot] = _Running(admission, list(admission.generated))
        running = [self._running[int(slot)] for slot in batch.slots]
        finite = logits.amax(-1).isfinite()  # the largest of a row with NaN is NaN
        if not finite.all():
            logits = logits.masked_fill(~finite[:, None], 0.0)
        tokens = choose_tokens(
            logits,
            [r.admission.sampling for r in running],
            [
                uniform_draw(r.admission.sampling.seed, r.admission.custom_id, len(r.token_ids))
                if r.admission.sampling.temperature > 0
                else 0.0
                for r in running
            ],
        )
        reasons = []
        for slot, request, token, is_finite in zip(
            batch.slots, running, tokens, finite.tolist(), strict=True
        ):
            request.token_ids.append(int(token))
            reason = self._finish_reason(request) if is_finite else "error"
            reasons.append(reason)
            if reason is not None:
                del self._running[int(slot)]
        return Sampled(tokens, tuple(reasons))

    def _finish_reason(self, request: _Running) -> FinishReason | None:
        sampling = request.admission.sampling
        if not sampling.ignore_eos and request.token_ids[-1] in self._eos:
            return "stop"
        if sampling.stop and self._meets_stop_string(request.token_ids, sampling.stop):
            return "stop"
        return "length" if len(request.token_ids) >= request.admission.max_new_tokens else None

    def _meets_stop_string(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the newest token completes a stop string: look at the tail it can lie in.

        Every token stands for at least one byte, and a character is at most four. Special tokens
        are kept in the text, as they may be what the user wants to stop at.
        """
        tail = max(len(s.encode()) for s in stop) + 4
        text = self._decoder().decode(token_ids[-tail:], skip_special_tokens=False)
        return any(s in text for s in stop)

    def _decoder(self) -> Decoder:
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)
        return self._tokenizer


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """End-of-sequence tokens of a checkpoint: its generation config's, else its model config's."""
    found = None
    if (folder / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / 'generation_config.json'} cannot be read: {error}; mend or delete it"
            ) from error
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def uniform_draw(seed: int, custom_id: str, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the request and the token's position in it."""
    digest = hashlib.blake2b(f"{seed}\0{position}\0{custom_id}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "big") >> 11) * 2.0**-53)


def choose_tokens(logits: Tensor, sampling: Sequence[Sampling], draws: Sequence[float]) -> TokenIds:
    """Next tokens `[requests]` for `logits` `[requests, vocabulary]`, by inverse transform of
    `draws`.
    """
    tokens = logits.max(-1).indices  # of bfloat16 on a CPU six times as fast as argmax
    random_rows = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        chosen = [sampling[i] for i in random_rows]
        probabilities, order = filtered_probabilities(logits[rows], chosen)
        cumulative = probabilities.cumsum(-1)
        u = torch.tensor([[draws[i]] for i in random_rows], dtype=cumulative.dtype)
        rank = torch.searchsorted(cumulative, u.to(logits.device) * cumulative[:, -1:], right=True)
        last_kept = (probabilities > 0).sum(-1, keepdim=True) - 1
        tokens[rows] = order.gather(-1, rank.minimum(last_kept))[:, 0]
    result: TokenIds = tokens.cpu().numpy().astype(np.int64)
    return result


def filtered_probabilities(logits: Tensor, sampling: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order after temperature, top-k and top-p, and the tokens they are
    of.

    Both `[requests, vocabulary]`; removed tokens have probability 0. As in transformers, top-k is
    taken before top-p, and the most probable token always stays.
    """
    device = logits.device
    temperature = torch.tensor(
        [[s.temperature] for s in sampling], device=device, dtype=torch.float64
    )
    # The greatest logit becomes 0 first: no temperature, however small, then makes infinities.
    below = logits.double() - logits.double().amax(-1, keepdim=True)
    scaled, order = (below / temperature).sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[-1]
    kept = [[min(s.top_k or vocabulary, vocabulary)] for s in sampling]
    top_k = torch.tensor(kept, device=device)
    scaled = scaled.masked_fill(torch.arange(vocabulary, device=device) >= top_k, -torch.inf)
    probabilities = scaled.softmax(-1)
    top_p = torch.tensor([[s.top_p] for s in sampling], device=device, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True), order
