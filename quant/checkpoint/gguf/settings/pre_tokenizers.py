"""How byte-level tokenizers split text before they merge, by the names that GGUF files have for it.

The patterns are those of the models' own `tokenizer.json`, where llama.cpp rewrites them for an
engine without `(?i:…)` and classes of case; the names are those of `llama_vocab::impl::load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}|{_SLASH_REST}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|{_SLASH_REST}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"


@dataclass(frozen=True)
class PreTokenizer:
    """The patterns by which text is split, one after the other.

    `ignore_merges`: a piece that is a token as a whole is not merged. `adds_bos`: texts begin with
    the BOS token unless the file says otherwise. `normalizes`: to Unicode's form NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


_LIKE_GPT2 = PreTokenizer((_GPT2,))
_LIKE_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_LIKE_QWEN2 = PreTokenizer((_QWEN2,), normalizes=True)
_BY_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LIKE_GPT4O = PreTokenizer((_GPT4O,))
_LIKE_BLOOM = PreTokenizer((_BLOOM,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "jais", "trillion", "exaone4"), _LIKE_GPT2),
    "olmo": PreTokenizer((_GPT2,), normalizes=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LIKE_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "grok-2",
                     "solar-open"), _LIKE_QWEN2),
    "stablelm2": PreTokenizer((_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone",
                     "minerva-7b", "mellum2"), _BY_DIGITS),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _LIKE_GPT4O),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _LIKE_BLOOM),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}  # fmt: skip
"""Pre-tokenizers by `tokenizer.ggml.pre`."""

OF_ARCHITECTURE: Mapping[str, str] = {
    "llama": "llama-bpe",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "bloom": "bloom",
    "gptneox": "olmo",
}
"""What is meant in files of before there were names, or with the name `default`."""
