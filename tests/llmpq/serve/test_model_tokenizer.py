"""A tokenizer that many requests share: each gets its own text, whatever the others ask."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llmpq.errors import SpecError
from llmpq.rows.row import Row
from llmpq.serve.engine import GenerationError, PromptTooLongError
from llmpq.serve.model_tokenizer import ModelTokenizer
from llmpq.tokenizing.answer_text import Detokenizer
from llmpq.tokenizing.tokenizer_process import RowLimits
from tests.llmpq.small_tokenizers import ids_of, piece_tokenizer, strip_decoder
from tests.paths import EXAMPLES, ROOT

MODEL = EXAMPLES / "demo_model"


@pytest.fixture(scope="module")
def reference() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def tokenizer() -> Iterator[ModelTokenizer]:
    with closing(ModelTokenizer(MODEL, RowLimits(most_tokens=64))) as made:
        yield made


def test_streams_at_once_get_the_text_of_their_own_tokens(
    tokenizer: ModelTokenizer, reference: AutoTokenizer
) -> None:
    """In few questions, as those that wait go together, and hardly a token is decoded twice."""
    text = (ROOT / "README.md").read_text() + "naïve “quotes” 漢字 😀"
    ids = reference(text)["input_ids"]
    answers = [ids[-50 * (number + 2) :][:100] for number in range(20)]
    exchanged: list[int] = []
    ask = tokenizer._decoder.ask

    async def counted(task):
        exchanged.append(len(task["lists"]))
        return await ask(task)

    tokenizer._decoder.ask = counted

    async def whole(answer: Sequence[int]) -> str:
        detokenizer = Detokenizer(tokenizer.decode, ())
        pieces = [await detokenizer.add(token) for token in answer]
        return "".join([*pieces, await detokenizer.finish()])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(whole, answers))

    made = asyncio.run(all_of_them())
    assert made == [reference.decode(answer, skip_special_tokens=True) for answer in answers]
    tokens = sum(map(len, answers))
    assert len(exchanged) < tokens / 10
    assert sum(exchanged) <= tokens


def test_the_text_of_a_token_is_remembered_behind_texts_alone(tmp_path: Path) -> None:
    pieces = piece_tokenizer(strip_decoder())
    pieces.save_pretrained(tmp_path)
    words = ("<s>", "▁Hello", "▁world", "</s>", "ñ")
    (bos,), (hello,), (world,), (eos,), (first, second) = (ids_of(pieces, each) for each in words)

    async def texts() -> list[str]:
        lists = (
            ((bos,), hello), ((bos, hello), world), ((bos,), world), ((hello, eos), world),
            ((hello, first), second), ((hello, first, second), world), ((world, first), second),
            ((hello,), second), ((bos, hello), world),
        )  # fmt: skip
        return [await made.decode((token,), before) for before, token in lists]

    wanted = ["Hello", " world", "world", " world", "ñ", " world", "ñ", "\ufffd", " world"]
    with closing(ModelTokenizer(tmp_path, RowLimits())) as made:
        assert asyncio.run(texts()) == wanted
        made._decoder.ask = None  # from here on nothing is asked
        last = made.decode((world,), (bos, hello)), made.decode((second,), (hello,))
        assert [asyncio.run(each) for each in last] == [" world", "\ufffd"]


def test_one_that_cannot_be_decoded_takes_no_other_with_it(
    tokenizer: ModelTokenizer, reference: AutoTokenizer
) -> None:
    async def scenario() -> None:
        ids = reference("def f(x):")["input_ids"]
        too_large = 1 << 70  # no number of Rust's
        asked = [tokenizer.decode(each) for each in (ids, [too_large, 5], ids[:2])]
        first, wrong, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first, last) == ("def f(x):", reference.decode(ids[:2], skip_special_tokens=True))
        assert isinstance(wrong, GenerationError)

    asyncio.run(scenario())


def test_a_process_that_was_killed_is_replaced(tokenizer: ModelTokenizer) -> None:
    async def scenario() -> None:
        ids = await tokenizer.encode(Row("a", text="import os"))
        process = tokenizer._decoder.process
        os.kill(process.pid, signal.SIGKILL)
        assert await tokenizer.decode(ids) == "import os"
        with pytest.raises(PromptTooLongError):
            await tokenizer.encode(Row("a", text="word " * 100))

    asyncio.run(scenario())


def test_one_who_leaves_disturbs_nobody(tokenizer: ModelTokenizer) -> None:
    async def scenario() -> None:
        ids = await tokenizer.encode(Row("a", text="import os"))
        leaving, staying = (asyncio.create_task(tokenizer.decode(ids)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == "import os"
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(scenario())


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no tokenizer"):
        ModelTokenizer(tmp_path, RowLimits())
