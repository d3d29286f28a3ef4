"""The `tokenizer.json` and `tokenizer_config.json` that a GGUF file's vocabulary stands for.

Two kinds of vocabulary belong to our families: byte-level BPE (`gpt2`), whose merges the file has,
and SentencePiece (`llama`), whose merges follow from the scores of its pieces. How byte-level ones
split text has names of `llama_vocab::impl::load`; the patterns are those of the models' own
`tokenizer.json`, which llama.cpp rewrites for its engine, without `(?i:…)` and classes of case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quant.checkpoint.gguf.header import NO_MODEL, Entries, list_of
from quant.common.errors import SpecError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}"
_WORD_PIECES = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
_QWEN35 = _WORD_PIECES + r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""That of Qwen2 with marks among the letters."""

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
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴ"
    "ℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with a case, as DeepSeek-V2 has them."""


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a piece that is a token is not merged; `adds_bos` unless the file says
    otherwise; `normalizes` to NFC.
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
    "qwen35": PreTokenizer((_QWEN35,), normalizes=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone",
                     "minerva-7b", "mellum2"), _BY_DIGITS),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _LIKE_GPT4O),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _LIKE_BLOOM),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "deepseek-llm": PreTokenizer((r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                                  r"\s+$", _CJK, r"\p{N}+")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}  # fmt: skip
"""Pre-tokenizers by `tokenizer.ggml.pre`."""

OF_ARCHITECTURE: Mapping[str, str] = {
    "llama": "llama-bpe",
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next"), "qwen2"),
    **dict.fromkeys(("qwen35", "qwen35moe"), "qwen35"),
    "bloom": "bloom",
    "gptneox": "olmo",
}
"""What is meant in files of before there were names, or with the name `default`."""


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
    """Tokens that end answers, told by their texts as llama.cpp tells them, whatever the metadata
    says (`llama_vocab::impl::load`): many conversions give `<|im_end|>` and its like the type of
    plain text, or name only one of several ends.
    """
    texts = frozenset(tokens)
    no_ends = {text for text, sets in _NO_END_BESIDE.items() if any(map(texts.issuperset, sets))}
    named = (entries.token(f"tokenizer.ggml.{key}_token_id", rows) for key in _END_KEYS)
    ends = {number for number in named if number is not None}
    return ends | _of_texts(tokens, _END_TEXTS - no_ends) | _fills(entries, tokens, _ENDING_FILLS)


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


TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_BYTE_LEVEL, _SENTENCE_PIECE, _GEMMA = "gpt2", "llama", "gemma4"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = ("bos", "eos", "unknown", "padding")
_SPACE = "▁"
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""What SentencePiece files mean by leaving them out (`llama_vocab::impl::load`)."""


def tokenizer_files(entries: Entries, vocabulary_size: int) -> dict[str, dict[str, Any]]:
    """The content of files by name, none without vocabulary; SpecError if it is unusable."""
    kind = entries.text("tokenizer.ggml.model", "none")
    if kind in NO_MODEL:
        return {}
    if kind not in (_BYTE_LEVEL, _SENTENCE_PIECE, _GEMMA):
        raise entries.refusal(
            "tokenizer.ggml.model", kind, f"{_BYTE_LEVEL} (byte-level BPE), {_SENTENCE_PIECE} "
            f"(SentencePiece) or {_GEMMA} for a model that llmpq runs"
        )  # fmt: skip
    tokens = entries.tokens(vocabulary_size)
    types = _types(entries, tokens, vocabulary_size)
    if kind == _BYTE_LEVEL:
        made, adds_bos = _byte_level(entries, tokens)
    elif kind == _GEMMA:
        made, adds_bos = _gemma(entries, tokens, types), True
    else:
        made, adds_bos = _sentence_piece(entries, tokens, types), True
    special = _special_tokens(entries, tokens, kind)
    made["added_tokens"] = [
        _added(number, text, types[number] != _USER_DEFINED)
        for number, text in enumerate(tokens)
        if types[number] in (_UNKNOWN, _CONTROL, _USER_DEFINED) or number in special.values()
    ]
    made["post_processor"] = _ends(entries, tokens, special, adds_bos)
    return {TOKENIZER_FILE: made, TOKENIZER_CONFIG_FILE: _settings(entries, tokens, special)}


def _types(entries: Entries, tokens: list[str], rows: int) -> list[int]:
    normal = [_NORMAL] * len(tokens)
    types = list_of(entries.values.get("tokenizer.ggml.token_type", normal), int)
    if types is None or len(types) < len(tokens):
        raise SpecError(
            f"{entries.path}: tokenizer.ggml.token_type has not a number for each token"
        )
    control = end_tokens(entries, tokens, rows) | _fills(entries, tokens, _OTHER_FILLS)
    return [_CONTROL if number in control else types[number] for number in range(len(tokens))]


def _byte_level(entries: Entries, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    name = entries.text("tokenizer.ggml.pre", "default")
    name = OF_ARCHITECTURE.get(entries.architecture) if name == "default" else name
    rule = PRE_TOKENIZERS.get(str(name))
    if rule is None:
        raise entries.refusal(
            "tokenizer.ggml.pre", name, f"one of {', '.join(sorted(PRE_TOKENIZERS))}: how another "
            "one splits texts is not known here, so that its tokens would be wrong"
        )  # fmt: skip
    model = _bpe(tokens, _pairs(entries)) | {"ignore_merges": rule.ignore_merges}
    made = _tokenizer(model, {"type": "NFC"} if rule.normalizes else None, _split_by(rule))
    made["decoder"] = _byte_level_part(add_prefix_space=True)
    return made, rule.adds_bos


def _gemma(entries: Entries, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Gemma 4's: pairs of characters are merged, with `▁` for spaces, by stored ranks."""
    model = _bpe_with_bytes(tokens, types, _pairs(entries))
    space = {"type": "Split", "pattern": {"String": " "}}
    made = _tokenizer(
        model, _replacing(" ", _SPACE), space | {"behavior": "MergedWithPrevious", "invert": False}
    )
    made["decoder"] = {"type": "Sequence", "decoders": [_replacing(_SPACE, " "), *_BYTES]}
    return made


