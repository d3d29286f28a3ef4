"""Tokens that steer a model or end its answers, told by their texts as llama.cpp tells them.

Many conversions give `<|im_end|>` and its like the type of plain text, or name only one of several
ends. llama.cpp goes by the texts (`llama_vocab::impl::load`), whatever the metadata says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quant.checkpoint.gguf.settings.entries import Entries

_END_KEYS = ("eos", "eot", "eom")
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip

_NO_END_BESIDE: Mapping[str, tuple[frozenset[str], ...]] = {
    "<|end|>": tuple(map(frozenset, (("<|return|>", "<|call|>"), ("<|return|>", "<|calls|>"),
                                     ("<|call|>", "<|flush|>"), ("<|calls|>", "<|flush|>")))),
    "</s>": (frozenset({"<|tool_response>"}),),
}  # fmt: skip
"""Texts that end no answer where a vocabulary has all of one of these sets too."""

_ENDING_FILLS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OTHER_FILLS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>",
                "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>",
                "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
                "▁<MID>", "<|code_middle|>", "<|middle|>"),
}  # fmt: skip
"""Tokens of filling in the middle, by their names in the metadata; only where a name is missing
does its text tell."""


def end_tokens(entries: Entries, tokens: Sequence[str], rows: int) -> set[int]:
    """The ids of `tokens` at which an answer ends; `rows`: those of the embedding.

    Raises `SpecError` for an id in the metadata that is none.
    """
    texts = frozenset(tokens)
    no_ends = {text for text, sets in _NO_END_BESIDE.items() if any(map(texts.issuperset, sets))}
    named = (entries.token(f"tokenizer.ggml.{key}_token_id", rows) for key in _END_KEYS)
    ends = {number for number in named if number is not None}
    return ends | _of_texts(tokens, _END_TEXTS - no_ends) | _fills(entries, tokens, _ENDING_FILLS)


def control_tokens(entries: Entries, tokens: Sequence[str], rows: int) -> set[int]:
    """The ids of `tokens` that are no part of a text by their texts; `rows` and errors as above."""
    return end_tokens(entries, tokens, rows) | _fills(entries, tokens, _OTHER_FILLS)


def _fills(
    entries: Entries, tokens: Sequence[str], fills: Mapping[str, tuple[str, ...]]
) -> set[int]:
    found = set[int]()
    for key, texts in fills.items():
        named = entries.token(f"tokenizer.ggml.{key}_token_id", len(tokens))
        found |= _of_texts(tokens, texts) if named is None else {named}
    return found


def _of_texts(tokens: Sequence[str], texts: Collection[str]) -> set[int]:
    return {number for number, text in enumerate(tokens) if text in texts}
