"""llama.cpp as a contestant of `benchmarks.speed.throughput`; runs in llama.cpp's environment.

    OTHER/bin/python -m benchmarks.speed.throughput_llama MODEL.gguf FORMAT NEW_TOKENS HEAD_TOKENS

Its Python package (`pip install llama-cpp-python gguf`, which builds it for this machine's
instructions) generates for one prompt at a time; here its own functions are called, as
`llama-batched-bench` does: prompts in batches of 2,048 tokens, then a step of all prompts at once.
Every sequence has cells of its own. The first HEAD_TOKENS of all prompts are the same, are computed
once, and are given to every sequence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import Prompts, serve

TOKENS_A_BATCH = 2048
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
FORMATS = {"bf16": None, "Q8_0": "MOSTLY_Q8_0", "Q4_K": "MOSTLY_Q4_K_M"}
"""How weights are held, and llama.cpp's name of what they are quantized to from bfloat16."""

Entry = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are asked for."""


class Decoder:
    """A model with room for `sequences` prompts, of up to `longest` tokens with their answers."""

    def __init__(self, model: Path, sequences: int, longest: int) -> None:
        import llama_cpp

        self._llama: Any = llama_cpp
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(
            str(model).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = sequences * -(-longest // 256) * 256
        settings.n_seq_max = sequences
        settings.n_batch = max(TOKENS_A_BATCH, sequences)
        settings.n_threads = settings.n_threads_batch = THREADS
        settings.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(loaded, settings)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {settings.n_ctx} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._batch = llama_cpp.llama_batch_init(settings.n_batch, 0, 1)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def forget(self) -> None:
        self._llama.llama_memory_clear(self._memory, True)

    def copy_head(self, sequences: int) -> None:
        """Give all that sequence 0 has to the others."""
        for sequence in range(1, sequences):
            self._llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def decode(self, entries: Sequence[Entry]) -> dict[int, int]:
        """Compute a batch; the likeliest next token of each sequence that asks for it."""
        import numpy as np

        batch, asked = self._batch, []
        batch.n_tokens = len(entries)
        for row, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
            if wanted:
                asked.append((row, sequence))
        if code := self._llama.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode returns {code} for {len(entries)} tokens")
        found = {}
        for row, sequence in asked:
            logits = self._llama.llama_get_logits_ith(self._context, row)
            found[sequence] = int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
        return found


def in_batches(
    entries: Sequence[Entry], decode: Callable[[Sequence[Entry]], dict[int, int]]
) -> dict[int, int]:
    found: dict[int, int] = {}
    for first in range(0, len(entries), TOKENS_A_BATCH):
        found |= decode(entries[first : first + TOKENS_A_BATCH])
    return found


def generate(decoder: Decoder, prompts: Prompts, new_tokens: int, head_tokens: int) -> int:
    """Generate greedily for all prompts together; the number of new tokens."""
    decoder.forget()
    if head_tokens:
        head = [(token, at, 0, False) for at, token in enumerate(prompts[0][:head_tokens])]
        in_batches(head, decoder.decode)
        decoder.copy_head(len(prompts))
    rest = [
        (token, at, sequence, at == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for at, token in enumerate(prompt[head_tokens:], head_tokens)
    ]
    latest = in_batches(rest, decoder.decode)
    for step in range(1, new_tokens):
        latest = decoder.decode(
            [
                (token, len(prompts[sequence]) + step - 1, sequence, True)
                for sequence, token in latest.items()
            ]
        )
    return len(prompts) * new_tokens


def quantized(model: Path, held_as: str) -> Path:
    """The model in this format, made by llama.cpp beside the file where it is not there."""
    name = FORMATS[held_as]
    if name is None:
        return model
    import llama_cpp

    target = model.with_name(f"{held_as}.gguf")
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_{name}"), THREADS
    if llama_cpp.llama_model_quantize(str(model).encode(), str(target).encode(), settings):
        raise SystemExit(f"llama.cpp does not write {model} as {held_as}")
    return target


def main() -> None:
    """Load, then generate for each pass; the first prompts tell how much room all need."""
    model, held_as = Path(sys.argv[1]), sys.argv[2]
    new_tokens, head_tokens = int(sys.argv[3]), int(sys.argv[4])
    path = quantized(model, held_as)
    decoders: dict[tuple[int, int], Decoder] = {}

    def run(prompts: Prompts) -> int:
        key = len(prompts), max(map(len, prompts)) + new_tokens
        if key not in decoders:  # in the pass that warms up
            decoders[key] = Decoder(path, *key)
        return generate(decoders[key], prompts, new_tokens, head_tokens)

    serve(run)


if __name__ == "__main__":
    main()
