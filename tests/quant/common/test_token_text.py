"""The text of an answer is what decoding the prompt together with it adds to the prompt's text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quant.common.text import text_after
from tests.llmpq.small_tokenizers import SPECIAL, ids_of, piece_tokenizer, strip_decoder

_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_CHARACTERS = ("中", "😀", "\n")


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and the tokens of each of its pieces: several where a character is cut."""

    tokenizer: PreTrainedTokenizerFast
    pieces: tuple[tuple[int, ...], ...]

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def of_pieces(decoder: decoders.Decoder) -> Kind:
    tokenizer = piece_tokenizer(decoder)
    words = (*SPECIAL, "▁Hello", "▁world", "world", "▁", *_CHARACTERS)
    return Kind(tokenizer, tuple(tuple(ids_of(tokenizer, each)) for each in words))


def of_words(decoder: decoders.Decoder | None, *words: str) -> Kind:
    tokenizer = piece_tokenizer(decoder, words)
    return Kind(tokenizer, tuple((each,) for each in range(len(SPECIAL) + len(words))))


def of_bytes() -> Kind:
    tokenizer = piece_tokenizer(decoders.ByteLevel(), sorted(_LEVEL.alphabet()))
    tokens = [
        [tokenizer.get_vocab()[byte] for byte in _LEVEL.pre_tokenize_str(text)[0][0]]
        for text in (" ", "a", *_CHARACTERS)
    ]
    return Kind(tokenizer, (*((each,) for each in range(len(SPECIAL))), *map(tuple, tokens)))


def metaspace(scheme: str) -> decoders.Decoder:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])


KINDS = {
    "LLaMA's": of_pieces(strip_decoder()),
    "Metaspace, first": of_pieces(metaspace("first")),
    "Metaspace, always": of_pieces(metaspace("always")),
    "Metaspace, never": of_pieces(metaspace("never")),
    "ByteLevel": of_bytes(),
    "WordPiece": of_words(decoders.WordPiece(), "hello", "##s", "world", "."),
    "BPE with ends of words": of_words(decoders.BPEDecoder(), "a</w>", "b", "c</w>"),
    "no decoder": of_words(None, "a", "b"),
}


@pytest.mark.parametrize("name", KINDS)
@given(st.data())
def test_it_is_what_decoding_both_adds(name: str, data: st.DataObject) -> None:
    """Also where the prompt ends within a character, which then belongs to the answer."""
    kind = KINDS[name]
    pieces = data.draw(st.lists(st.sampled_from(kind.pieces), min_size=1, max_size=12))
    ids = [each for piece in pieces for each in piece]
    cut = data.draw(st.integers(1, len(ids)))
    begins = [sum(map(len, pieces[:number])) for number in range(len(pieces) + 1)]
    whole = max(begin for begin in begins if begin <= cut)
    wanted = kind.text(ids)[len(kind.text(ids[:whole])) :] if cut < len(ids) else ""
    assert text_after(kind.tokenizer, ids[:cut], ids[cut:]) == wanted


@pytest.mark.parametrize("before", [[1], [1, 4, 2]])
def test_special_tokens_stay_where_they_are_asked_for(before: list[int]) -> None:
    """In the answer alone: of a prompt of special tokens no space follows, as without them."""
    tokenizer = KINDS["LLaMA's"].tokenizer
    ids = [*ids_of(tokenizer, "▁world"), 2]
    wanted = "world</s>" if before == [1] else " world</s>"
    assert text_after(tokenizer, before, ids, skip_special_tokens=False) == wanted


def test_what_is_no_character_takes_no_text_of_the_prompt_along() -> None:
    tokenizer = KINDS["LLaMA's"].tokenizer
    before, cut = ids_of(tokenizer, "中"), ids_of(tokenizer, "中")[:1]
    assert tokenizer.decode(before + cut) == "\ufffd" * 4
    assert text_after(tokenizer, before, cut) == "\ufffd"


def test_a_long_prompt_in_bytes_is_taken_up_at_a_character() -> None:
    """The decoder makes nothing of bytes among which one is no part of a character."""
    kind = KINDS["LLaMA's"]
    ids = ids_of(kind.tokenizer, "中" * 50)
    for cut in range(len(ids) - 9, len(ids)):
        assert text_after(kind.tokenizer, ids[:cut], ids[cut:]) == "中" * (
            (len(ids) - cut + 2) // 3
        )
