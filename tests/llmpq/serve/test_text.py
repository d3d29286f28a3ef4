"""Texts that come token by token are those of all tokens at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.tokenizing.answer_text import Detokenizer, StopStrings
from quant.common.text import MOST_BEFORE, text_after
from tests.llmpq.small_tokenizers import SPECIAL, ids_of, piece_tokenizer, strip_decoder

FALLBACK = piece_tokenizer(strip_decoder())


async def decode_fallback(token_ids: Sequence[int], before: Sequence[int]) -> str:
    return text_after(FALLBACK, before, token_ids)


async def decode_bytes(token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
    return bytes(each for each in token_ids if each < 256).decode("utf-8", "replace")


def pieces_of(decode, token_ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    async def collect() -> list[str]:
        detokenizer = Detokenizer(decode, before)
        found = [await detokenizer.add(each) for each in token_ids]
        return [*found, await detokenizer.finish()]

    return asyncio.run(collect())


@given(st.text(max_size=20))
def test_no_character_is_cut(text: str) -> None:
    pieces = pieces_of(decode_bytes, text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(
    st.lists(st.sampled_from([*SPECIAL, "▁world", "▁", "world", "€", "😀"]), max_size=12),
    st.integers(0, 9),
)
def test_pieces_are_what_decoding_prompt_and_answer_adds(words: list[str], prompt: int) -> None:
    """Also where the prompt is a BOS token, or ends within a character."""
    words = ["<s>", *words]
    ids = [each for word in words for each in ids_of(FALLBACK, word)]
    cut = min(1 + prompt, len(ids))
    begins = [sum(len(ids_of(FALLBACK, word)) for word in words[:n]) for n in range(len(words) + 1)]
    whole = max(begin for begin in begins if begin <= cut)
    texts = [FALLBACK.decode(each, skip_special_tokens=True) for each in (ids, ids[:whole])]
    wanted = texts[0][len(texts[1]) :] if cut < len(ids) else ""
    assert "".join(pieces_of(decode_fallback, ids[cut:], ids[:cut])) == wanted


def test_a_character_that_is_never_whole_is_shown_at_the_end() -> None:
    assert pieces_of(decode_bytes, b"a\xe2\x82") == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    pieces = pieces_of(decode_bytes, b"\xff" * 50)
    assert "".join(pieces) == "\ufffd" * 50
    assert all(any(pieces[begin : begin + 5]) for begin in range(45))


def test_special_tokens_take_no_room() -> None:
    """Nor the place of the tokens with a text before them."""
    longest = 0

    async def decode(token_ids: Sequence[int], before: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(before) + len(token_ids))
        return await decode_fallback(token_ids, before)

    (world,) = ids_of(FALLBACK, "▁world")
    ids = (*[2] * 50, world, *[2] * 50, world)
    assert "".join(pieces_of(decode, ids, (1, world))) == " world world"
    assert longest <= MOST_BEFORE + 1


def shown(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    """What is given out after each piece, as a client sees it."""
    searching, found = StopStrings(stops), []
    for piece in pieces:
        found.append(searching.add(piece))
        if searching.found:
            return found, True
    return [*found, searching.finish()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "wanted"),
    [
        (["END"], ["abE", "N", "D", "x"], (["ab", "", ""], True)),
        (["END"], ["abE", "N", "x"], (["ab", "", "ENx", ""], False)),
        (["END"], ["E"], (["", "E"], False)),
        (["aab"], ["aa", "a", "b"], (["", "a", ""], True)),
        (["xyz", "y"], ["wx", "y"], (["w", "x"], True)),
        (["cd", "bcde"], ["ab", "cd"], (["a", "b"], True)),
        ([], ["ab"], (["ab", ""], False)),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], wanted: tuple[list[str], bool]) -> None:
    assert shown(stops, pieces) == wanted


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=8),
)
def test_nothing_is_shown_that_must_be_taken_back(stops: list[str], pieces: list[str]) -> None:
    """Against the definition: the text ends where the first stop string stands, when it is seen."""
    seen = ""
    for piece in pieces:
        seen += piece
        ends = [seen.find(stop) for stop in stops if stop in seen]
        if ends:
            seen = seen[: min(ends)]
            break
    given_out, _ = shown(stops, pieces)
    assert "".join(given_out) == seen
