"""The `tokenizer.json` and `tokenizer_config.json` that a GGUF file's vocabulary stands for.

Two kinds of vocabulary belong to our families: byte-level BPE (`gpt2`), whose merges the file has,
and SentencePiece (`llama`), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

from typing import Any

from quant.checkpoint.gguf.settings.control_tokens import control_tokens
from quant.checkpoint.gguf.settings.entries import NO_MODEL, Entries, list_of
from quant.checkpoint.gguf.settings.pre_tokenizers import (
    OF_ARCHITECTURE,
    PRE_TOKENIZERS,
    PreTokenizer,
)
from quant.common.errors import SpecError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_BYTE_LEVEL, _SENTENCE_PIECE = "gpt2", "llama"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = ("bos", "eos", "unknown", "padding")
_SPACE = "▁"
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""What SentencePiece files mean by leaving them out (`llama_vocab::impl::load`)."""


def tokenizer_files(entries: Entries, vocabulary_size: int) -> dict[str, dict[str, Any]]:
    """The content of the files, by name; none where the file has no vocabulary.

    Raises `SpecError` for a vocabulary of another kind, or one that cannot be used.
    """
    kind = entries.text("tokenizer.ggml.model", "none")
    if kind in NO_MODEL:
        return {}
    if kind not in (_BYTE_LEVEL, _SENTENCE_PIECE):
        raise entries.refusal(
            "tokenizer.ggml.model", kind, f"{_BYTE_LEVEL} (byte-level BPE) or {_SENTENCE_PIECE} "
            "(SentencePiece) for a model that llmpq runs"
        )  # fmt: skip
    tokens = entries.tokens(vocabulary_size)
    types = _types(entries, tokens, vocabulary_size)
    if kind == _BYTE_LEVEL:
        made, adds_bos = _byte_level(entries, tokens)
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
    """The types of the tokens: as the file has them, but for control tokens of known texts."""
    normal = [_NORMAL] * len(tokens)
    types = list_of(entries.values.get("tokenizer.ggml.token_type", normal), int)
    if types is None or len(types) < len(tokens):
        raise SpecError(
            f"{entries.path}: tokenizer.ggml.token_type has not a number for each token"
        )
    control = control_tokens(entries, tokens, rows)
    return [_CONTROL if number in control else types[number] for number in range(len(tokens))]


def _byte_level(entries: Entries, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    """A byte-level BPE tokenizer, and whether its texts begin with BOS."""
    name = entries.text("tokenizer.ggml.pre", "default")
    name = OF_ARCHITECTURE[entries.architecture] if name == "default" else name
    rule = PRE_TOKENIZERS.get(str(name))
    if rule is None:
        raise entries.refusal(
            "tokenizer.ggml.pre", name, f"one of {', '.join(sorted(PRE_TOKENIZERS))}: how another "
            "one splits texts is not known here, so that its tokens would be wrong"
        )  # fmt: skip
    merges = list_of(entries.values.get("tokenizer.ggml.merges"), str)
    if merges is None:
        raise SpecError(f"{entries.path}: tokenizer.ggml.merges is no list of texts")
    pairs = [_pair(merge) for merge in merges]
    model = _bpe(tokens, pairs) | {"ignore_merges": rule.ignore_merges}
    made = _tokenizer(model, {"type": "NFC"} if rule.normalizes else None, _split_by(rule))
    made["decoder"] = _byte_level_part(add_prefix_space=True)
    return made, rule.adds_bos


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
    unknown = next((t for n, t in enumerate(tokens) if types[n] == _UNKNOWN), None)
    model = _bpe(tokens, _merges(pieces))
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    spaces: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    texts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if entries.flag("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        texts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    made = _tokenizer(model, {"type": "Sequence", "normalizers": spaces}, None)
    made["decoder"] = {"type": "Sequence", "decoders": texts}
    return made


def _merges(pieces: dict[str, tuple[float, int]]) -> list[list[str]]:
    """All pairs of pieces that make a piece: those of the highest score first, as SentencePiece
    merges them.
    """
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
    """The ids of the tokens that texts begin and end with, by the names in the file."""
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
    """What puts the BOS and EOS tokens around a text, where the file wants them."""
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