def _replacing(what: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": what}, "content": by}


_BYTES: tuple[dict[str, Any], ...] = ({"type": "ByteFallback"}, {"type": "Fuse"})


def _bpe_with_bytes(tokens: list[str], types: list[int], merges: list[list[str]]) -> dict[str, Any]:
    unknown = next((t for n, t in enumerate(tokens) if types[n] == _UNKNOWN), None)
    more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _bpe(tokens, merges) | more


def _pairs(entries: Entries) -> list[list[str]]:
    merges = list_of(entries.values.get("tokenizer.ggml.merges"), str)
    if merges is None:
        raise SpecError(f"{entries.path}: tokenizer.ggml.merges is no list of texts")
    return [_pair(merge) for merge in merges]


def _pair(merge: str) -> list[str]:
    cut = merge.find(" ", 1)
    return [merge[:cut], merge[cut + 1 :]]


def _split_by(rule: PreTokenizer) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in rule.patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level_part()]}


def _byte_level_part(add_prefix_space: bool = False) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": False,
    }


def _sentence_piece(entries: Entries, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = list_of(entries.values.get("tokenizer.ggml.scores"), (int, float))
    if scores is None or len(scores) < len(tokens):
        raise SpecError(f"{entries.path}: tokenizer.ggml.scores has not a number for each token")
    pieces = {t: (scores[n], n) for n, t in enumerate(tokens) if types[n] == _NORMAL}
    model = _bpe_with_bytes(tokens, types, _merges(pieces))
    spaces, texts = [_replacing(" ", _SPACE)], [_replacing(_SPACE, " "), *_BYTES]
    if entries.flag("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        texts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made = _tokenizer(model, {"type": "Sequence", "normalizers": spaces}, None)
    made["decoder"] = {"type": "Sequence", "decoders": texts}
    return made


def _merges(pieces: dict[str, tuple[float, int]]) -> list[list[str]]:
    """All pairs that make a piece, the highest score first, as SentencePiece merges them."""
    found = [
        (-score, number, text[:cut], text[cut:])
        for text, (score, number) in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    return [[left, right] for _, _, left, right in sorted(found)]


def _bpe(tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: number for number, text in enumerate(tokens)},
        "merges": merges,
    }


def _tokenizer(model: dict[str, Any], normalizer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "model": model,
    }


def _added(number: int, text: str, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _special_tokens(entries: Entries, tokens: list[str], kind: str) -> dict[str, int]:
    found = {}
    for name in _SPECIAL:
        default = _DEFAULT_IDS.get(name) if kind == _SENTENCE_PIECE else None
        number = entries.token(f"tokenizer.ggml.{name}_token_id", len(tokens))
        if number is None and default is not None and default < len(tokens):
            number = default
        if number is not None:
            found[name] = number
    return found


def _ends(
    entries: Entries, tokens: list[str], special: dict[str, int], adds_bos: bool
) -> dict[str, Any] | None:
    wanted = {
        "bos": entries.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": entries.flag("tokenizer.ggml.add_eos_token", False),
    }
    used = {name: tokens[special[name]] for name, is_wanted in wanted.items()
            if is_wanted and name in special}  # fmt: skip
    if not used:
        return None

    def single(type_id: int, sequence: str) -> list[dict[str, Any]]:
        text: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if "bos" in used:
            text.insert(0, {"SpecialToken": {"id": used["bos"], "type_id": type_id}})
        if "eos" in used:
            text.append({"SpecialToken": {"id": used["eos"], "type_id": type_id}})
        return text

    return {
        "type": "TemplateProcessing",
        "single": single(0, "A"),
        "pair": single(0, "A") + single(1, "B"),
        "special_tokens": {
            text: {"id": text, "ids": [special[name]], "tokens": [text]}
            for name, text in used.items()
        },
    }


def _settings(entries: Entries, tokens: list[str], special: dict[str, int]) -> dict[str, Any]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": entries.size("context_length"),
    }
    found |= {names[name]: tokens[number] for name, number in special.items()}
    template = entries.text("tokenizer.chat_template")
    return found | ({} if template is None else {"chat_template": template})
