"""The model folder that both servers load: random weights with a tokenizer of as many tokens."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

from benchmarks.speed.throughput_cases import VOCABULARY, Case

SPECIAL = ("<unk>", "<s>", "</s>")


def write_served_model(folder: Path, tiny: bool = False) -> None:
    """Save the weights, and a byte-level BPE whose every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    Case("llama", "equal", tiny).write_model(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = [], []
    beginnings = ["Ġ", *ascii_lowercase]
    pairs = [(a, b) for a, b in product(beginnings, ascii_lowercase)]
    triples = [(a + b, c) for (a, b), c in product(pairs, ascii_lowercase)]
    fours = ((ab + c, d) for (ab, c), d in product(triples, ascii_lowercase))
    rest = VOCABULARY - len(SPECIAL) - len(alphabet) - len(pairs) - len(triples)
    for left, right in (*pairs, *triples, *islice(fours, rest)):
        merges.append((left, right))
        words.append(left + right)
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *alphabet, *words))}
    if len(vocabulary) != VOCABULARY:
        raise ValueError(f"the tokenizer has {len(vocabulary)} tokens, not {VOCABULARY}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(folder)
